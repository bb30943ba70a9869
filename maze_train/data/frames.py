"""Stacks of the last n frames, with every frame stored once; stacking of mappings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from maze_train.core.errors import ShapeError
from maze_train.spaces.tensors import storage_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gymnasium.spaces import Space

    from maze_train.core.types import Array, Tensor


@dataclass(frozen=True, slots=True)
class FrameStacks:
    """Observations `[rows, envs, n, *frame]` that are put together when they are asked for.

    Positions are `row * envs + env`, as if the first two dimensions were one.
    """

    frames: Tensor
    """All frames, `[M, *frame]`."""

    numbers: Tensor
    """Indices of the frames of each observation, oldest first, `[rows * envs, n]` int64."""

    num_envs: int

    @property
    def shape(self) -> torch.Size:
        """`[rows, envs, n, *frame]`."""
        positions, n = self.numbers.shape
        return torch.Size((positions // self.num_envs, self.num_envs, n, *self.frames.shape[1:]))

    def to(self, device: torch.device) -> FrameStacks:
        """The same on a device."""
        return FrameStacks(self.frames.to(device), self.numbers.to(device), self.num_envs)

    def flatten(self, start_dim: int, end_dim: int) -> FrameStacks:
        """Itself: rows and environments, dimensions 0 and 1, are one dimension already."""
        assert (start_dim, end_dim) == (0, 1)
        return self

    def whole(self) -> Tensor:
        """All observations, `[rows, envs, n, *frame]`."""
        return self._gather(self.numbers).view(self.shape)

    def index_select(self, dim: int, positions: Tensor) -> Tensor:
        """Observations at positions, `[len(positions), n, *frame]`; `dim` is 0."""
        assert dim == 0
        return self._gather(self.numbers.index_select(0, positions))

    def __getitem__(self, positions: slice) -> Tensor:
        """Observations at consecutive positions."""
        return self._gather(self.numbers[positions])

    def _gather(self, numbers: Tensor) -> Tensor:
        picked = self.frames.index_select(0, numbers.flatten())
        return picked.view(*numbers.shape, *self.frames.shape[1:])


class FrameMemory:
    """Memory for `num_rows` rows of stacked observations of B environments.

    An observation that continues from the one before shares all frames but the newest with it.
    Where it does not (an episode begins, or a wrapper around the stack takes several steps at
    once), its older frames are kept in addition, unless they repeat the newest one or a frame
    before.

    Args:
        space: Space of one stacked observation, `[n, *frame]`, newest frame last.
        num_rows: Rows of observations, T + 1.
        num_envs: B.
    """

    def __init__(self, space: Space[object], num_rows: int, num_envs: int) -> None:
        shape = space.shape or ()
        self.n = shape[0]
        self.num_envs = num_envs
        self._frame_shape = shape[1:]
        dtype = torch.from_numpy(np.empty(0, storage_dtype(space))).dtype
        # Rows first, then what a rollout begins with, then what episodes within it begin with.
        self._first_extra = num_rows * num_envs
        spare = (self.n - 1) * num_envs
        self._frames = torch.zeros((self._first_extra + 2 * spare, *self._frame_shape), dtype=dtype)
        self._array = self._frames.numpy()
        self._numbers = torch.zeros((num_rows, num_envs, self.n), dtype=torch.int64)
        self._number_rows = self._numbers.numpy()
        self._used = self._first_extra

    def start(self, obs: Array) -> None:
        """Write the observations before the first action, `[B, n, *frame]`."""
        self._used = self._first_extra
        obs = obs.astype(self._array.dtype, copy=False)
        self._write_newest(0, obs)
        for env in range(self.num_envs):
            self._begin(0, env, obs[env])

    def write(self, row: int, obs: Array) -> None:
        """Write the observations `[B, n, *frame]` of a row >= 1."""
        # Frames are compared as they are stored: rounded ones would be kept again and again.
        obs = obs.astype(self._array.dtype, copy=False)
        self._write_newest(row, obs)
        numbers = self._number_rows
        numbers[row, :, :-1] = numbers[row - 1, :, 1:]
        # Flags of episodes do not say: wrappers may take several steps between observations.
        for env, older in enumerate(numbers[row, :, :-1]):
            if not np.array_equal(self._array[older], obs[env, :-1]):
                self._begin(row, env, obs[env])

    def stacks(self) -> FrameStacks:
        """The observations of all rows, sharing this memory."""
        return FrameStacks(self._frames, self._numbers.flatten(0, 1), self.num_envs)

    @property
    def nbytes(self) -> int:
        """Bytes of the frames."""
        return self._frames.nbytes

    def _write_newest(self, row: int, obs: Array) -> None:
        first = row * self.num_envs
        self._array[first : first + self.num_envs] = obs[:, -1]
        self._number_rows[row, :, -1] = range(first, first + self.num_envs)

    def _begin(self, row: int, env: int, stack: Array) -> None:
        """Number the frames of a stack, and keep those that are stored nowhere yet."""
        numbers = self._number_rows[row, env]
        known = [row * self.num_envs + env]
        if row:
            known += self._number_rows[row - 1, env].tolist()
        for age in range(self.n - 1):
            same = (number for number in known if (self._array[number] == stack[age]).all())
            number = next(same, None)
            numbers[age] = self._keep(stack[age]) if number is None else number

    def _keep(self, frame: Array) -> int:
        """Store a frame in addition to the rows; returns its number."""
        if self._used == len(self._array):
            self._grow()
        self._array[self._used] = frame
        self._used += 1
        return self._used - 1

    def _grow(self) -> None:
        # By half as much again: by less, copying would take more time the more is kept.
        spare = self._frames.new_zeros((len(self._frames) // 2 + 1, *self._frame_shape))
        self._frames = torch.cat([self._frames, spare])
        self._array = self._frames.numpy()


def stack_numpy_dict_list(dict_list: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
    """Stack the values of each key along a new first axis: n of `[...]` become `[n, ...]`.

    Args:
        dict_list: n >= 1 mappings with the same keys, of arrays or what numpy makes arrays of.

    Raises:
        ShapeError: If there is no mapping, keys differ, or the shapes under one key differ.
    """
    return {key: np.stack(values) for key, values in _by_key(dict_list, np.asarray).items()}


def unstack_numpy_list_dict(list_dict: Mapping[str, Any]) -> list[dict[str, Array]]:
    """Take a mapping of stacked values apart: `[n, ...]` become n of `[...]`.

    The inverse of `stack_numpy_dict_list`. Values without an axis are one mapping alone.

    Args:
        list_dict: At least one array, or what numpy makes an array of; all of the same length n.

    Raises:
        ShapeError: If there is no value, or lengths differ.
    """
    if not list_dict:
        raise ShapeError("there is nothing to unstack: expected at least one key")
    arrays = {key: _converted(key, value, np.asarray) for key, value in list_dict.items()}
    first, *_ = arrays
    shape = arrays[first].shape
    for key, array in arrays.items():
        if array.shape[:1] != shape[:1]:
            raise ShapeError(
                f"{key!r} has the shape {list(array.shape)}, {first!r} has {list(shape)}: expected "
                f"the same first dimension"
            )
    if not shape:
        return [arrays]
    return [{key: array[i] for key, array in arrays.items()} for i in range(shape[0])]


def stack_torch_dict_list(
    dict_list: Sequence[Mapping[str, Any]], dim: int = 0
) -> dict[str, Tensor]:
    """Stack the values of each key along a new axis `dim`.

    Args:
        dict_list: n >= 1 mappings with the same keys, of tensors or arrays.
        dim: Place of the new axis; negative ones are counted from the end.

    Raises:
        ShapeError: If there is no mapping, keys differ, or the shapes under one key differ.
    """
    return {key: torch.stack(values, dim) for key, values in _by_key(dict_list, _tensor).items()}


def _by_key(
    dict_list: Sequence[Mapping[str, Any]], convert: Callable[[Any], Any]
) -> dict[str, list[Any]]:
    """The values of each key, which have one shape."""
    if not dict_list:
        raise ShapeError("there is nothing to stack: expected at least one mapping")
    keys = dict_list[0].keys()
    for number, item in enumerate(dict_list):
        if item.keys() != keys:
            odd = sorted(map(repr, item.keys() ^ keys))
            raise ShapeError(
                f"mapping {number} and mapping 0 differ in the keys {', '.join(odd)}: expected the "
                f"same keys in all"
            )
    columns = {key: [_converted(key, item[key], convert) for item in dict_list] for key in keys}
    for key, values in columns.items():
        shapes = [list(value.shape) for value in values]
        if any(shape != shapes[0] for shape in shapes):
            raise ShapeError(f"{key!r} has the shapes {shapes}: expected the same in all mappings")
    return columns


def _converted(key: str, value: Any, convert: Callable[[Any], Any]) -> Any:
    try:
        return convert(value)
    except (ValueError, TypeError) as error:
        raise ShapeError(f"{key!r} is no array: {error}") from error


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
