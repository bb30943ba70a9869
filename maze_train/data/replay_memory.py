"""Memory of a replay buffer: ring columns and separately stored observations."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from gymnasium import spaces

from maze_train.core.checks import check_at_least
from maze_train.core.errors import ConfigError, RunDirectoryError, ShapeError
from maze_train.core.state import StatePart
from maze_train.core.step_end import (
    DROPPED,
    TRUNCATED,
    WAITING,
    has_ended,
    is_transition,
    is_truncated,
)
from maze_train.core.types import Array, Tensor, TensorTree, leaves_by_key, send
from maze_train.data.rollout import Rollout
from maze_train.spaces.columns import Columns, Spec, leaves_of
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


NO_STEP = DROPPED
"""Code of rows without a step: empty rows and the row of the newest observation."""

NONE = np.empty(0, np.int64)
"""Empty array of positions."""

LARGE = ("obs/", "actions/")
"""Prefixes of columns in the configured storage; other columns are stored in memory."""


SEGMENT_NBYTES = 2**21
MAX_SEGMENTS = 256


class ReplayMemory:
    """Ring buffer of transitions that stores each observation once.

    Row r contains an observation, the action, the reward and the end code of the step. The next
    observation is in row r + 1. The newest row, `head`, contains only an observation. Final
    observations of truncated episodes are stored separately.

    Args:
        layout: Layout of the stored columns.
        storage: Where observations and actions are stored; other columns are stored in memory.
        directory: Directory of the memory-mapped files if `storage` is `disk`.
        device: Device of the columns if `storage` is `device`.
    """

    def __init__(
        self,
        layout: ReplayLayout,
        storage: Storage = "memory",
        directory: Path | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layout = layout
        self.ring = layout.ring
        self.head = 0
        self.num_valid = 0
        self._columns = {
            name: Column(
                self.ring,
                spec,
                storage=storage if name.startswith(LARGE) else "memory",
                directory=directory,
                device=device,
            )
            for name, spec in layout.columns().items()
        }
        # Small columns are allocated at once, because unwritten entries are also read.
        self._large = [c for name, c in self._columns.items() if name.startswith(LARGE)]
        for column in self._columns.values():
            if column not in self._large:
                column.resize(self.ring.num_slots)
        self._num_allocated = 0
        self._changed = (range(0), range(0))
        self.end: Array = self._columns["end"].entries.numpy()
        self.end[:] = NO_STEP
        self.has_waiting = False
        self.rewards: Array = self._columns["rewards"].entries.numpy()
        self._actions = {key: self._columns[f"actions/{key}"] for key in layout.actions}
        self._whole = {
            key: self._columns[f"obs/{key}"] for key in layout.obs if key not in layout.frame_stack
        }
        self._stacks: dict[str, FrameColumn] = {
            key: FrameColumn(
                n, self._columns[f"obs/{key}"], self._columns[f"depths/{key}"], layout.obs[key]
            )
            for key, n in layout.frame_stack.items()
        }
        self._final_obs = KeptObservations(layout.obs)
        self._separate = {"final": self._final_obs}
        self._separate |= {f"stacks/{key}": column.kept for key, column in self._stacks.items()}
        row_nbytes = layout.nbytes // self.ring.num_slots
        self._segment_slots = max(
            -(-self.ring.num_slots // MAX_SEGMENTS), SEGMENT_NBYTES // max(1, row_nbytes), 1
        )
        # Head after the last write to each segment; 0: never written.
        self._versions = np.zeros(-(-self.ring.num_slots // self._segment_slots), np.int64)

    def reserve(self, num_rows: int) -> None:
        """Allocate `num_rows` rows; without this call, the first write allocates all rows."""
        num_slots = min(num_rows, self.ring.num_slots)
        if num_slots > self._num_allocated:
            for column in self._large:
                column.resize(num_slots)
            self._num_allocated = num_slots

    def _make_room(self, num_rows: int) -> None:
        """Allocate at least the first `num_rows` rows."""
        allocated = self._num_allocated
        if num_rows > allocated < self.ring.num_slots:
            self.reserve(max(num_rows, allocated * 5 // 4) if allocated else self.ring.num_slots)

    @property
    def num_rows(self) -> int:
        """Number of rows that may contain transitions."""
        return min(self.head, self.ring.rows)

    @property
    def oldest(self) -> int:
        """First row that may contain transitions."""
        return self.head - self.num_rows

    def write(self, rollout: Rollout, first: int, continues: bool) -> None:
        """Write a rollout, or the last rows of a rollout longer than the ring.

        Args:
            rollout: T steps.
            first: Row of the first step: the head or the row after it.
            continues: Whether the head already contains the first observation of the rollout.

        Raises:
            ShapeError: If the shapes do not match the columns, or a final observation is missing.
        """
        self._check(rollout)
        obs, actions = leaves_by_key(rollout.obs), leaves_by_key(rollout.actions)
        # Observations and actions are copied directly to their storage, which may be on the same
        # device.
        rollout = replace(rollout, obs={}, actions={}).to(torch.device("cpu"))
        end, positions, picked = self._ends_of(rollout)
        begin = max(0, rollout.num_steps - self.ring.rows)
        head = first + rollout.num_steps
        self._make_room(head + 1)
        expired = self._expire(head)
        self._write_obs(obs, first + begin, begin, continues)
        for key, leaf in actions.items():
            self._actions[key].write(first + begin, leaf, begin)
        self._columns["rewards"].write(first + begin, rollout.rewards, begin)
        self._columns["end"].write(first + begin, torch.from_numpy(end), begin)
        if len(positions):
            self._keep_final_obs(rollout, positions, picked, first, begin)
        self.head = head
        self.num_valid += int(np.count_nonzero(is_transition(end[begin:])))
        # Expired rows also changed, because their frame stacks were dropped.
        self._touch(expired.start, expired.stop)
        self._touch(first - 1, head + 1)
        self._changed = (expired, range(first + begin, head + 1))

    @property
    def changed(self) -> Array:
        """Indices of the entries that the last `write` added or expired."""
        num_envs = self.ring.num_envs
        parts = [np.arange(rows.start * num_envs, rows.stop * num_envs) for rows in self._changed]
        return np.concatenate(parts) % self.ring.size

    def is_transition(self, positions: Array) -> Array:
        """Return whether the entries at positions `[k]` are transitions."""
        return is_transition(self.end.take(positions % self.ring.size))

    def has_final_obs(self, end: Array) -> Array:
        """Return whether the observation after a step is stored separately, by end code."""
        return has_ended(end) if self.layout.keeps_terminal_obs else is_truncated(end)

    def observations(
        self, positions: Array, keys: Iterable[str] | None = None
    ) -> dict[str, Tensor]:
        """Return the observations at positions `[k]` by key; None: all keys."""
        indices, keys = positions % self.ring.size, self.layout.obs if keys is None else keys
        return {
            key: self._whole[key].gather(indices)
            if key in self._whole
            else self._stacks[key].gather(positions)
            for key in keys
        }

    def put_final_obs(self, leaves: Mapping[str, Tensor], where: Array, positions: Array) -> None:
        """Write the final observations of `positions` to the entries `where` of `leaves`."""
        entries = torch.from_numpy(where)
        for key, leaf in self._final_obs.gather(positions, leaves).items():
            device = leaves[key].device
            leaves[key].index_copy_(0, send(entries, device), send(leaf, device))

    def actions(self, indices: Array) -> dict[str, Tensor]:
        """Return the actions at indices `[k]` by key."""
        return {key: column.gather(indices) for key, column in self._actions.items()}

    def positions(self, indices: Array) -> Array:
        """Return the positions of the entries at indices `[k]`."""
        last = (self.head + 1) * self.ring.num_envs - 1
        return last - (last - indices) % self.ring.size

    def state_dict(self) -> dict[str, Any]:
        """Return the head and the segments of the ring; read the segments before the next write."""
        segments = {
            f"{number:03d}": StatePart(str(version), partial(self._read_segment, number))
            for number, version in enumerate(self._versions)
            if version
        }
        return {"head": self.head, "layout": self.layout.describe(), "segments": segments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, reading one segment at a time.

        Raises:
            ConfigError: If the layout of the saved buffer differs.
            RunDirectoryError: If a segment is damaged.
        """
        ours, theirs = self.layout.describe(), state["layout"]
        differences = [
            f"{name} is {ours.get(name, 'missing')}, saved as {theirs.get(name, 'missing')}"
            for name in {**ours, **theirs}
            if ours.get(name) != theirs.get(name)
        ]
        if differences:
            raise ConfigError(
                "replay buffer",
                f"the saved buffer has another layout: {'; '.join(differences)}. Use the version, "
                "the settings and the environment of the original run, or start a new run",
            )
        self.head = state["head"]
        self._make_room(self.head + 1)
        self.end[:] = NO_STEP
        self._versions[:] = 0
        segments = [self._load_segment(int(name), part) for name, part in state["segments"].items()]
        for name, kept in self._separate.items():
            kept.restore([leaves_of(content, name) for content in segments])
        self.num_valid = int(np.count_nonzero(is_transition(self.end)))
        self.has_waiting = bool((self.end == WAITING).any())

    def _ends_of(self, rollout: Rollout) -> tuple[Array, Array, Array]:
        """Return the end codes of a rollout and select the final observations to store.

        Returns:
            End codes of the rows and the head, `[T + 1, B]`; increasing positions of the stored
            final observations, `[K]`; indices of these observations in `final_obs`, `[K]`.
        """
        end = np.full((rollout.num_steps + 1, rollout.num_envs), NO_STEP, np.uint8)
        end[:-1] = rows = rollout.end.numpy()
        if not rows.any():  # The common case for short rollouts.
            return end, NONE, NONE
        self.has_waiting = self.has_waiting or bool((rows == WAITING).any())
        positions, needed = rollout.final_positions.numpy(), self.has_final_obs(rows)
        missing = needed.copy()
        missing.flat[positions] = False
        if missing.any():
            step, env = np.argwhere(missing)[0]
            how = "truncated" if rows[step, env] == TRUNCATED else "terminated"
            raise ShapeError(
                f"step {step} of environment {env} was {how}: expected its final observation in "
                "final_obs and its position in final_positions"
            )
        order = np.argsort(positions)
        order = order[needed.flat[positions[order]]]
        return end, positions[order], order

    def _check(self, rollout: Rollout) -> None:
        layout = self.layout
        pairs = (("obs", rollout.obs, layout.obs), ("actions", rollout.actions, layout.actions))
        for name, tree, columns in pairs:
            found = {key: leaf.shape[2:] for key, leaf in leaves_by_key(tree).items()}
            expected = {key: spec.shape for key, spec in columns.items()}
            if found != expected:
                got, wanted = ({k: list(s) for k, s in x.items()} for x in (found, expected))
                raise ShapeError(
                    f"one step of {name} has the shapes {got}, the replay buffer expects {wanted}"
                )

    def _write_obs(self, obs: dict[str, Any], row: int, begin: int, continues: bool) -> None:
        for key, stacks in self._stacks.items():
            stacks.write(row, obs[key].to("cpu"), begin, continues and not begin)
        for key, column in self._whole.items():
            column.write(row, obs[key], begin)

    def _keep_final_obs(
        self, rollout: Rollout, positions: Array, picked: Array, first: int, begin: int
    ) -> None:
        num_envs = self.ring.num_envs
        is_kept = positions >= begin * num_envs
        leaves = {
            key: leaf.numpy()[picked[is_kept]]
            for key, leaf in leaves_by_key(rollout.final_obs).items()
        }
        self._final_obs.append(first * num_envs + positions[is_kept], leaves)

    def _expire(self, head: int) -> range:
        """Drop the rows that are overwritten up to the new head, and return them."""
        num_envs, new = self.ring.num_envs, head - self.ring.rows
        if new <= 0:
            return range(0)
        expired = range(self.oldest, min(new, self.head))
        indices = np.arange(expired.start * num_envs, expired.stop * num_envs) % self.ring.size
        self.num_valid -= int(np.count_nonzero(is_transition(self.end[indices])))
        self.end[indices] = NO_STEP
        self._final_obs.drop_before(new * num_envs)
        for column in self._stacks.values():
            column.kept.drop_before((new - self.ring.margin) * num_envs)
        return expired

    def _touch(self, first: int, stop: int) -> None:
        """Mark the segments of rows first..stop - 1 as changed."""
        first = max(first, stop - self.ring.num_slots, 0)
        for slots, _ in self.ring.slices(first, stop):
            touched = slice(
                slots.start // self._segment_slots, -(-slots.stop // self._segment_slots)
            )
            self._versions[touched] = self.head

    def _slots(self, number: int) -> slice:
        start = number * self._segment_slots
        return slice(start, min(start + self._segment_slots, self.ring.num_slots))

    def _read_segment(self, number: int) -> dict[str, Any]:
        """Return the slots of all columns and the separately stored observations."""
        slots = self._slots(number)
        content = {name: column.read_slots(slots) for name, column in self._columns.items()}
        # Slots contain rows of the current or the previous pass through the ring.
        num_envs, turn = self.ring.num_envs, self.ring.size
        first = (self.head // self.ring.num_slots) * turn + slots.start * num_envs
        stop = first + (slots.stop - slots.start) * num_envs
        for name, kept in self._separate.items():
            before, now = kept.between(first - turn, stop - turn), kept.between(first, stop)
            for part in now:
                content[f"{name}/{part}"] = np.concatenate([before[part], now[part]])
        return content

    def _load_segment(self, number: int, part: StatePart) -> dict[str, Array]:
        """Restore the columns of a segment, and return the other contents of the segment."""
        content = part.read()
        slots = self._slots(number)
        for name, column in self._columns.items():
            values = content.pop(name, None)
            expected = column.read_slots(slice(0, 0))
            shape = (slots.stop - slots.start, *expected.shape[1:])
            if values is None or values.shape != shape or values.dtype != expected.dtype:
                raise RunDirectoryError(
                    f"segment {number} of the saved replay buffer is damaged: expected {name} as "
                    f"{expected.dtype} {list(shape)}. Use an earlier checkpoint"
                )
            column.write_slots(slots, values)
        self._versions[number] = int(part.version)
        return content
