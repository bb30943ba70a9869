"""Networks of a user, of which some do not fit."""

from __future__ import annotations

import math

import torch
from torch import nn

__all__ = ["OwnNet", "own"]


class OwnNet(nn.Module):
    """A network for observations of one dimension, and for actions where it judges them."""

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
    """A factory that returns something else."""
    return "hello"


def own(name, **settings):
    """Configuration of a network above."""
    return {"_target_": f"{__name__}.{name}", **settings}
