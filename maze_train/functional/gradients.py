"""Values together with their gradients."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from maze_train.types import Tensor

__all__ = ["loss_by_hand", "outputs_and_vjp", "value_and_gradient", "walk_back"]


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


def outputs_and_vjp(function: Callable[[], Tensor]) -> tuple[Tensor, Callable[[Tensor], None]]:
    """Outputs of networks, and a function that writes gradients of their parameters.

    Args:
        function: Gives the outputs, any shape, with a graph.

    Returns:
        The outputs without a graph, and a function that takes dL/d outputs and adds those of the
        parameters to their `.grad`.
    """
    with torch.enable_grad():
        outputs = function()

    def gradient(grad: Tensor) -> None:
        if outputs.requires_grad:
            outputs.backward(grad)  # type: ignore[no-untyped-call]  # untyped in torch

    return outputs.detach(), gradient


class _LossByHand(torch.autograd.Function):
    """Runs a function in the backward pass."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, write: Callable[[Tensor], None]) -> Tensor:
        ctx.write = write
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.write(grads[0])
        return None, None, None


def loss_by_hand(
    value: Tensor,
    gradients: tuple[Tensor | None, ...],
    write_gradients: Callable[..., None],
) -> Tensor:
    """A loss like any other whose gradients are computed by a function instead of a graph.

    It can be scaled, added to other losses, and walked by `backward`.

    Args:
        value: The value of the loss, 0-d.
        gradients: dL/dx of intermediate results x, such as the outputs of a network; None: none.
        write_gradients: Takes `gradients` and adds those of parameters to their `.grad`.

    Returns:
        The loss, 0-d.
    """

    def write_scaled(scale: Tensor) -> None:
        write_gradients(*(None if g is None else g * scale for g in gradients))

    # Without an input that needs a gradient there would be no backward pass.
    anchor = torch.empty(0, requires_grad=True)
    loss: Tensor = _LossByHand.apply(anchor, value, write_scaled)  # type: ignore[no-untyped-call]  # untyped in torch
    loss.write_gradients = partial(write_gradients, *gradients)  # type: ignore[attr-defined]  # see walk_back
    return loss


def walk_back(loss: Tensor) -> None:
    """`loss.backward()`, without the detour through the graph for a `loss_by_hand` as it is.

    What is made of such a loss (a multiple, a sum) is another tensor and goes through the graph.
    """
    write_gradients = getattr(loss, "write_gradients", None)
    if write_gradients is None:
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
    else:
        write_gradients()
