"""Modules that do not care about training and evaluation mode."""

from __future__ import annotations

from torch import nn

__all__ = ["has_modes"]

OWN = "maze_train.nets."
INDIFFERENT = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ELU,
    nn.Embedding,
    nn.Flatten,
    nn.GELU,
    nn.GroupNorm,
    nn.Identity,
    nn.LayerNorm,
    nn.LeakyReLU,
    nn.Linear,
    nn.MaxPool2d,
    nn.ModuleDict,
    nn.ModuleList,
    nn.ReLU,
    nn.Sequential,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softmax,
    nn.Tanh,
)


def has_modes(module: nn.Module) -> bool:
    """Whether a module, or one within it, may do different things in training and evaluation.

    Switching takes longer than a small network, so it is left out where it does nothing. Networks
    of the package make no difference, nor do some layers of PyTorch; others may.
    """
    return not all(
        type(part) in INDIFFERENT or type(part).__module__.startswith(OWN)
        for part in module.modules()
    )
