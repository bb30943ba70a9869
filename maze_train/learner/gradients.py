"""Size and clipping of gradients, and modules without any."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import nn

    from maze_train.types import Tensor

__all__ = ["clip_gradients", "compute_gradient_norm", "constant"]

# Keeps the quotient finite for a zero gradient; the size that the field uses.
NORM_EPSILON = 1e-6


@contextmanager
def constant(module: nn.Module) -> Iterator[None]:
    """Let gradients of outputs computed in the block reach inputs, but not weights, of a module."""
    trained = [param for param in module.parameters() if param.requires_grad]
    for param in trained:
        param.requires_grad_(False)
    try:
        yield
    finally:
        for param in trained:
            param.requires_grad_(True)


def clip_gradients(gradients: Sequence[Tensor], bound: float, by: str) -> Tensor:
    """Clip gradients in place.

    Args:
        gradients: The gradients of one optimizer.
        bound: Largest allowed size, > 0; 0: nothing is clipped.
        by: `global_norm`: all gradients are scaled by min(1, bound / norm), with the L2 norm of all
            of them together; `norm`: each tensor alone, by its own norm; `value`: each entry is
            clamped to [-bound, bound].

    Returns:
        The L2 norm of all gradients before clipping, 0-d.
    """
    if not gradients:
        return torch.zeros(())
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    norm = _norm_of_all(norms)
    if bound <= 0:
        return norm
    if by == "value":
        for gradient in gradients:
            gradient.clamp_(-bound, bound)
    elif by == "norm" and len(gradients) > 1:
        for gradient, own_norm in zip(gradients, norms, strict=True):
            gradient.mul_(_coefficient(own_norm, bound))
    else:
        coefficient = _coefficient(norm, bound)
        for gradient in gradients:
            gradient.mul_(coefficient)
    return norm


def compute_gradient_norm(params: Iterable[Tensor]) -> float:
    """The L2 norm sqrt(Σ g²) over the gradients of all parameters together.

    The host waits for the device once.

    Args:
        params: Parameters on one device. One without a gradient counts 0.

    Returns:
        The norm, >= 0; 0.0 if there is no gradient at all.
    """
    gradients = [parameter.grad for parameter in params if parameter.grad is not None]
    if not gradients:
        return 0.0
    return float(_norm_of_all([torch.linalg.vector_norm(gradient) for gradient in gradients]))


def _norm_of_all(norms: list[Tensor]) -> Tensor:
    """The norm of tensors of these norms, 0-d."""
    norm: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _coefficient(norm: Tensor, bound: float) -> Tensor:
    return torch.clamp(bound / (norm + NORM_EPSILON), max=1.0)
