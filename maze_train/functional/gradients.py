"""Values together with their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from maze_train.types import Tensor

__all__ = ["value_and_gradient"]


def value_and_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """f(x) and df/dx by automatic differentiation, for functions without a gradient by hand.

    Args:
        function: Maps a tensor to a 0-d tensor.
        x: Where to evaluate it, any shape; taken as a constant of everything else.

    Returns:
        The value, 0-d, and the gradient, in the shape of x, both without a graph.
    """
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        value = function(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient
