"""Ring-buffer columns of a replay buffer, including frame stacks and final observations.

A `row` counts vectorized steps since the buffer was created. The `position` of an entry is `row *
num_envs + env`. Row r is stored in slot `r % S` of a ring with S slots, so the `index` of an entry
is its position modulo the size of the ring.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from gymnasium import spaces

from maze_train.core.checks import check_at_least
from maze_train.core.errors import ConfigError
from maze_train.core.types import Array, Tensor, TensorTree, leaves_by_key, send
from maze_train.spaces.columns import Columns, Spec
from maze_train.spaces.describe import flat_spaces

Storage: TypeAlias = Literal["memory", "disk", "device"]
"""Storage of observations and actions: memory, memory-mapped files, or the training device."""

STORAGES = ("memory", "disk", "device")


@dataclass(frozen=True, slots=True)
class Ring:
    """Size of a ring buffer."""

    rows: int
    """Capacity in rows of transitions."""

    num_envs: int

    num_slots: int
    """Allocated rows: `rows`, one row for the newest observation, and rows with frames of the
    oldest stack.
    """

    @property
    def margin(self) -> int:
        """Number of expired rows whose frames are kept for the oldest frame stack."""
        return self.num_slots - self.rows - 1

    @property
    def size(self) -> int:
        """Number of entries per column."""
        return self.num_slots * self.num_envs

    def slices(self, first: int, stop: int) -> Iterator[tuple[slice, slice]]:
        """Yield slices of slots for the rows first..stop - 1, with the offsets from `first`."""
        done = 0
        while done < stop - first:
            slot = (first + done) % self.num_slots
            length = min(self.num_slots - slot, stop - first - done)
            yield slice(slot, slot + length), slice(done, done + length)
            done += length


class ReplayLayout:
    """Columns and size of a replay buffer, computed before memory is allocated.

    Args:
        buffer_size: Capacity in transitions, >= 1; stored as `max(1, buffer_size // num_envs)`
            rows.
        observation_space: Flat observation space of one environment.
        actions: Example action of the agent, `[...]`, which determines shape and dtype.
        num_envs: B, >= 1.
        frame_stack: Number of frames n of stacked observations, by key.
        keeps_terminal_obs: Whether final observations of terminated episodes are stored as well.

    Raises:
        ConfigError: If a size is below 1, or `frame_stack` does not match the observation shapes.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        actions: TensorTree,
        *,
        num_envs: int = 1,
        frame_stack: Mapping[str, int] | None = None,
        keeps_terminal_obs: bool = False,
    ) -> None:
        check_at_least("buffer_size", buffer_size, 1)
        check_at_least("num_envs", num_envs, 1)
        self.observation_space = observation_space
        self.frame_stack = dict(frame_stack or {})
        self.keeps_terminal_obs = keeps_terminal_obs
        self.has_obs_keys = isinstance(observation_space, spaces.Dict)
        self.has_action_keys = isinstance(actions, dict)
        self.obs = Columns.of(flat_spaces(observation_space))
        self.actions = Columns.like(
            {key: leaf.cpu().numpy() for key, leaf in leaves_by_key(actions).items()}
        )
        for key, n in self.frame_stack.items():
            if key not in self.obs or self.obs[key].shape[:1] != (n,):
                found = {key: spec.shape for key, spec in self.obs.items()}
                problem = f"expected observations of shape [{n}, ...] under {key!r}, got {found}"
                raise ConfigError("frame_stack", problem, self.frame_stack)
        rows = max(1, buffer_size // num_envs)
        self.ring = Ring(rows, num_envs, rows + max([1, *self.frame_stack.values()]))

    def columns(self) -> dict[str, Spec]:
        """Return shape and dtype of an entry of each column by name."""
        found = {"end": Spec((), np.dtype(np.uint8)), "rewards": Spec((), np.dtype(np.float32))}
        found |= {f"actions/{key}": spec for key, spec in self.actions.items()}
        for key, spec in self.obs.items():
            if key in self.frame_stack:
                found[f"depths/{key}"] = Spec((), np.dtype(np.uint8))
                spec = Spec(spec.shape[1:], spec.dtype)
            found[f"obs/{key}"] = spec
        return found

    @property
    def nbytes(self) -> int:
        """Total size of all columns in bytes."""
        return self.ring.size * sum(spec.nbytes for spec in self.columns().values())

    def describe(self) -> dict[str, str]:
        """Return the properties that must match when a state is loaded."""
        sizes = {"rows": str(self.ring.rows), "num_envs": str(self.ring.num_envs)}
        stacks = {f"frame_stack/{key}": str(n) for key, n in self.frame_stack.items()}
        columns = {name: f"{s.dtype.name} {list(s.shape)}" for name, s in self.columns().items()}
        terminal = {"terminal_obs": "kept"} if self.keeps_terminal_obs else {}
        return {**sizes, **stacks, **columns, **terminal}


class Column:
    """Array `[num_slots, num_envs, *shape]` of a ring, allocated step by step.

    Args:
        ring: Size of the ring.
        spec: Shape and dtype of an entry.
        storage: Where the array is stored.
        directory: Directory of the (unnamed) memory-mapped file if `storage` is `disk`.
        device: Device of the array if `storage` is `device`.
    """

    def __init__(
        self,
        ring: Ring,
        spec: Spec,
        *,
        storage: Storage = "memory",
        directory: Path | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.ring = ring
        self._spec, self._storage = spec, storage
        self._directory, self._device = directory, device
        self._rows = self._allocated(0)
        self.entries = self._rows.view(0, *spec.shape)
        """Allocated entries by index, `[allocated slots * num_envs, *shape]`."""

    def resize(self, num_slots: int) -> None:
        """Allocate `num_slots` slots (>= the number in use), keeping the contents."""
        rows = self._allocated(num_slots)
        rows[: len(self._rows)].copy_(self._rows)
        self._rows = rows
        self.entries = rows.view(num_slots * self.ring.num_envs, *self._spec.shape)

    def _allocated(self, num_slots: int) -> Tensor:
        """Return new memory filled with zeros."""
        spec, shape = self._spec, (num_slots, self.ring.num_envs, *self._spec.shape)
        nbytes = num_slots * self.ring.num_envs * spec.nbytes
        if self._storage == "device":
            dtype = torch.from_numpy(np.empty(0, spec.dtype)).dtype
            return torch.zeros(shape, dtype=dtype, device=self._device)
        if self._storage == "disk" and nbytes:
            with TemporaryFile(dir=self._directory) as file:
                file.truncate(nbytes)
                if sys.platform == "linux":
                    # On a full disk, a write to a sparse file would kill the process.
                    os.posix_fallocate(file.fileno(), 0, nbytes)
                return torch.from_numpy(np.memmap(file, spec.dtype, "r+", shape=shape))
        return torch.from_numpy(
            np.zeros(shape, spec.dtype)
        )  # Pages are committed on the first write.

    def write(self, first: int, values: Tensor, begin: int = 0) -> None:
        """Write `values[begin:]`, of shape `[k, num_envs, *shape]`, to rows starting at `first`."""
        values = values[begin:]
        for slots, which in self.ring.slices(first, first + len(values)):  # Usually a single slice.
            self._rows[slots].copy_(values[which])

    def gather(self, indices: Array) -> Tensor:
        """Return the entries at indices `[k]` on the column's device, `[k, *shape]`."""
        return self.entries.index_select(0, send(torch.from_numpy(indices), self.entries.device))

    def read_slots(self, slots: slice) -> Array:
        """Return a copy of some slots; unallocated slots are zero."""
        held = self._rows[slots].cpu().numpy()
        copied = np.zeros((slots.stop - slots.start, *held.shape[1:]), held.dtype)
        copied[: len(held)] = held
        return copied

    def write_slots(self, slots: slice, values: Array) -> None:
        """Write a result of `read_slots`; unallocated slots are skipped."""
        rows = self._rows[slots]
        rows.copy_(torch.from_numpy(values[: len(rows)]))


class KeptObservations:
    """Queue of observations with increasing positions.

    Stores the final observations of episodes, which are not in the ring: the next row contains the
    first observation of the next episode. Memory grows by doubling; a lookup takes O(log n).

    Args:
        specs: Shape and dtype of the leaves by key.
    """

    def __init__(self, specs: Mapping[str, Spec]) -> None:
        self._positions = np.empty(0, np.int64)
        self._leaves = {key: np.empty((0, *spec.shape), spec.dtype) for key, spec in specs.items()}
        self._begin = self._end = 0

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def nbytes(self) -> int:
        """Allocated memory in bytes."""
        return self._positions.nbytes + sum(leaf.nbytes for leaf in self._leaves.values())

    def append(self, positions: Array, leaves: Mapping[str, Array]) -> None:
        """Append observations `[k, ...]`.

        Args:
            positions: Positions `[k]`, increasing and larger than all stored positions.
            leaves: Observations by key.
        """
        if not len(positions):
            return
        if self._end + len(positions) > len(self._positions):
            self._make_room(len(self) + len(positions))
        added = slice(self._end, self._end + len(positions))
        self._positions[added] = positions
        for key, leaf in self._leaves.items():
            leaf[added] = leaves[key]
        self._end = added.stop

    def drop_before(self, position: int) -> None:
        """Drop all observations before a position."""
        self._begin += self._count_before(position)

    def drop_from(self, position: int) -> None:
        """Drop all observations from a position onward."""
        self._end = self._begin + self._count_before(position)

    def gather(self, positions: Array, keys: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return the observations `[k, ...]` at positions `[k]` by key.

        Observations must be stored for all positions.
        """
        entries = self._begin + self._positions[self._begin : self._end].searchsorted(positions)
        keys = self._leaves if keys is None else keys
        return {key: torch.from_numpy(self._leaves[key][entries]) for key in keys}

    def between(self, first: int, stop: int) -> dict[str, Array]:
        """Return copies of the observations at positions first..stop - 1."""
        start, end = (self._begin + self._count_before(position) for position in (first, stop))
        parts = {f"obs/{key}": leaf[start:end].copy() for key, leaf in self._leaves.items()}
        return {"positions": self._positions[start:end].copy(), **parts}

    def restore(self, pieces: list[dict[str, Array]]) -> None:
        """Replace the contents with results of `between`."""
        self._begin = self._end = 0
        if not pieces:
            return
        joined = {part: np.concatenate([piece[part] for piece in pieces]) for part in pieces[0]}
        order = np.argsort(joined["positions"])
        leaves = {key: joined[f"obs/{key}"][order] for key in self._leaves}
        self.append(joined["positions"][order], leaves)

    def _count_before(self, position: int) -> int:
        return int(self._positions[self._begin : self._end].searchsorted(position))

    def _make_room(self, needed: int) -> None:
        """Move the stored entries to the front; double the memory if it is more than half full."""
        size = len(self._positions)
        size = size if 2 * needed <= size else 2 * needed
        kept = slice(self._begin, self._end)
        self._positions = _moved(self._positions, kept, size)
        self._leaves = {key: _moved(leaf, kept, size) for key, leaf in self._leaves.items()}
        self._begin, self._end = 0, kept.stop - kept.start


def _moved(array: Array, kept: slice, size: int) -> Array:
    target = array if size == len(array) else np.empty((size, *array.shape[1:]), array.dtype)
    target[: kept.stop - kept.start] = array[kept]
    return target


class FrameColumn:
    """Column of frame stacks `[n, *frame]` (newest last) that stores each frame once.

    If a stack does not continue the stack of the previous row (after a reset, or if a wrapper took
    several steps at once), the whole stack is stored separately. The `depth` of a row is the number
    of rows since the last separate stack, at most n - 1. The stack of a row consists of the last n
    - depth frames of the separate stack and the newest frames of the following `depth` rows.

    Args:
        n: Frames per stack.
        frames: Column of the newest frames.
        depths: uint8 column with the depth of each row; stored in memory.
        spec: Shape `[n, *frame]` and dtype of a stack.
    """

    def __init__(self, n: int, frames: Column, depths: Column, spec: Spec) -> None:
        self.n = n
        self.kept = KeptObservations({"": spec})
        self._frames = frames
        self._depths = depths
        self._depth_entries = depths.entries.numpy()
        self._ring = frames.ring

    def write(self, first: int, stacks: Tensor, begin: int, continues: bool) -> None:
        """Write stacks `[rows, envs, n, *frame]` to consecutive rows.

        Args:
            first: Row of the first written stack.
            stacks: Stacked observations.
            begin: Index of the first stack to write.
            continues: Whether row `first` already contains the first written stack.
        """
        num_envs = self._ring.num_envs
        newest, goes_on = _newest_frames(stacks)
        begins = np.ones((len(newest) - begin, num_envs), bool)
        begins[1:] = ~goes_on[begin:]
        numbers = np.arange(len(begins))[:, None]
        begin_numbers = np.where(begins, numbers, -self.n)
        if continues:
            begins[0] = False
            begin_numbers[0] = -self._depth_entries.reshape(-1, num_envs)[
                first % self._ring.num_slots
            ].astype(np.int64)
        else:
            self.kept.drop_from(first * num_envs)
        depths = numbers - np.maximum.accumulate(begin_numbers, axis=0)
        self._depths.write(first, torch.from_numpy(depths.clip(max=self.n - 1)))
        self._frames.write(first, newest, begin)
        whole = np.flatnonzero(begins)
        picked = torch.from_numpy(whole + begin * num_envs)
        kept = stacks.flatten(0, 1).index_select(0, picked).numpy()
        self.kept.append(first * num_envs + whole, {"": kept})

    def gather(self, positions: Array) -> Tensor:
        """Return the stacks `[k, n, *frame]` at positions `[k]`."""
        n, num_envs, size = self.n, self._ring.num_envs, self._ring.size
        # Indices before the first row wrap around; these frames are replaced below.
        window = (positions[:, None] + np.arange(1 - n, 1) * num_envs) % len(self._frames.entries)
        frames = self._frames.gather(window.ravel())
        stacks = frames.view(-1, n, *frames.shape[1:])
        depths = self._depth_entries.take(positions % size)
        short = np.flatnonzero(depths < n - 1)
        if short.size:
            depth = depths[short].astype(np.int64)
            whole = self.kept.gather(positions[short] - depth * num_envs)[""]
            which, ages = np.nonzero(np.arange(n) < (n - depth)[:, None])
            older = whole[which, ages + depth[which]].to(frames.device)
            stacks[torch.from_numpy(short[which]), torch.from_numpy(ages)] = older
        return stacks


def _newest_frames(stacks: Tensor) -> tuple[Tensor, Array]:
    """Return the newest frames `[rows, envs, *frame]` and a mask of continued stacks."""
    same = stacks[1:, :, :-1] == stacks[:-1, :, 1:]
    return stacks[:, :, -1], same.flatten(2).all(-1).numpy()
