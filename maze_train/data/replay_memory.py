"""Memory of a replay buffer: ring columns and separately stored observations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

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
from maze_train.core.types import Array, Tensor, leaves_by_key, send
from maze_train.data.replay_columns import (
    Column,
    FrameColumn,
    KeptObservations,
    ReplayLayout,
    Storage,
)
from maze_train.data.rollout import Rollout
from maze_train.spaces.columns import leaves_of

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
