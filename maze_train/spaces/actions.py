"""Checks that actions from elsewhere are ones of the space."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.spaces import Discrete, MultiBinary, MultiDiscrete

from maze_train.errors import ShapeError, SpaceError

if TYPE_CHECKING:
    import numpy.typing as npt
    from gymnasium import Space

    Array = npt.NDArray[Any]

__all__ = ["checked_actions"]


def checked_actions(name: str, part: Any, n: int, space: Space[Any]) -> Array:
    """One part of n actions of the environment, as an array `[n, *space.shape]`.

    Numbers of a Box may lie outside of its bounds, where `Distribution.to_env` would clip them.

    Args:
        name: Name in messages.
        part: The part.
        n: Number of actions.
        space: Leaf of the action space that it belongs to.

    Raises:
        ShapeError: If it does not have one row per action, in the shape of the space.
        SpaceError: If it is of another kind, or holds something that is no action.
    """
    shape = (n, *(space.shape or ()))
    try:
        array = np.asarray(part)
    except ValueError as error:
        raise ShapeError(f"{name}: no array of shape {shape}: {error}") from error
    if array.shape != shape:
        raise ShapeError(f"{name}: actions of shape {array.shape}, expected {shape}")
    kinds = "fiub" if np.dtype(space.dtype).kind == "f" else "iub"
    if array.dtype.kind not in kinds:
        raise SpaceError(f"{name}: actions of dtype {array.dtype}, expected {space.dtype}")
    low, high = _limits(space)
    is_wrong = ~((array >= low) & (array <= high))
    if is_wrong.any():
        row = int(np.argwhere(is_wrong)[0, 0])
        raise SpaceError(f"{name}: {array[row]} for observation {row} is not in {space}")
    return array


def _limits(space: Space[Any]) -> tuple[Any, Any]:
    """Smallest and largest numbers of an action."""
    if isinstance(space, Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    if isinstance(space, MultiBinary):
        return 0, 1
    limits = np.finfo(np.float64)
    return limits.min, limits.max
