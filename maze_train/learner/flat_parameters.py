"""Parameters of a module as one vector."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from maze_train.core.types import Tensor


class FlatParameters:
    """Moves parameters, and their gradients, into two flat vectors; each parameter becomes a view.

    Clipping, the optimizer step, weight broadcast and gradient exchange are then one operation each
    instead of one per layer. The parameters stay the same objects for all other users.

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
        # Someone else may have replaced or dropped the gradients, as `module.zero_grad()` does.
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
