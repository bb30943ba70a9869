"""Small soft actor-critics of every kind, with networks of a user."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from maze_train.nets.config import ModelConfig
from maze_train.nets.critics import build_soft_actor_critic
from maze_train.spaces.tensors import sampled_for

N = 5
BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (16, 16, 1), np.uint8)
PARTS = spaces.Dict({"at": BOX, "gear": spaces.Discrete(3)})
MASKED = spaces.Dict({"at": BOX, "action_mask": spaces.MultiBinary(4)})
REACH = spaces.Box(-2.0, 3.0, (2,), np.float32)
MIXED = spaces.Dict(
    {
        "aim": REACH,
        "fire": spaces.Discrete(2),
        "menu": spaces.MultiDiscrete([2, 3]),
        "turn": spaces.Box(-1.0, 1.0, (1,), np.float32),
    }
)
PROBLEMS = {
    "box": (BOX, REACH),
    "discrete": (BOX, spaces.Discrete(4)),
    "image": (IMAGE, REACH),
    "parts": (PARTS, MIXED),
    "masked": (MASKED, spaces.Discrete(4)),
}


class OwnCritic(nn.Module):
    """A critic of a user with statistics and a counter that are no parameters."""

    def __init__(self, observation_space, action_size, output_size):
        super().__init__()
        self.norm = nn.BatchNorm1d(3 + action_size)
        self.last = nn.Linear(3 + action_size, output_size)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, obs, actions):
        if self.training:
            self.calls = self.calls + 1  # another tensor each time
        return self.last(self.norm(torch.cat([obs, actions], -1)))


def own(name, **settings):
    """Configuration of a network above."""
    return {"_target_": f"soft_models.{name}", **settings}


def build(name="box", seed=0, num_critics=2, **settings):
    """A small model of a problem above."""
    config = ModelConfig(**{"hidden_sizes": [6, 5], "branch_size": 3, **settings})
    return build_soft_actor_critic(config, *PROBLEMS[name], seed, num_critics)


def observations(name):
    """Observations of a problem, and every second action illegal where there is a mask."""
    obs = sampled_for(PROBLEMS[name][0], N)
    if name == "masked":
        obs["action_mask"] = torch.tensor([[1, 0, 1, 0]]).expand(N, 4)
    return obs


def results(model, name):
    """Distribution parameters, and what critics and targets say of some actions."""
    obs = observations(name)
    inputs, actions = model.inputs(obs), torch.full((N, model.actions.critic_input_size), 0.3)
    with torch.no_grad():
        critics = [c(inputs, actions) for c in (model.critics, model.target_critics)]
        return [model.policy_params(obs), *critics]
