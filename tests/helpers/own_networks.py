"""Custom networks, some of them invalid, and policy wrappers."""

from __future__ import annotations

import math

import torch
from torch import nn

__all__ = ["OddNet", "OwnNet", "Remembers", "Rule", "Wrapper", "own"]


class OwnNet(nn.Module):
    """Network for vector observations and, as a Q-function, actions."""

    def __init__(self, observation_space, output_size, action_size=0, width=4):
        super().__init__()
        size = math.prod(observation_space.shape) + action_size
        self.first = nn.Linear(size, width)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(width, output_size)

    def forward(self, *inputs):
        return self.last(self.dropout(self.first(torch.cat(inputs, -1)).sin()))


class TooWide(OwnNet):
    def __init__(self, observation_space, output_size, **sizes):
        super().__init__(observation_space, output_size + 1, **sizes)


class Flat(OwnNet):
    def forward(self, *inputs):
        return super().forward(*inputs)[:, 0]


class FailsForward(OwnNet):
    def forward(self, *inputs):
        raise RuntimeError("the plug is out")


class TwoOutputs(OwnNet):
    def forward(self, *inputs):
        return super().forward(*inputs), inputs


def not_a_module(**arguments):
    """Return a string instead of a module."""
    return "hello"


class OddNet(nn.Module):
    """Network with a frozen layer, batch norm, and a layer that is used twice."""

    def __init__(self, observation_space, output_size):
        super().__init__()
        self.frozen = nn.Linear(math.prod(observation_space.shape), 9).requires_grad_(False)
        self.norm = nn.BatchNorm1d(9)
        self.shared = nn.Linear(9, 9)
        self.again = self.shared
        self.last = nn.Linear(9, output_size, bias=False)

    def forward(self, obs):
        x = self.norm(self.frozen(obs.float()).sin())
        return self.last(self.again(self.shared(x).tanh()).tanh())


class Wrapper(nn.Module):
    """Wrapper that delegates everything to the model."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.distribution = model.distribution

    def policy_params(self, obs):
        return self.model.policy_params(obs)


class Rule(Wrapper):
    """Wrapper that prefers action 0 if the first entry of the observation exceeds a threshold."""

    def __init__(self, model, strength=2.0):
        super().__init__(model)
        self.strength = nn.Parameter(torch.tensor(strength))
        self.drawn = nn.Parameter(torch.rand(2))
        self.register_buffer("threshold", torch.tensor(0.1))
        self.dropout = nn.Dropout(0.5)

    def policy_params(self, obs):
        params = self.dropout(self.model.policy_params(obs))
        bonus = torch.zeros_like(params)
        bonus[..., 0] = (obs[..., 0] > self.threshold) * self.strength
        return params + bonus


class Remembers(nn.Module):
    """Wrapper of a recurrent policy that also counts steps."""

    def __init__(self, model, extra=1):
        super().__init__()
        self.model = model
        self.extra = extra

    @property
    def distribution(self):
        return self.model.distribution

    @property
    def state_size(self):
        return self.model.state_size + 1

    def policy_step(self, obs, state):
        params, inner = self.model.policy_step(obs, state[:, :-1])
        count = state[:, -1:] + 1
        return params * count, torch.cat([inner, *[count] * self.extra], -1)


def own(name, **settings):
    """Return the configuration of a network of this module."""
    return {"_target_": f"{__name__}.{name}", **settings}
