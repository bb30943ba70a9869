"""The shape check at the door of every function in this room."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maze_train.errors import ShapeError

if TYPE_CHECKING:
    from maze_train.types import Tensor

__all__ = ["check_same_shape"]


def check_same_shape(**tensors: Tensor) -> None:
    """Refuse tensors that differ in shape, because broadcasting would hide the mistake.

    A column [N, 1] against a row [N] broadcasts silently to [N, N] and still has a finite mean.

    Args:
        **tensors: At least one tensor; the names appear in the message, and the first sets the
            expected shape.

    Raises:
        ShapeError: If a tensor has another shape than the first; the message names both tensors
            and both shapes.
    """
    named = iter(tensors.items())
    first_name, first = next(named)
    expected = first.shape
    for name, tensor in named:
        if tensor.shape != expected:
            raise ShapeError(
                f"{name} has shape {list(tensor.shape)}, "
                f"expected {list(expected)} like {first_name}"
            )
