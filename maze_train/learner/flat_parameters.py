"""Flat vectors of parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from maze_train.core.types import Tensor


class FlatParameters:
    """Stores parameters and gradients in two flat vectors; each parameter becomes a view.

    Clipping, optimizer steps, weight broadcasts and all-reduces then need a single operation
    instead of one operation per layer. The `nn.Parameter` objects are kept.

    Args:
        params: Distinct parameters with the same dtype and device.

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
        # Restore the views: `module.zero_grad()`, for example, sets gradients to None.
        for param, view in zip(self.params, self._grad_views, strict=True):
            if param.grad is not view:
                param.grad = view


def get_flat_parameters(module: nn.Module) -> Tensor:
    """Return a flat copy of all parameters of a module, in the order of `module.parameters()`."""
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def set_flat_parameters(module: nn.Module, vector: Tensor) -> None:
    """Copy a flat vector, as returned by `get_flat_parameters`, to the parameters of a module.

    Raises:
        ValueError: If the vector has the wrong length.
    """
    params = list(module.parameters())
    total = sum(p.numel() for p in params)
    if vector.shape != (total,):
        raise ValueError(f"the vector has shape {list(vector.shape)}, expected [{total}]")
    with torch.no_grad():
        pieces = torch.split(vector, [param.numel() for param in params])
        for param, piece in zip(params, pieces, strict=True):
            param.copy_(piece.view_as(param))
