"""Modes of PyTorch: those of the process, precision of matrix products, those of modules."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from maze_train.checks import check_one_of

if TYPE_CHECKING:
    from collections.abc import Iterator


CUBLAS, REPEATABLE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""Variable that lets products of matrices on a GPU be deterministic, and its value."""

OWN = ("maze_train.nets.", "maze_train.algorithms.")
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

    Switching takes longer than a small network, so it is left out where it does nothing. Models and
    networks of the package make no difference, nor do some layers of PyTorch; others may.
    """
    return not all(
        type(part) in INDIFFERENT or type(part).__module__.startswith(OWN)
        for part in module.modules()
    )


def autocast(device: torch.device, name: str) -> AbstractContextManager[Any]:
    """Compute layers in a type of `algorithm.autocast` in the block; `none`: in that of weights."""
    if name == "none":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, name))


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """Compute products of float32 matrices with this precision in the block.

    Args:
        name: `highest`: float32; `high`: factors rounded to TensorFloat-32 or to two bfloat16
            numbers each, where the device can; `medium`: factors rounded to bfloat16. Sums are
            float32.

    Raises:
        ConfigError: If there is no such precision; PyTorch would only warn.
    """
    check_one_of("precision", name, ("highest", "high", "medium"))
    before = torch.get_float32_matmul_precision()
    if name == before:
        yield
        return
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the threads of PyTorch in the block; 0: leave them."""
    if not count:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
