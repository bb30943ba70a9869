"""Preparation of rollouts for actor-critic learners: model outputs, minibatches, statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from maze_train.core.step_end import is_followed_by_new
from maze_train.core.types import (
    Sequences,
    Tensor,
    TensorTree,
    count_resets,
    rows_of,
    tree_leaves,
    tree_map,
)
from maze_train.data.rollout import Rollout
from maze_train.learner.ranks import Ranks
from maze_train.nets.actor_critic import ActorCriticModel

MAX_NUMBERS = 2**22
"""Maximum number of observation elements per forward pass: 16 MiB as float32."""

MAX_ROWS = 4096
"""Maximum number of observations per forward pass on a CPU, so that activations fit into the
cache."""


@dataclass(frozen=True, slots=True)
class EvaluatedRollout:
    """Outputs of a model for T steps of B environments."""

    values: Tensor
    """v(s_t), `[T, B]`."""

    next_values: Tensor
    """v(s_{t+1}), `[T, B]`, see `next_values_of`."""

    params: Tensor | None
    """Distribution parameters of the policy, `[T * B, param_size]`; None if not requested."""


@torch.no_grad()
def evaluate_rollout(
    model: ActorCriticModel, rollout: Rollout, with_params: bool, ranks: Ranks
) -> EvaluatedRollout:
    """Evaluate a model on all observations of a rollout, in chunks.

    For a recurrent model, each step starts from its stored recurrent state.

    Args:
        model: The model.
        rollout: T steps of B environments, on the device of the model.
        with_params: Whether to return the distribution parameters of the policy.
        ranks: Data-parallel learners; each rank evaluates a slice of the rows, and the results are
            gathered.
    """
    obs, num_envs = rollout.flat_obs(), rollout.num_envs
    num_rows = (rollout.num_steps + 1) * num_envs
    states = None if rollout.hidden_states is None else rollout.hidden_states.flatten(0, 1)
    values, params, states_after = [], [], []
    for part in _parts(obs, ranks.rows(num_rows)):
        part_obs = rows_of(obs, part)
        state = None if states is None else states[part]
        if with_params or state is not None:
            part_params, part_values, state = model.evaluate(part_obs, state)
            params.append(part_params)
            states_after.append(state)
        else:
            part_values = model.values(part_obs)
        values.append(part_values)

    def joined(parts: list[Tensor]) -> Tensor | None:
        return ranks.join_rows(torch.cat(parts), num_rows) if parts else None

    all_values = ranks.join_rows(torch.cat(values), num_rows).view(-1, num_envs)
    known = [state for state in states_after if state is not None]
    next_values = next_values_of(model, rollout, all_values, joined(known))
    samples = rollout.rewards.numel()
    all_params = joined(params) if with_params else None
    return EvaluatedRollout(
        all_values[:-1], next_values, None if all_params is None else all_params[:samples]
    )


def next_values_of(
    model: ActorCriticModel, rollout: Rollout, all_values: Tensor, states: Tensor | None
) -> Tensor:
    """Return v(s_{t+1}), `[T, B]`.

    For a truncated step, this is the value of the true final observation, or v(s_t) if the final
    observation is not available.

    Args:
        model: The model.
        rollout: The rollout.
        all_values: Values of all rows, `[T + 1, B]`.
        states: Recurrent state after each row, `[(T + 1) * B, S]`; None for feedforward models.
    """
    positions = rollout.final_positions
    next_values = torch.where(rollout.truncated, all_values[:-1], all_values[1:])
    if len(positions):
        state = None if states is None else states[positions]
        next_values.view(-1)[positions] = model.values(rollout.final_obs, state)
    return next_values


@torch.no_grad()
def with_new_states(model: ActorCriticModel, rollout: Rollout) -> Rollout:
    """Recompute the recurrent states of a rollout with the current weights."""
    if rollout.hidden_states is None:
        return rollout
    obs, n = rollout.flat_obs(), rollout.num_envs
    begins_after = is_followed_by_new(rollout.end)
    states = [rollout.hidden_states[0]]
    for t in range(rollout.num_steps):
        _, state = model.policy_step(rows_of(obs, slice(t * n, (t + 1) * n)), states[-1])
        states.append(state.masked_fill(begins_after[t].unsqueeze(1), 0.0))
    return replace(rollout, hidden_states=torch.stack(states))


def _parts(obs: TensorTree, rows: slice) -> list[slice]:
    """Split rows into slices of at most `MAX_NUMBERS` elements and, on a CPU, `MAX_ROWS` rows."""
    leaves = tree_leaves(obs)
    numbers = sum(leaf[:1].numel() for leaf in leaves)
    size = max(1, MAX_NUMBERS // max(numbers, 1))
    if leaves[0].is_cpu:
        size = min(size, MAX_ROWS)
    starts = range(rows.start, rows.stop, size)
    return [slice(start, min(start + size, rows.stop)) for start in starts]


@dataclass(frozen=True, slots=True)
class ActorCriticBatch:
    """n samples of a rollout in named columns, accessed by `batch["name"]`.

    For recurrent networks, the samples are in sequences.
    """

    obs: TensorTree
    """Observations, `[n, ...]`; in sequences `[L * n, ...]`, including rows that are not
    transitions."""

    actions: TensorTree
    """Actions as sampled from the distribution, `[n, ...]`."""

    columns: Mapping[str, Tensor]
    """Other columns, `[n, ...]` each, keyed by name: the following properties, and
    `ActorCriticLearner.columns`."""

    sequences: Sequences | None = None
    """Time layout of the observations; None for feedforward policies."""

    def __getitem__(self, name: str) -> Tensor:
        """Return a column by its name."""
        return self.columns[name]

    @property
    def size(self) -> int:
        """Number of samples, n."""
        return self.columns["advantages"].shape[0]

    @property
    def advantages(self) -> Tensor:
        """Advantages, normalized if `normalize_advantage` is set, `[n]`."""
        return self.columns["advantages"]

    @property
    def targets(self) -> Tensor:
        """Regression targets of the critic, `[n]`."""
        return self.columns["targets"]

    @property
    def old_values(self) -> Tensor:
        """Values before this optimization epoch, on the scale of the targets, `[n]`."""
        return self.columns["old_values"]

    @property
    def old_log_probs(self) -> Tensor:
        """Log-probabilities of the actions under the policy before the update, `[n]`."""
        return self.columns["old_log_probs"]

    def with_column(self, name: str, values: Tensor) -> ActorCriticBatch:
        """Return the batch with a replaced or additional column, `[n, ...]`."""
        columns = {**self.columns, name: values}
        return ActorCriticBatch(self.obs, self.actions, columns, self.sequences)

    def shard(self, rank: int, count: int) -> tuple[ActorCriticBatch, int]:
        """Return every `count`-th transition or sequence, starting at `rank`, and the sample count.

        If there are fewer than `rank + 1`, return the first transition or sequence and a count
        of 0.
        """
        units = self.size if self.sequences is None else len(self.sequences.hidden_state)
        start, is_empty = (rank, False) if rank < units else (0, True)
        device = self.columns["advantages"].device
        rows = torch.arange(units, device=device)[start :: units if is_empty else count]
        samples, positions, sequences = rows, rows, None
        if self.sequences is not None:
            positions = torch.arange(len(self.sequences.resets) * units, device=device)
            positions = positions.view(-1, units)[:, rows].flatten()
            samples, sequences = _select(self.sequences, rows, positions)
        shard = ActorCriticBatch(
            tree_map(lambda x: x.index_select(0, positions), self.obs),
            tree_map(lambda x: x.index_select(0, samples), self.actions),
            {name: column.index_select(0, samples) for name, column in self.columns.items()},
            sequences,
        )
        return shard, 0 if is_empty else shard.size


def _select(sequences: Sequences, rows: Tensor, positions: Tensor) -> tuple[Tensor, Sequences]:
    """Select sequences; return the indices of their samples, and their time layout.

    Args:
        sequences: All sequences.
        rows: Indices of the selected sequences.
        positions: Indices of the steps of the selected sequences, in the order of the returned
            samples.
    """
    samples, valid = positions, None
    if sequences.valid is not None:
        numbers = torch.full((sequences.resets.numel(),), -1, device=rows.device)
        numbers[sequences.valid] = torch.arange(len(sequences.valid), device=rows.device)
        samples = numbers[positions]
        valid = (samples >= 0).nonzero().squeeze(1)
        samples = samples[valid]
    selected = replace(
        sequences,
        hidden_state=sequences.hidden_state[rows],
        resets=sequences.resets[:, rows],
        valid=valid,
    )
    return samples, selected


class PreparedRollout:
    """Rollout with advantages and value targets; the source of minibatches.

    Minibatches consist of units: single transitions, or sequences of L consecutive steps of one
    environment for recurrent policies.

    Args:
        rollout: T steps of B environments, with rewards scaled for learning.
        columns: The columns of `ActorCriticBatch` for all T * B rows, `[T * B, ...]` each.
        sequence_length: L, a divisor of T; ignored for feedforward policies.
    """

    def __init__(
        self, rollout: Rollout, columns: Mapping[str, Tensor], sequence_length: int = 1
    ) -> None:
        self.rollout = rollout
        self.columns = columns
        self._stacks = _stacked(columns)
        self.sequence_length = 1 if rollout.hidden_states is None else sequence_length
        self._obs = rollout.flat_obs()
        self._actions = tree_map(lambda x: x.flatten(0, 1), rollout.actions)
        self._valid = rollout.valid
        self._units = self._units_with_transitions()
        self._starts: Tensor | None = None
        self._max_resets = 0
        if rollout.hidden_states is not None:
            self._starts = _episode_starts(rollout)
            windows = self._starts.view(-1, sequence_length, rollout.num_envs)
            self._max_resets = count_resets(windows)

    @property
    def num_units(self) -> int:
        """Number of units."""
        if self._units is not None:
            return len(self._units)
        return self.rollout.rewards.numel() // self.sequence_length

    @property
    def old_log_probs(self) -> Tensor:
        """Log-probabilities under the policy before the update, `[T * B]`."""
        return self.columns["old_log_probs"]

    def select(self, units: Tensor) -> ActorCriticBatch:
        """Return the samples of the units with the given indices (< `num_units`, int64)."""
        if self._units is not None:
            units = self._units[units]
        if self._starts is not None:
            return self._select_sequences(units, self._starts)
        return self._batch(units, units)

    def whole(self) -> ActorCriticBatch:
        """Return all samples in time order."""
        if self._units is not None or self._starts is not None:
            return self.select(torch.arange(self.num_units, device=self.rollout.end.device))
        obs = tree_map(lambda x: x[: self.num_units], self._obs)
        return ActorCriticBatch(obs, self._actions, self.columns)

    def transitions(self, column: Tensor) -> Tensor:
        """Select the entries of transitions in a `[T * B]` column."""
        return column if self._valid is None else column[self._valid.flatten()]

    def _batch(
        self, positions: Tensor, samples: Tensor, sequences: Sequences | None = None
    ) -> ActorCriticBatch:
        """Gather observations at `positions`, and all other columns at `samples`."""
        return ActorCriticBatch(
            obs=tree_map(lambda x: x.index_select(0, positions), self._obs),
            actions=tree_map(lambda x: x.index_select(0, samples), self._actions),
            columns={
                name: column
                for names, stack in self._stacks
                for name, column in zip(names, stack.index_select(1, samples).unbind(), strict=True)
            },
            sequences=sequences,
        )

    def _select_sequences(self, numbers: Tensor, starts: Tensor) -> ActorCriticBatch:
        """Select sequences; sequence `w * B + b` begins at step `w * L` of environment b."""
        rollout, length = self.rollout, self.sequence_length
        assert rollout.hidden_states is not None
        first, envs = numbers // rollout.num_envs * length, numbers % rollout.num_envs
        steps = first + torch.arange(length, device=numbers.device).unsqueeze(1)
        positions = (steps * rollout.num_envs + envs).flatten()
        samples, valid = positions, None
        if self._valid is not None:
            valid = self._valid.flatten()[positions].nonzero().squeeze(1)
            samples = positions[valid]
        states, resets = rollout.hidden_states[first, envs], starts[steps, envs]
        sequences = Sequences(states, resets, valid, self._max_resets)
        return self._batch(positions, samples, sequences)

    def _units_with_transitions(self) -> Tensor | None:
        """Return the indices of units with a transition, or None if all units have one."""
        if self._valid is None:
            return None
        windows = self._valid.view(-1, self.sequence_length, self.rollout.num_envs).any(1)
        return windows.flatten().nonzero().squeeze(1)


def _stacked(columns: Mapping[str, Tensor]) -> list[tuple[list[str], Tensor]]:
    """Group columns of equal shape and dtype; return the names and stacked columns of each group.

    Minibatches select samples from each stack in one operation.
    """
    groups: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
    for name, column in columns.items():
        groups.setdefault((column.shape, column.dtype), []).append(name)
    return [(names, torch.stack([columns[name] for name in names])) for names in groups.values()]


def _episode_starts(rollout: Rollout) -> Tensor:
    """Return whether the recurrent state is reset before each step, `[T, B]`.

    The first step starts from `hidden_states`, without a reset.
    """
    starts = torch.zeros_like(rollout.end, dtype=torch.bool)
    starts[1:] = is_followed_by_new(rollout.end[:-1])
    return starts
