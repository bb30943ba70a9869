"""Rollouts of vectorized environments, and storage for rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from maze_train.core.step_end import (
    TRUNCATED,
    has_ended,
    is_terminated,
    is_transition,
    is_truncated,
)
from maze_train.core.types import (
    Array,
    ArrayTree,
    Buffer,
    Tensor,
    TensorTree,
    as_tree,
    is_on,
    leaves_by_key,
    on_device,
    precise_dtype,
    tree_map,
)
from maze_train.spaces.columns import Columns, Spec, leaves_of, padded
from maze_train.spaces.describe import flat_spaces
from maze_train.spaces.tensors import part_of
from maze_train.workers.pool import Memory


@dataclass(frozen=True)
class Rollout:
    """T steps of B environments, time-major.

    Row t contains the observation before action t, the action and its reward. Row T of `obs` is the
    observation after the last action. If an episode ends at step t, `obs[t + 1]` is the first
    observation of the next episode (or the final observation, if row t + 1 is RESET_ONLY), and the
    final observation is stored in `final_obs`.

    Attributes:
        obs: Observations, `[T + 1, B, ...]`.
        actions: Actions as sampled from the distribution, `[T, B, ...]`.
        rewards: Rewards after each action, `[T, B]` float32.
        end: End codes of the steps (`maze_train.core.step_end.StepEnd`), `[T, B]` uint8. Rows that
            are not transitions are excluded from losses and statistics.
        final_obs: Final observations of K truncated episodes, `[K, ...]`; may include final
            observations of terminated episodes. A truncated step without a final observation is
            bootstrapped from the value of its observation.
        final_positions: Positions of the final observations in the rollout: `t * B + b`, `[K]`
            int64.
        hidden_states: Recurrent state of the policy before each observation, `[T + 1, B, S]`.
        log_probs: Log-probabilities of the actions under the behaviour policy, `[T, B]`; None: the
            behaviour policy is the current policy.
        weights_seq_no: Number of updates after which the acting weights were copied, `[B]` int64.
        replayed: Whether the steps of an environment are replayed (were used in an earlier update),
            `[B]` bool; None: all steps are new.
        has_gaps: Whether some rows are not transitions; None: computed from `end`, which
            synchronises the device.
    """

    obs: TensorTree
    actions: TensorTree
    rewards: Tensor
    end: Tensor
    final_obs: TensorTree
    final_positions: Tensor
    hidden_states: Tensor | None = None
    log_probs: Tensor | None = None
    weights_seq_no: Tensor | None = None
    replayed: Tensor | None = None
    has_gaps: bool | None = None

    def __post_init__(self) -> None:
        if self.has_gaps is None:
            object.__setattr__(self, "has_gaps", bool((self.end > TRUNCATED).any()))

    @property
    def columns(self) -> dict[str, TensorTree]:
        """Columns that are not None, by name."""
        found = {name: column for name, column in vars(self).items() if column is not None}
        del found["has_gaps"]
        return found

    @property
    def num_steps(self) -> int:
        """T."""
        return self.rewards.shape[0]

    @property
    def num_envs(self) -> int:
        """B."""
        return self.rewards.shape[1]

    @property
    def num_samples(self) -> int:
        """Number of transitions among the T * B rows."""
        valid = self.valid
        return self.rewards.numel() if valid is None else int(valid.sum())

    @property
    def terminated(self) -> Tensor:
        """Whether the step led to a terminal state, `[T, B]` bool."""
        return is_terminated(self.end)

    @property
    def truncated(self) -> Tensor:
        """Whether the episode was truncated (time limit) in a nonterminal state, `[T, B]`."""
        return is_truncated(self.end)

    @property
    def ended(self) -> Tensor:
        """Whether the step ended an episode, `[T, B]` bool."""
        return has_ended(self.end)

    @property
    def valid(self) -> Tensor | None:
        """Mask of rows that are transitions, `[T, B]` bool; None: all rows are transitions."""
        return is_transition(self.end) if self.has_gaps else None

    def flat_obs(self) -> TensorTree:
        """Return observations by position `t * B + b`, `[(T + 1) * B, ...]`."""
        return tree_map(lambda x: x.flatten(0, 1), self.obs)

    def acted_on(self, keys: Iterable[str]) -> TensorTree:
        """Return the given leaves of the observations of all transitions, `[num_samples, ...]`.

        Args:
            keys: Keys of a Dict observation; the key of an unnested observation is empty.
        """
        obs, samples = self.flat_obs(), self.rewards.numel()
        leaves = leaves_by_key(obs)
        found = {key: leaves[key][:samples] for key in keys}
        if (valid := self.valid) is not None:
            rows = valid.flatten()
            found = {key: leaf[rows] for key, leaf in found.items()}
        return as_tree(found, isinstance(obs, dict))

    def to(self, device: torch.device) -> Rollout:
        """Copy the rollout to a device; return self if all tensors are already on the device."""
        return self if is_on(self.rewards, device) else on_device(self, device)


def rollout_columns(
    observation_space: spaces.Space[Any],
    actions: TensorTree,
    num_steps: int,
    num_envs: int,
    *,
    state_size: int = 0,
    log_probs: tuple[int, ...] | None = None,
    keeps_final_obs: bool = True,
) -> Columns:
    """Return the columns of a rollout in a `RolloutStorage`.

    `final_obs` is sized for the worst case of an episode end in every step. Memory pages that are
    never written are not committed.

    Args:
        observation_space: Flat observation space of one environment.
        actions: Example action of the agent, `[1, ...]`, which determines shapes and dtypes.
        num_steps: T.
        num_envs: B.
        state_size: Size S of the recurrent state; 0 if not recurrent.
        log_probs: Shape of the log-probability of one action; None: not stored.
        keeps_final_obs: Whether to allocate final observations.
    """
    steps, rows = (num_steps, num_envs), (num_steps + 1, num_envs)
    floats = np.dtype(np.float32)
    most_ends = num_steps * num_envs if keeps_final_obs else 0
    leaves = flat_spaces(observation_space)
    one = {key: action[0].cpu().numpy() for key, action in leaves_by_key(actions).items()}
    columns: dict[str, Spec] = {
        **Columns.of(leaves, "obs").batched(*rows),
        **Columns.like(one, "actions").batched(*steps),
        "rewards": Spec(steps, floats),
        "end": Spec(steps, np.dtype(np.uint8)),
        **Columns.of(leaves, "final_obs").batched(most_ends),
        "final_positions": Spec((most_ends,), np.dtype(np.int64)),
    }
    if state_size:
        columns["hidden_states"] = Spec((*rows, state_size), floats)
    if log_probs is not None:
        columns["log_probs"] = Spec((*steps, *log_probs), floats)
    return Columns(columns)


class RolloutStorage:
    """Memory for one rollout, allocated once and written in place.

    Args:
        columns: Result of `rollout_columns`.
        device: Device of the columns, for steps given as tensors. None: columns on the CPU, for
            steps given as NumPy arrays.
        memory: Buffer for the columns, such as shared memory; None: new memory.
        offset: Offset in `memory` of the first column, in bytes.

    Attributes:
        precise_rewards: Rewards as float64 (float32 on MPS), `[T, B]`.
        num_final_obs: Number K of final observations written.
        has_gaps: Whether some rows are not transitions.
    """

    def __init__(
        self,
        columns: Columns,
        *,
        device: torch.device | None = None,
        memory: Buffer | None = None,
        offset: int = 0,
    ) -> None:
        self.device = device or torch.device("cpu")
        arrays = columns.arrays(memory, offset)
        self._columns = {k: torch.from_numpy(x).to(self.device) for k, x in arrays.items()}
        self.rewards = self._columns["rewards"]
        self.num_steps, self.num_envs = self.rewards.shape
        self.num_final_obs, self.has_gaps = 0, False
        # Episode returns are sums of rewards, so rewards need float64.
        precise = precise_dtype(self.device)
        self.precise_rewards = torch.zeros_like(self.rewards, dtype=precise)
        writable: Any = torch.Tensor.numpy if device is None else torch.Tensor.detach
        # Views are created once, because indexing a tensor is slower than copying a small row.
        obs = leaves_of(self._columns, "obs")
        self._has_obs_keys = "" not in obs
        self._obs_arrays = [(key, writable(leaf)) for key, leaf in obs.items()]
        self._obs_rows = {key: leaf.unbind(0) for key, leaf in obs.items()}
        self._reward_rows = list(writable(self.precise_rewards))
        self._end_rows = list(writable(self._columns["end"]))
        self._final_obs = [
            (k, writable(x)) for k, x in leaves_of(self._columns, "final_obs").items()
        ]
        self._final_positions = writable(self._columns["final_positions"])
        actions = leaves_of(self._columns, "actions")
        self._action_rows = {key: list(writable(leaf)) for key, leaf in actions.items()}

    @property
    def obs_nbytes(self) -> int:
        """Size of the observations in bytes."""
        return sum(leaf.nbytes for leaf in leaves_of(self._columns, "obs").values())

    def start(self, obs: ArrayTree | TensorTree) -> None:
        """Start a rollout with its first observation, `[B, ...]`."""
        self.num_final_obs, self.has_gaps = 0, False
        self._write_obs(0, obs)

    def acting_obs(self, step: int) -> TensorTree:
        """Return the observations before the action of a step, `[B, ...]`."""
        return as_tree(
            {key: rows[step] for key, rows in self._obs_rows.items()}, self._has_obs_keys
        )

    def write_hidden_state(self, step: int, state: Tensor) -> None:
        """Store the recurrent state before the observations of a step, `[B, S]`."""
        self._columns["hidden_states"][step] = state

    def write_actions(self, step: int, actions: ArrayTree | TensorTree) -> None:
        """Store the actions of a step, `[B, ...]`."""
        for key, action in leaves_by_key(actions).items():
            self._action_rows[key][step][:] = action

    def write_step(
        self,
        step: int,
        obs: ArrayTree | TensorTree,
        rewards: Array | Tensor,
        end: Array | Tensor,
        has_gaps: bool = False,
    ) -> None:
        """Store a step: the next observation, and rewards and end codes `[B]`.

        `has_gaps`: whether some rows are not transitions.
        """
        self._reward_rows[step][:] = rewards
        self._end_rows[step][:] = end
        self.has_gaps |= has_gaps
        self._write_obs(step + 1, obs)

    def _write_obs(self, row: int, obs: ArrayTree | TensorTree) -> None:
        leaves = leaves_by_key(obs)
        for key, array in self._obs_arrays:
            array[row] = leaves[key]

    def write_final_obs(self, step: int, env: int, obs: ArrayTree) -> None:
        """Store row `env` of `obs` as the final observation of an episode ended in this step."""
        leaves, row = leaves_by_key(obs), self.num_final_obs
        for key, array in self._final_obs:
            array[row] = leaves[key][env]
        self._final_positions[row] = step * self.num_envs + env
        self.num_final_obs += 1

    def rollout(self) -> Rollout:
        """Return the finished rollout. The next rollout overwrites this memory."""
        self.rewards.copy_(self.precise_rewards)
        return self.view(self.num_final_obs, self.has_gaps)

    def view(self, num_final_obs: int, has_gaps: bool) -> Rollout:
        """Return the rollout in this memory, which another process may have written.

        Args:
            num_final_obs: Number of final observations written.
            has_gaps: Whether some rows are not transitions.
        """
        columns = dict(self._written(num_final_obs))
        names = dict.fromkeys(name.partition("/")[0] for name in columns)
        trees: dict[str, Any] = {name: part_of(columns, name) for name in names}
        return Rollout(**trees, has_gaps=has_gaps)

    def fill(self, rollout: Rollout) -> list[Array]:
        """Copy a rollout into this memory; columns that already use this memory are skipped.

        Args:
            rollout: Rollout with the columns of this storage, on any device.

        Returns:
            Arrays of this memory that contain the rollout.
        """
        self.num_final_obs, self.has_gaps = len(rollout.final_positions), bool(rollout.has_gaps)
        found, columns = self._written(self.num_final_obs), rollout.columns
        for name, target in found:
            column, _, key = name.partition("/")
            leaf = leaves_by_key(columns[column])[key]
            if leaf.data_ptr() != target.data_ptr():
                target.copy_(leaf)
        return [tensor.numpy() for _, tensor in found if tensor.numel()]

    def _written(self, num_final_obs: int) -> list[tuple[str, Tensor]]:
        """Return the columns; final observations are cropped to the number written."""
        return [
            (name, x[:num_final_obs] if name.startswith("final_") else x)
            for name, x in self._columns.items()
        ]


PAGE = 4096
"""Alignment of slots in bytes, so that writing to a slot does not commit pages of other slots."""


def slot_nbytes(columns: Columns) -> int:
    """Return the size of one slot in bytes."""
    return padded(columns.nbytes, PAGE)


def slots_in(memory: Memory, columns: Columns) -> list[RolloutStorage]:
    """Divide memory into as many rollout slots as fit.

    Args:
        memory: Object with a writable `buffer` of `nbytes` bytes.
        columns: Columns of the rollouts.
    """
    nbytes = slot_nbytes(columns)
    offsets = range(0, memory.nbytes - nbytes + 1, nbytes)
    return [RolloutStorage(columns, memory=memory.buffer, offset=offset) for offset in offsets]


ENV_DIM = {
    **dict.fromkeys(("rewards", "end", "actions", "obs", "hidden_states", "log_probs"), 1),
    **dict.fromkeys(("weights_seq_no", "replayed"), 0),
}
"""Environment dimension of each column."""


def join_rollouts(rollouts: Sequence[Rollout]) -> Rollout:
    """Concatenate rollouts along the environment dimension, in new memory.

    Rollouts of B_1, ..., B_k environments become one rollout of B = B_1 + ... + B_k environments.
    Final observations are concatenated, and their positions are shifted: t * B_i + b becomes t * B
    + B_1 + ... + B_{i-1} + b.

    Args:
        rollouts: At least one rollout. T and the spaces must match; B may differ. If `replayed` is
            None in only some rollouts, it is treated as False.
    """
    trees = [rollout.columns for rollout in rollouts]
    columns: dict[str, Any] = {}
    for name, dim in [*ENV_DIM.items(), ("final_obs", 0)]:
        if name == "replayed" and any(name in tree for tree in trees):
            for rollout, tree in zip(rollouts, trees, strict=True):
                tree.setdefault(name, torch.zeros(rollout.num_envs, dtype=torch.bool))
        if name in trees[0]:
            columns[name] = _joined([tree[name] for tree in trees], dim)
    has_gaps = any(rollout.has_gaps for rollout in rollouts)
    return Rollout(final_positions=_joined_positions(rollouts), has_gaps=has_gaps, **columns)


def select_envs(rollout: Rollout, envs: slice) -> Rollout:
    """Return the slice of a rollout for consecutive environments.

    The slice shares memory with the rollout, except for final observations and their positions.

    Args:
        rollout: T steps of B environments.
        envs: Non-empty slice of the environments; its step must be 1.
    """
    first, stop, _ = envs.indices(rollout.num_envs)
    positions = rollout.final_positions
    steps = positions.div(rollout.num_envs, rounding_mode="floor")
    owners = positions - steps * rollout.num_envs
    chosen = (owners >= first) & (owners < stop)
    columns: dict[str, Any] = {
        name: tree_map(
            partial(torch.narrow, dim=ENV_DIM[name], start=first, length=stop - first), column
        )
        for name, column in rollout.columns.items()
        if name in ENV_DIM
    }
    return Rollout(
        final_obs=tree_map(lambda leaf: leaf[chosen], rollout.final_obs),
        final_positions=(steps * (stop - first) + owners - first)[chosen],
        has_gaps=rollout.has_gaps,
        **columns,
    )


def _joined_positions(rollouts: Sequence[Rollout]) -> Tensor:
    """Return the positions t * B + b of the final observations in the joined rollout."""
    sizes = [rollout.num_envs for rollout in rollouts]
    offsets = accumulate(sizes, initial=0)
    total = sum(sizes)
    parts = []
    for rollout, size, offset in zip(rollouts, sizes, offsets, strict=False):
        steps = rollout.final_positions.div(size, rounding_mode="floor")
        parts.append(rollout.final_positions + steps * (total - size) + offset)
    return torch.cat(parts)


def _joined(trees: Sequence[TensorTree], dim: int) -> TensorTree:
    """Concatenate trees leaf by leaf along a dimension."""
    leaves = [leaves_by_key(tree) for tree in trees]
    joined = {key: torch.cat([found[key] for found in leaves], dim) for key in leaves[0]}
    return as_tree(joined, isinstance(trees[0], dict))
