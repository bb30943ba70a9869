"""Parameters and gradients as one vector; size and clipping of gradients."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.compiler import is_compiling

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from maze_train.types import Tensor


# Keeps the quotient finite for a zero gradient; the size that the field uses.
NORM_EPSILON = 1e-6


@contextmanager
def constant(module: nn.Module) -> Iterator[None]:
    """Let gradients of outputs computed in the block reach inputs, but not weights, of a module."""
    if is_compiling():  # which knows no requires_grad_
        with _without_gradients(module):
            yield
        return
    trained = [param for param in module.parameters() if param.requires_grad]
    for param in trained:
        param.requires_grad_(False)
    try:
        yield
    finally:
        for param in trained:
            param.requires_grad_(True)


@contextmanager
def _without_gradients(module: nn.Module) -> Iterator[None]:
    """Have values without a gradient in the place of the parameters of a module."""
    parts = [(part._parameters, dict(part._parameters)) for part in module.modules()]
    for parameters, trained in parts:
        for name, param in trained.items():
            if param is not None:
                parameters[name] = param.detach()  # type: ignore[assignment]  # in the block
    try:
        yield
    finally:
        for parameters, trained in parts:
            parameters.update(trained)


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
    elif norm.device.type != "cpu" or not norm.item() + NORM_EPSILON <= bound:
        # Elsewhere a look at the norm would take longer than a product with 1.
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
    return float(norm_of([param.grad for param in params if param.grad is not None]))


def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """The L2 norm of gradients together, 0-d; 0 if there are none."""
    if not gradients:
        return torch.zeros(())
    return _norm_of_all([torch.linalg.vector_norm(gradient) for gradient in gradients])


def _norm_of_all(norms: list[Tensor]) -> Tensor:
    """The norm of tensors of these norms, 0-d."""
    norm: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _coefficient(norm: Tensor, bound: float) -> Tensor:
    return torch.clamp(bound / (norm + NORM_EPSILON), max=1.0)


class FlatParameters:
    """Moves parameters, and their gradients, into two flat vectors; each parameter becomes a view.

    Clipping, the optimizer step, weight broadcast and gradient exchange are then one operation each
    instead of one per layer. The parameters stay what they were for everybody else.

    Args:
        params: Parameters of one dtype and device, none of them twice.

    Raises:
        ValueError: If dtypes or devices differ.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        if len({(p.dtype, p.device) for p in params}) > 1:
            raise ValueError("flat parameters need one dtype and one device")
        self.params = list(params)
        with torch.no_grad():
            self.vector = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in params]))
        self.grad = torch.zeros_like(self.vector.data)
        self.vector.grad = self.grad
        self._grad_views: list[Tensor] = []
        start = 0
        for param in self.params:
            end = start + param.numel()
            param.data = self.vector.data[start:end].view_as(param)
            self._grad_views.append(self.grad[start:end].view_as(param))
            start = end
        self.zero_grad()

    def zero_grad(self) -> None:
        """Set all gradients to zero, in place."""
        self.grad.zero_()
        # Somebody else may have replaced or dropped the gradients, as `module.zero_grad()` does.
        for param, view in zip(self.params, self._grad_views, strict=True):
            if param.grad is not view:
                param.grad = view


def get_flat_parameters(module: nn.Module) -> Tensor:
    """All parameters of a module, in the order of `module.parameters()`, as one vector (a copy)."""
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def set_flat_parameters(module: nn.Module, vector: Tensor) -> None:
    """Write a vector, as `get_flat_parameters` gives it, into the parameters of a module, in place.

    Raises:
        ValueError: If the vector has a wrong length.
    """
    params = list(module.parameters())
    total = sum(p.numel() for p in params)
    if vector.shape != (total,):
        raise ValueError(f"the vector has shape {list(vector.shape)}, expected [{total}]")
    with torch.no_grad():
        pieces = torch.split(vector, [param.numel() for param in params])
        for param, piece in zip(params, pieces, strict=True):
            param.copy_(piece.view_as(param))
