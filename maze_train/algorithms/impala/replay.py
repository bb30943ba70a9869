"""Replay of recent rollouts, used by IMPALA."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from maze_train.core.state import StatePart
from maze_train.core.types import tree_map
from maze_train.data.rollout import Rollout, join_rollouts, select_envs


class RolloutReplay:
    """Buffer of recent actor rollouts, which are mixed into new batches.

    Args:
        size: Maximum number of stored actor rollouts, >= 1.
        num_replayed: Number of stored rollouts added to a batch, sampled with replacement, >= 1.
        num_envs: Number of environments per actor.
        seed: Seed of the samples.

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
        """Return the new rollouts followed by replayed rollouts, and store the new rollouts.

        Args:
            rollout: Concatenated rollouts of the actors, in memory that is not reused.
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
        """Return the stored rollouts, each as a separate part, and the state of the generator."""
        return {
            "generator": self.generator.get_state(),
            "added": self._added,
            "rollouts": {
                str(number): StatePart(str(number), partial(_fields, rollout))
                for number, rollout in self._rollouts
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        self.generator.set_state(state["generator"])
        self._added = state["added"]
        self._rollouts.clear()
        for number, part in state["rollouts"].items():
            self._rollouts.append((int(number), Rollout(**part.read())))


def _fields(rollout: Rollout) -> dict[str, Any]:
    """Return the arguments of `Rollout`, with copies of the columns."""
    copies = {name: tree_map(torch.clone, column) for name, column in rollout.columns.items()}
    return {**copies, "has_gaps": rollout.has_gaps}
