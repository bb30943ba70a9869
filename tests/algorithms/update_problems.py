"""Small rollouts and models of every kind, in float64."""

from __future__ import annotations

import copy

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from maze_train.data.rollout import Rollout
from maze_train.nets.actor_critic import build_actor_critic
from maze_train.nets.config import ModelConfig
from maze_train.nets.template import TemplateNet
from maze_train.spaces.describe import flat_space, flat_spaces

T, B = 6, 3
N = T * B
BOX = spaces.Box(-np.inf, np.inf, (4,), np.float64)
PARTS = spaces.Dict({"pose": BOX, "gear": spaces.Discrete(3, start=1)})
ARM = spaces.Tuple((spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,), np.float64)))

PROBLEMS = {
    "discrete": (BOX, spaces.Discrete(3)),
    "gaussian": (BOX, spaces.Box(-1.0, 1.0, (2,), np.float64)),
    "multi_discrete": (BOX, spaces.MultiDiscrete([2, 3])),
    "dict_obs": (PARTS, spaces.Discrete(3)),
    "dict_obs_tuple_action": (PARTS, ARM),
}

# Numbers whose float32 form is exact: rounding of settings is no part of these tests.
SETTINGS = {"gamma": 0.96875, "gae_lambda": 0.9375, "n_rollout_steps": T}


class OwnNet(nn.Module):
    """A network of a user, with a nonlinearity that no template has."""

    def __init__(self, observation_space, output_size):
        super().__init__()
        self.first = nn.Linear(observation_space.shape[0], 5)
        self.last = nn.Linear(5, output_size)

    def forward(self, obs):
        return self.last(torch.sin(self.first(obs)))


class OwnTemplate(TemplateNet):
    """A template whose forward pass a user has changed."""

    def __init__(self, observation_space, output_size):
        super().__init__(observation_space, ModelConfig(), [5], output_size, 0.5)

    def forward(self, obs):
        return 2.0 * super().forward(obs) + 0.1


def make_model(observation_space, action_space, seed=1, **settings):
    """A small model whose policy head is not close to zero, so that gradients have a size."""
    config = ModelConfig(**{"hidden_sizes": [6, 5], "branch_size": 3, **settings})
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # Own networks are tried out on stored observations.
    model = build_actor_critic(config, observation_space, action_space, seed).double()
    torch.set_default_dtype(default)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.3 * torch.randn(param.shape, generator=generator))
    return model


def random_obs(space, shape, generator):
    """Random observations of a flat space, [*shape, ...]."""

    def leaf(part):
        if isinstance(part, spaces.Discrete):
            low = int(part.start)
            return torch.randint(low, low + int(part.n), shape, generator=generator)
        return torch.randn(*shape, *part.shape, generator=generator)

    if isinstance(space, spaces.Dict):
        return {key: leaf(part) for key, part in space.spaces.items()}
    return leaf(space)


def random_actions(space, shape, generator):
    """Random actions as a distribution samples them: categories from 0, unclipped numbers."""

    def leaf(part):
        if isinstance(part, spaces.Box):
            return 2.0 * torch.randn(*shape, *part.shape, generator=generator)
        if isinstance(part, spaces.Discrete):
            return torch.randint(0, int(part.n), shape, generator=generator)
        columns = [torch.randint(0, int(n), shape, generator=generator) for n in part.nvec]
        return torch.stack(columns, -1)

    parts = {key: leaf(part) for key, part in flat_spaces(space).items()}
    return parts[""] if list(parts) == [""] else parts


def make_rollout(observation_space, action_space, seed=0):
    """A rollout with every kind of episode end: terminal, cut off, both, and in the last row."""
    generator = torch.Generator().manual_seed(seed)
    terminated = torch.zeros(T, B, dtype=torch.bool)
    truncated = torch.zeros(T, B, dtype=torch.bool)
    terminated[2, 0] = truncated[1, 1] = truncated[T - 1, 1] = True
    terminated[4, 1] = truncated[4, 1] = terminated[T - 1, 2] = True
    positions = (truncated & ~terminated).flatten().nonzero().squeeze(-1)
    space = flat_space(observation_space)
    return Rollout(
        obs=random_obs(space, (T + 1, B), generator),
        actions=random_actions(action_space, (T, B), generator),
        rewards=torch.randn(T, B, generator=generator),
        terminated=terminated,
        truncated=truncated,
        final_obs=random_obs(space, (len(positions),), generator),
        final_positions=positions,
    )


def make_problem(name, **model_settings):
    """Model, a copy of it for the reference, rollout and action space."""
    observation_space, action_space = PROBLEMS[name]
    model = make_model(observation_space, action_space, **model_settings)
    rollout = make_rollout(observation_space, action_space)
    return model, copy.deepcopy(model), rollout, action_space


def assert_same_weights(model, reference, before=None):
    """All parameters agree to 1e-9, and have moved."""
    theirs = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        torch.testing.assert_close(
            param.detach(),
            theirs[name].detach(),
            rtol=1e-9,
            atol=1e-10,
            msg=lambda m, n=name: n + m,
        )
    if before is not None:
        moved = [bool((param != before[name]).any()) for name, param in model.named_parameters()]
        assert any(moved)


def snapshot(model):
    """Copies of all parameters by name."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}
