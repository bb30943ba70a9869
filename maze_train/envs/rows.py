"""Copies single observations into rows of arrays, and refuses those that do not fit their space."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from maze_train.errors import SpaceError

if TYPE_CHECKING:
    from collections.abc import Callable

    import gymnasium

    from maze_train.envs.buffers import Array
    from maze_train.spaces.describe import FlatView
    from maze_train.spaces.masks import MaskLayout

__all__ = ["column_writer", "converted", "masked_writer", "row_writer"]


def row_writer(view: FlatView, columns: dict[str, Array]) -> Callable[[int, Any], None]:
    """A function `write(i, observation)` that copies an observation into row i of the columns."""
    writers = {
        key: within_range(key, view.leaves[key], column_writer(key, column))
        for key, column in columns.items()
    }
    if view.is_single:
        return writers[""]

    def write(i: int, observation: Any) -> None:
        for key, value in view.read(observation):
            writers[key](i, value)

    return write


def masked_writer(
    write: Callable[[int, Any], None], masks: MaskLayout, columns: dict[str, Array]
) -> Callable[[int, Any], None]:
    """`write`, and then a check that every choice has a legal action in row i."""
    leaves = {leaf: columns[leaf] for leaf in masks.leaves}

    def write_checked(i: int, observation: Any) -> None:
        write(i, observation)
        problem = masks.illegal_part({leaf: column[i] for leaf, column in leaves.items()})
        if problem is not None:
            raise SpaceError(problem)

    return write_checked


def column_writer(key: str, column: Array) -> Callable[[int, Any], None]:
    """A function `write(i, value)` that copies a value into row i of a column."""
    shape, dtype = column.shape[1:], column.dtype

    def write(i: int, value: Any) -> None:
        # Assignment alone would broadcast a wrong shape, and cut floats down to integers, without a
        # word.
        if type(value) is not np.ndarray or value.shape != shape or value.dtype != dtype:
            value = converted(key, value, shape, dtype)
        column[i] = value

    return write


def within_range(
    key: str, leaf: gymnasium.Space[Any], write: Callable[[int, Any], None]
) -> Callable[[int, Any], None]:
    """`write`, after a check that categories exist: networks would take another one's place."""
    if not isinstance(leaf, (spaces.Discrete, spaces.MultiDiscrete)):
        return write
    low = np.asarray(leaf.start)
    high = low + (leaf.n if isinstance(leaf, spaces.Discrete) else leaf.nvec)

    def write_checked(i: int, value: Any) -> None:
        if ((value < low) | (value >= high)).any():
            name = f"observation {key!r}" if key else "the observation"
            raise SpaceError(f"{name} is {value}, which is not in {leaf}")
        write(i, value)

    return write_checked


def converted(key: str, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """`value` as an array that may be stored under `dtype`.

    Raises:
        SpaceError: If its shape is not `shape`, or it is not a number of the kind that the space
            holds.
    """
    name = f"observation {key!r}" if key else "the observation"
    array = np.asarray(value)
    if array.shape != shape:
        raise SpaceError(f"{name} has shape {array.shape}, its space says {shape}")
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and dtype.kind != "f"):
        raise SpaceError(f"{name} has dtype {array.dtype}, its space says {dtype}")
    if array.dtype.kind in "iu" and dtype.kind in "iu" and (array.astype(dtype) != array).any():
        raise SpaceError(f"{name} holds {array.min()} to {array.max()}, which {dtype} can not hold")
    return array
