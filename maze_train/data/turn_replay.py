"""Replay of the turns of several agents: a buffer for each policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.data.replay import UniformReplayBuffer
from maze_train.data.replay_memory import ENDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maze_train.data.rollout import Rollout
    from maze_train.data.transitions import BaseReplayBuffer, Transitions
    from maze_train.types import Array


WAITS = 16
"""Bit of the flags of a row, beside those of `ReplayMemory`: the agent of the column does nothing
in it, and goes on in a later one."""


class TurnReplayBuffer(UniformReplayBuffer):
    """The last turns of agents with one policy; each is equally likely to be sampled.

    Columns are agents in environments, and samples of several steps are of so many turns of one
    agent, however many rows it waits in between. Rollouts are those of a `TurnSplitter` with
    `at_end`.
    """

    def _add(self, rollout: Rollout) -> None:
        super()._add(rollout)
        memory = self._memory
        if rollout.valid is not None:
            waits = (~rollout.valid & rollout.truncated).numpy().flatten()
            first = (memory.head - rollout.num_steps) * self.num_envs
            where = first + np.flatnonzero(waits)
            where = where[where >= memory.oldest * self.num_envs]
            memory.flags[where % memory.ring.size] = WAITS

    def _following(self, positions: Array) -> Array:
        memory, where = self._memory, [positions]
        for _ in self._steps[1:]:
            after = where[-1] + self.num_envs
            ends = memory.flags.take(where[-1] % memory.ring.size) & ENDS
            waiting = np.flatnonzero(ends == 0)
            while waiting.size:
                flags = memory.flags.take(after[waiting] % memory.ring.size)
                waiting = waiting[(flags & WAITS) != 0]
                after[waiting] += self.num_envs
            where.append(after)
        return np.stack(where)


class PolicyReplayBuffers:
    """A replay buffer for each policy, filled and sampled side by side.

    Args:
        buffers: The buffers by id of their policy.
    """

    keeps_terminal_obs = True

    def __init__(self, buffers: Mapping[str, BaseReplayBuffer]) -> None:
        self.buffers = dict(buffers)

    def __len__(self) -> int:
        """Number of turns that can be sampled."""
        return sum(map(len, self.buffers.values()))

    def add_rollout(self, rollouts: Mapping[str, Rollout]) -> None:
        """Store a rollout of each policy that made a turn and has a buffer."""
        for policy in rollouts.keys() & self.buffers.keys():
            self.buffers[policy].add_rollout(rollouts[policy])

    def interrupt(self) -> None:
        """Say that all environments begin new episodes before the next rollouts."""
        for buffer in self.buffers.values():
            buffer.interrupt()

    def set_progress(self, fraction: float) -> None:
        """Set the share of training that is over."""
        for buffer in self.buffers.values():
            buffer.set_progress(fraction)

    def sample_batch(self, n_samples: int) -> dict[str, Transitions]:
        """So many turns of each policy that has made one."""
        return {
            policy: buffer.sample_batch(n_samples)
            for policy, buffer in self.buffers.items()
            if len(buffer)
        }

    def state_dict(self) -> dict[str, Any]:
        """The state of each buffer."""
        return {policy: buffer.state_dict() for policy, buffer in self.buffers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        for policy, buffer in self.buffers.items():
            buffer.load_state_dict(state[policy])
