"""Building blocks of template networks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import nn

from maze_train.checks import check_one_of
from maze_train.nets.config import ACTIVATIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["activation", "linear", "mlp"]


def activation(name: str) -> nn.Module:
    """A nonlinearity by its name in the configuration.

    Raises:
        ConfigError: If there is none of that name.
    """
    check_one_of("activation", name, ACTIVATIONS)
    classes = {
        "tanh": nn.Tanh,
        "relu": nn.ReLU,
        "elu": nn.ELU,
        "gelu": nn.GELU,
        "silu": nn.SiLU,
        "leaky_relu": nn.LeakyReLU,
    }
    nonlinearity: nn.Module = classes[name]()
    return nonlinearity


def linear(inputs: int, outputs: int, gain: float | None) -> nn.Linear:
    """A linear layer; with a gain its weights are orthogonal and its biases zero.

    Args:
        inputs: Size of the input.
        outputs: Size of the output.
        gain: Factor of the orthogonal matrix; None keeps PyTorch's own initialisation.
    """
    layer = nn.Linear(inputs, outputs)
    if gain is not None:
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, sizes: Sequence[int], nonlinearity: str, orthogonal: bool) -> nn.Sequential:
    """Linear layers of the given sizes, each followed by the nonlinearity."""
    layers: list[nn.Module] = []
    for size in sizes:
        layers += [linear(inputs, size, math.sqrt(2) if orthogonal else None)]
        layers += [activation(nonlinearity)]
        inputs = size
    return nn.Sequential(*layers)
