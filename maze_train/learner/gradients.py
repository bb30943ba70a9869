"""Clipping of gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maze_train.types import Tensor

__all__ = ["clip_gradients"]

# Keeps the quotient finite for a zero gradient; the size that the field uses.
NORM_EPSILON = 1e-6


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
    norm: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
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


def _coefficient(norm: Tensor, bound: float) -> Tensor:
    return torch.clamp(bound / (norm + NORM_EPSILON), max=1.0)
