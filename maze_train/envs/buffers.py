"""Arrays that environments are stepped into, and how observations are copied into their rows."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from maze_train.errors import SpaceError
from maze_train.workers.memory import ArrayLayout

if TYPE_CHECKING:
    from collections.abc import Callable

    import gymnasium

    from maze_train.spaces.describe import FlatView
    from maze_train.spaces.mask_layouts import MaskLayout


Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Buffers that one step of `n` environments reads and writes.

    Observations and actions are keyed by leaf; a space that is one leaf has the key `""`.
    """

    obs: dict[str, Array]
    """Observations to act on, [n, ...] per leaf."""
    final_obs: dict[str, Array]
    """Last observations of the episodes that ended in this step, [n, ...] per leaf; other rows mean
    nothing."""
    actions: dict[str, Array]
    """Actions to take, [n, ...] per leaf."""
    rewards: npt.NDArray[np.float64]
    """[n]."""
    terminated: npt.NDArray[np.bool_]
    """[n]."""
    truncated: npt.NDArray[np.bool_]
    """[n]."""

    @staticmethod
    def layout(observation: FlatView, action: FlatView, n: int) -> ArrayLayout[tuple[str, str]]:
        """Layout of the arrays, by field and leaf, in memory that `over` gets."""
        views = {"obs": observation, "final_obs": observation, "actions": action}
        specs = {
            (field, key): ((n, *(leaf.shape or ())), np.dtype(leaf.dtype))
            for field, view in views.items()
            for key, leaf in view.leaves.items()
        }
        numbers = {"rewards": np.float64, "terminated": np.bool_, "truncated": np.bool_}
        steps = {(field, ""): ((n,), np.dtype(dtype)) for field, dtype in numbers.items()}
        return ArrayLayout({**specs, **steps})

    @classmethod
    def over(cls, memory: Any, layout: ArrayLayout[tuple[str, str]]) -> StepBuffers:
        """The arrays in `memory`, a writable buffer of at least `layout.nbytes` bytes."""
        found: dict[str, Any] = {"obs": {}, "final_obs": {}, "actions": {}}
        for (field, key), array in layout.arrays(memory).items():
            if field in ("obs", "final_obs", "actions"):
                found[field][key] = array
            else:
                found[field] = array
        return cls(**found)

    def rows(self, first: int, stop: int) -> StepBuffers:
        """The part of the environments first, ..., stop - 1, as views."""
        part: dict[str, Any] = {}
        for field in fields(self):
            whole = getattr(self, field.name)
            part[field.name] = (
                {key: array[first:stop] for key, array in whole.items()}
                if isinstance(whole, dict)
                else whole[first:stop]
            )
        return StepBuffers(**part)


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
