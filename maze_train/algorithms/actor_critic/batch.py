"""Samples for actor-critic losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from maze_train.trees import tree_map
from maze_train.types import Sequences

if TYPE_CHECKING:
    from maze_train.data.rollout import Rollout
    from maze_train.types import Tensor, TensorTree

__all__ = ["ActorCriticBatch", "PreparedRollout"]

ADVANTAGES, TARGETS, OLD_VALUES, OLD_LOG_PROBS = range(4)


@dataclass(frozen=True, slots=True)
class ActorCriticBatch:
    """n samples of a rollout; those of recurrent networks lie in sequences."""

    obs: TensorTree
    """Observations, `[n, ...]`; `[L * n, ...]` in sequences, transitions or not."""

    actions: TensorTree
    """Actions as the distribution sampled them, `[n, ...]`."""

    columns: Tensor
    """Advantages, targets of the critic, old values (on the scale of the targets) and old
    log-probabilities, `[4, n]`: one tensor, so that a minibatch gathers them in one operation."""

    sequences: Sequences | None = None
    """Layout of observations in time; None without a memory."""

    @property
    def size(self) -> int:
        """Number n of samples."""
        return self.columns.shape[1]

    @property
    def advantages(self) -> Tensor:
        """Advantages, `[n]`."""
        return self.columns[ADVANTAGES]

    @property
    def targets(self) -> Tensor:
        """Targets of the critic's regression, `[n]`."""
        return self.columns[TARGETS]

    @property
    def old_values(self) -> Tensor:
        """Values before this pass, on the scale of the targets, `[n]`."""
        return self.columns[OLD_VALUES]

    @property
    def old_log_probs(self) -> Tensor:
        """Log-probabilities of the actions under the policy as it was before the update, `[n]`."""
        return self.columns[OLD_LOG_PROBS]


class PreparedRollout:
    """A rollout with advantages and targets, from which minibatches are cut.

    A minibatch consists of units: of single transitions, or, with a memory, of sequences of L
    consecutive steps of one environment.

    Args:
        rollout: T steps of B environments; rewards as the learner takes them.
        columns: The columns of `ActorCriticBatch` for all T * B rows, `[4, T * B]`.
        sequence_length: L, a divisor of T; unused without a memory.
    """

    def __init__(self, rollout: Rollout, columns: Tensor, sequence_length: int = 1) -> None:
        self.rollout = rollout
        self.columns = columns
        self.sequence_length = 1 if rollout.states is None else sequence_length
        self._obs = rollout.flat_obs()
        self._actions = tree_map(lambda x: x.flatten(0, 1), rollout.actions)
        self._valid = None if rollout.ignored is None else ~rollout.ignored
        self._units = self._units_with_transitions()
        self._starts = None if rollout.states is None else _episode_starts(rollout)

    @property
    def num_units(self) -> int:
        """Number of units."""
        if self._units is not None:
            return len(self._units)
        return self.rollout.rewards.numel() // self.sequence_length

    @property
    def old_log_probs(self) -> Tensor:
        """Log-probabilities under the policy as it was before the update, `[T * B]`."""
        return self.columns[OLD_LOG_PROBS]

    def with_columns(self, columns: Tensor) -> PreparedRollout:
        """The same rollout with other columns."""
        return PreparedRollout(self.rollout, columns, self.sequence_length)

    def select(self, units: Tensor) -> ActorCriticBatch:
        """The samples of some units, given by their numbers below `num_units`, int64."""
        if self._units is not None:
            units = self._units[units]
        if self._starts is not None:
            return self._select_sequences(units, self._starts)
        return self._batch(units, units)

    def whole(self) -> ActorCriticBatch:
        """All samples, in order of time."""
        if self._units is not None or self._starts is not None:
            return self.select(torch.arange(self.num_units, device=self.columns.device))
        obs = tree_map(lambda x: x[: self.num_units], self._obs)
        return ActorCriticBatch(obs, self._actions, self.columns)

    def transitions(self, column: Tensor) -> Tensor:
        """Values of those of `T * B` samples that belong to transitions."""
        return column if self._valid is None else column[self._valid.flatten()]

    def _batch(
        self, positions: Tensor, samples: Tensor, sequences: Sequences | None = None
    ) -> ActorCriticBatch:
        """Observations at positions, and all else of samples, which are positions as well."""
        return ActorCriticBatch(
            obs=tree_map(lambda x: x.index_select(0, positions), self._obs),
            actions=tree_map(lambda x: x.index_select(0, samples), self._actions),
            columns=self.columns.index_select(1, samples),
            sequences=sequences,
        )

    def _select_sequences(self, numbers: Tensor, starts: Tensor) -> ActorCriticBatch:
        """Sequence `w * B + b` begins at step `w * L` of environment b."""
        rollout, length = self.rollout, self.sequence_length
        assert rollout.states is not None
        first, envs = numbers // rollout.num_envs * length, numbers % rollout.num_envs
        steps = first + torch.arange(length, device=numbers.device).unsqueeze(1)
        positions = (steps * rollout.num_envs + envs).flatten()
        samples, valid = positions, None
        if self._valid is not None:
            valid = self._valid.flatten()[positions].nonzero().squeeze(1)
            samples = positions[valid]
        sequences = Sequences(rollout.states[first, envs], starts[steps, envs], valid)
        return self._batch(positions, samples, sequences)

    def _units_with_transitions(self) -> Tensor | None:
        """The units that hold a transition; None: all do."""
        if self._valid is None:
            return None
        windows = self._valid.view(-1, self.sequence_length, self.rollout.num_envs).any(1)
        return windows.flatten().nonzero().squeeze(1)


def _episode_starts(rollout: Rollout) -> Tensor:
    """Whether the memory is emptied before a step, `[T, B]`.

    It is not before the first one, because `states` knows what is remembered there.
    """
    fresh = rollout.fresh
    starts = torch.zeros_like(fresh)
    starts[1:] = fresh[:-1]
    return starts
