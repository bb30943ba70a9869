"""One recorded episode, as the arrays of a data set hold it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from maze_train.data.replay_columns import leaves_by_key
from maze_train.errors import ShapeError, SpaceError
from maze_train.spaces.actions import checked_actions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from maze_train.data.trajectories import Trajectory
    from maze_train.types import Array

__all__ = ["Column", "Episode", "checked_episode", "ends_of"]


@dataclass(frozen=True)
class Column:
    """One array of a part."""

    group: str
    """`obs`, `actions` or `rewards`."""

    key: str
    """Joined key of the leaf; `""` for a lone one."""

    file: str
    """Name of its file. It is made of numbers, not of keys: those may hold anything."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """Shape of one row."""

    leaf: spaces.Space[Any] | None
    """The space of a row; None: rewards."""

    @property
    def checked_space(self) -> spaces.Space[Any] | None:
        """The space whose values are checked: that of actions, and of discrete observations."""
        is_box = isinstance(self.leaf, spaces.Box)
        return None if self.group == "obs" and is_box else self.leaf

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def name(self) -> str:
        """Name of the column in messages."""
        return f"{self.group}[{self.key!r}]" if self.key else self.group

    def num_rows(self, lengths: Iterable[int]) -> int:
        """Rows for episodes of these lengths: T each, for observations T + 1."""
        return sum(length + (self.group == "obs") for length in lengths)


@dataclass(frozen=True, eq=False)
class Episode:
    """A recorded episode as the columns hold it: copies, one array per column."""

    arrays: list[Array]
    length: int
    terminated: bool
    truncated: bool
    seed: int | None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)


def checked_episode(trajectory: Trajectory, columns: Sequence[Column], name: str) -> Episode:
    """Copy an episode into the data types of its spaces.

    Floats may lose digits to the data type of the space; integers have to stay what they are.

    Args:
        trajectory: The episode.
        columns: The arrays of the data set.
        name: Name in messages.

    Raises:
        ShapeError: If keys or shapes are not those of the spaces.
        SpaceError: If an array is of another kind than its leaf, a number does not fit its data
            type, or an action or a discrete observation is none of its space.
    """
    found = {
        (group, key): leaf
        for group in ("obs", "actions", "rewards")
        for key, leaf in leaves_by_key(getattr(trajectory, group)).items()
    }
    wanted = [(column.group, column.key) for column in columns]
    if set(found) != set(wanted):
        texts = [[f"{group}[{key!r}]" for group, key in keys] for keys in (found, wanted)]
        raise ShapeError(f"{name} has the arrays {texts[0]}, expected {texts[1]}")
    arrays = []
    for column in columns:
        array = np.asarray(found[column.group, column.key])
        label = f"{name}: {column.name}"
        shape = (column.num_rows([trajectory.num_steps]), *column.shape)
        if array.shape != shape:
            raise ShapeError(f"{label} has the shape {list(array.shape)}, expected {list(shape)}")
        if column.checked_space is not None:
            array = checked_actions(label, array, len(array), column.checked_space)
        arrays.append(_converted(array, column.dtype, label))
    seed = None if trajectory.seed is None else int(trajectory.seed)
    ends = bool(trajectory.terminated), bool(trajectory.truncated)
    return Episode(arrays, trajectory.num_steps, *ends, seed)


def _converted(array: Array, dtype: np.dtype[Any], name: str) -> Array:
    """A copy in another data type, in which integers have the same value and floats are finite."""
    both_integers = array.dtype.kind in "iu" and dtype.kind in "iu"
    is_number = array.dtype.kind in "fiub"
    if not is_number or not (both_integers or np.can_cast(array.dtype, dtype, "same_kind")):
        raise SpaceError(
            f"{name} has the data type {array.dtype}, which can not be kept as {dtype}, the data "
            f"type of the space: convert it, or correct the space"
        )
    with np.errstate(all="ignore"):
        copy = array.astype(dtype, order="C", copy=True)
        if array.dtype == dtype:
            fits = np.isfinite(copy) if dtype.kind == "f" else np.array(True)
        elif array.dtype.kind == "f":
            fits = np.isfinite(copy)
        else:
            fits = (copy == array) & (copy.astype(array.dtype) == array)
    if not fits.all():
        row = int(np.argwhere(~fits)[0, 0])
        raise SpaceError(f"{name}[{row}] = {array[row]} can not be kept as {dtype}")
    return copy


def ends_of(episodes: Sequence[Episode]) -> dict[str, list[Any]]:
    """Return the lengths, seeds and ends of episodes, as lists."""
    return {
        "lengths": [episode.length for episode in episodes],
        "seeds": [episode.seed for episode in episodes],
        "terminated": [episode.terminated for episode in episodes],
        "truncated": [episode.truncated for episode in episodes],
    }
