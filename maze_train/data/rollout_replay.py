"""Rollouts that are kept to be learned from again."""

from __future__ import annotations

from collections import deque
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch

from maze_train.data.frames import FrameStacks
from maze_train.data.joining import join_rollouts, select_envs
from maze_train.data.rollout import Rollout
from maze_train.types import StatePart


class RolloutReplay:
    """Keeps the last rollouts of actors, and adds some of them to each new batch.

    Args:
        size: Rollouts of one actor that are kept. >= 1.
        num_replayed: How many of them, drawn with replacement, are added to a batch. >= 1.
        num_envs: Environments of one actor.
        seed: Seed of what is drawn.

    Source: Espeholt et al. (2018), arXiv:1802.01561, section 5.2.2 (experience replay).
    """

    def __init__(self, size: int, num_replayed: int, num_envs: int, seed: int) -> None:
        self.num_replayed = num_replayed
        self.num_envs = num_envs
        self.generator = torch.Generator().manual_seed(seed)
        self._rollouts: deque[tuple[int, Rollout]] = deque(maxlen=size)
        self._added = 0

    def __len__(self) -> int:
        return len(self._rollouts)

    def mix(self, rollout: Rollout) -> Rollout:
        """New rollouts, and kept ones after them; the new ones are kept from now on.

        Args:
            rollout: Rollouts of actors side by side, in memory that nobody writes to again.
        """
        batch = rollout
        if self._rollouts:
            picks = torch.randint(
                len(self._rollouts), (self.num_replayed,), generator=self.generator
            )
            flags = torch.ones(self.num_envs, dtype=torch.bool)
            kept = [replace(self._rollouts[i][1], replayed=flags) for i in picks.tolist()]
            batch = join_rollouts([rollout, *kept])
        for first in range(0, rollout.num_envs, self.num_envs):
            piece = select_envs(rollout, slice(first, first + self.num_envs))
            self._rollouts.append((self._added, piece))
            self._added += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The kept rollouts, each as a part of its own, and the random state."""
        return {
            "generator": self.generator.get_state(),
            "added": self._added,
            "rollouts": {
                str(number): StatePart(str(number), partial(_columns, rollout))
                for number, rollout in self._rollouts
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.generator.set_state(state["generator"])
        self._added = state["added"]
        self._rollouts.clear()
        for number, part in state["rollouts"].items():
            self._rollouts.append((int(number), _from_columns(part.read())))


def _columns(rollout: Rollout) -> dict[str, Any]:
    """The columns by name, as tensors and plain values in memory of their own."""
    return {field.name: _plain(getattr(rollout, field.name)) for field in fields(rollout)}


def _plain(column: Any) -> Any:
    if isinstance(column, dict):
        return {key: _plain(leaf) for key, leaf in column.items()}
    if isinstance(column, FrameStacks):
        used, numbers = torch.unique(column.numbers, return_inverse=True)
        return {
            FRAMES: column.frames[used],
            "numbers": numbers.view_as(column.numbers),
            "num_envs": column.num_envs,
        }
    return None if column is None else column.clone()


FRAMES = "<frames>"
"""Marks the columns of stacked frames; no key of an observation is like it."""


def _from_columns(columns: dict[str, Any]) -> Rollout:
    found = {name: _leaf(column) for name, column in columns.items()}
    if "ignored" in found:  # written before these columns got the names of today
        found["hidden_states"], ignored = found.pop("states"), found.pop("ignored")
        found["valid"] = None if ignored is None else ~ignored
    return Rollout(**found)


def _leaf(column: Any) -> Any:
    if not isinstance(column, dict):
        return column
    if FRAMES in column:
        return FrameStacks(column[FRAMES], column["numbers"], column["num_envs"])
    return {key: _leaf(leaf) for key, leaf in column.items()}
