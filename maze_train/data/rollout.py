"""Fixed-length experience of parallel environments: the record, its storage, joining."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from maze_train.core.errors import ShapeError
from maze_train.core.types import (
    Array,
    ArrayTree,
    Tensor,
    TensorTree,
    as_tree,
    is_on,
    leaves_by_key,
    on_device,
    tree_map,
)
from maze_train.spaces.tensors import as_tensors, zeros_for


@dataclass(frozen=True, slots=True)
class Rollout:
    """T steps of B environments, time-major.

    Row t holds the observation before action t and what the action brought. Row T of `obs` is the
    observation after the last action. Where an episode ended at step t, `obs[t + 1]` is the first
    observation of the next episode (or the last one of the old, if row t + 1 is not valid); the
    true last observation is in `final_obs`.
    """

    obs: TensorTree
    """Observations, `[T + 1, B, ...]`."""

    actions: TensorTree
    """Actions as the distribution sampled them, `[T, B, ...]`."""

    rewards: Tensor
    """Rewards after each action, `[T, B]` float32."""

    terminated: Tensor
    """Whether the step led to a terminal state, `[T, B]` bool."""

    truncated: Tensor
    """Whether the step was cut off (time limit) in a state that is not terminal, `[T, B]` bool."""

    final_obs: TensorTree
    """True last observations of K truncated episodes, `[K, ...]`; those of terminated episodes may
    be among them. A truncated step without one is bootstrapped from its own value."""

    final_positions: Tensor
    """Their positions in the rollout: `t * B + b`, `[K]` int64."""

    valid: Tensor | None = None
    """Rows that are transitions, `[T, B]` bool; None: all are. In the others the environment only
    began a new episode: nothing is learned from them, and they count for nothing. The episode
    before either ended in an earlier row, or was lost. A row that is truncated as well is no step
    at all: an agent waits."""

    hidden_states: Tensor | None = None
    """Recurrent state of the policy before each observation, `[T + 1, B, S]`."""

    log_probs: Tensor | None = None
    """Log-probabilities of the actions under the policy that took them, `[T, B]`; None: it is the
    policy that learns from them."""

    weights_seq_no: Tensor | None = None
    """Updates that the weights had seen which acted, `[B]` int64."""

    replayed: Tensor | None = None
    """Whether the steps of an environment were learned from before, `[B]` bool; None: none were."""

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
        """Number of transitions: the valid ones of T * B rows."""
        return self.rewards.numel() if self.valid is None else int(self.valid.sum())

    @property
    def ended(self) -> Tensor:
        """Whether an episode ended at the step, `[T, B]` bool."""
        return self.terminated | self.truncated

    @property
    def cut(self) -> Tensor:
        """Whether no later reward counts for the step, but a value does: `[T, B]` bool.

        Where it was truncated, and before a row in which an episode was lost.
        """
        if self.valid is None:
            return self.truncated
        cut = self.truncated.clone()
        cut[:-1] |= ~self.valid[1:]
        return cut

    @property
    def fresh(self) -> Tensor:
        """Whether an episode, with a recurrent state of zero, begins after the step, `[T, B]`."""
        return self.ended if self.valid is None else self.ended | ~self.valid

    def flat_obs(self) -> TensorTree:
        """Observations by position `t * B + b`, `[(T + 1) * B, ...]`."""
        return tree_map(lambda x: x.flatten(0, 1), self.obs)

    def acted_on(self, keys: Iterable[str]) -> TensorTree:
        """Observations of some keys that an action was taken on, `[num_samples, ...]`.

        Args:
            keys: Keys of a Dict observation; the key of a lone observation is empty.
        """
        obs, samples = self.flat_obs(), self.rewards.numel()
        leaves = leaves_by_key(obs)
        found = {key: leaves[key][:samples] for key in keys}
        if self.valid is not None:
            rows = self.valid.flatten()
            found = {key: leaf[rows] for key, leaf in found.items()}
        return as_tree(found, isinstance(obs, dict))

    def to(self, device: torch.device) -> Rollout:
        """The same rollout on a device (itself, if it is there already)."""
        return self if is_on(self.rewards, device) else on_device(self, device)


class RolloutStorage:
    """Memory for one rollout, allocated once and written in place.

    Args:
        observation_space: Flat observation space of one environment.
        num_steps: T.
        num_envs: B.
        state_size: Size S of the recurrent state; 0: none.
        device: Where it lies, if what is written are tensors; None: on the CPU, and observations,
            rewards and flags are arrays.

    Attributes:
        precise_rewards: Rewards in double precision, `[T, B]`.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        num_steps: int,
        num_envs: int,
        *,
        state_size: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.space = observation_space
        self.num_steps = num_steps
        self.num_envs = num_envs
        self.device = device or torch.device("cpu")
        shape, after = (num_steps, num_envs), (num_steps + 1, num_envs)
        self.obs = self._zeros_for(after)
        self.actions: TensorTree | None = None
        # Returns of episodes are sums in double precision, which MPS lacks.
        precise = torch.float32 if self.device.type == "mps" else torch.float64
        with self.device:
            self.rewards = torch.zeros(shape)
            self.precise_rewards = torch.zeros(shape, dtype=precise)
            self.terminated = torch.zeros(shape, dtype=torch.bool)
            self.truncated = torch.zeros(shape, dtype=torch.bool)
            self.valid = torch.ones(shape, dtype=torch.bool)
            self.hidden_states = torch.zeros(*after, state_size) if state_size else None
        writable: Any = torch.Tensor.numpy if device is None else torch.Tensor.detach
        # Views made once: indexing a tensor by row costs more than the copy of a small row.
        leaves = leaves_by_key(self.obs)
        self._obs_arrays = [(key, writable(leaf)) for key, leaf in leaves.items()]
        self._obs_rows = {key: leaf.unbind(0) for key, leaf in leaves.items()}
        self._has_obs_keys = isinstance(self.obs, dict)
        self._reward_rows = list(writable(self.precise_rewards))
        self._terminated_rows = list(writable(self.terminated))
        self._truncated_rows = list(writable(self.truncated))
        self._action_rows: list[dict[str, Tensor]] = []
        self._any_invalid = False
        self._final_positions: list[int] = []
        self._final_obs: list[ArrayTree] = []
        self._no_final_obs = self._zeros_for((0,))

    def _zeros_for(self, shape: tuple[int, ...]) -> TensorTree:
        return tree_map(lambda x: x.to(self.device), zeros_for(self.space, shape))

    @property
    def obs_nbytes(self) -> int:
        """Bytes of the observations."""
        return sum(leaf.nbytes for leaf in leaves_by_key(self.obs).values())

    def start(self, obs: ArrayTree | TensorTree) -> None:
        """Begin a rollout with the observation before its first action, `[B, ...]`."""
        self._final_positions.clear()
        self._final_obs.clear()
        if self._any_invalid:
            self.valid.fill_(True)
            self._any_invalid = False
        self._write_obs(0, obs)

    def acting_obs(self, step: int) -> TensorTree:
        """The observations before the action of a step, `[B, ...]`."""
        return as_tree(
            {key: rows[step] for key, rows in self._obs_rows.items()}, self._has_obs_keys
        )

    def write_hidden_state(self, step: int, state: Tensor) -> None:
        """Store what the policy remembers before the observations of a step, `[B, S]`."""
        assert self.hidden_states is not None
        self.hidden_states[step] = state

    def write_actions(self, step: int, actions: TensorTree) -> None:
        """Store the actions of a step, `[B, ...]`."""
        if self.actions is None:
            steps = self.num_steps
            self.actions = tree_map(
                lambda x: x.new_zeros((steps, *x.shape), device=self.device), actions
            )
            columns = {key: leaf.unbind(0) for key, leaf in leaves_by_key(self.actions).items()}
            rows = zip(*columns.values(), strict=True)
            self._action_rows = [dict(zip(columns, row, strict=True)) for row in rows]
        row = self._action_rows[step]
        for key, action in leaves_by_key(actions).items():
            row[key].copy_(action)

    def write_step(
        self,
        step: int,
        obs: ArrayTree | TensorTree,
        rewards: Array | Tensor,
        terminated: Array | Tensor,
        truncated: Array | Tensor,
        valid: Array | None = None,
    ) -> None:
        """Store what a step brought: the observation after it, and `[B]` rewards and flags.

        `valid` may be None if every environment made a transition.
        """
        self._reward_rows[step][:] = rewards
        self._terminated_rows[step][:] = terminated
        self._truncated_rows[step][:] = truncated
        if valid is not None:
            self.valid.numpy()[step] = valid
            self._any_invalid = True
        self._write_obs(step + 1, obs)

    def _write_obs(self, row: int, obs: ArrayTree | TensorTree) -> None:
        leaves = leaves_by_key(obs)
        for key, array in self._obs_arrays:
            array[row] = leaves[key]

    def write_final_obs(self, step: int, env: int, obs: ArrayTree) -> None:
        """Store the true last observation of an episode that ended at this step."""
        self._final_positions.append(step * self.num_envs + env)
        self._final_obs.append(tree_map(lambda x: x.copy(), obs))

    def rollout(self) -> Rollout:
        """The finished rollout; it shares memory with the storage until the next one begins."""
        assert self.actions is not None
        self.rewards.copy_(self.precise_rewards)
        return Rollout(
            obs=self.obs,
            actions=self.actions,
            rewards=self.rewards,
            terminated=self.terminated,
            truncated=self.truncated,
            final_obs=self._stacked_final_obs(),
            final_positions=torch.from_numpy(np.array(self._final_positions, np.int64)),
            valid=self.valid if self._any_invalid else None,
            hidden_states=self.hidden_states,
        )

    def _stacked_final_obs(self) -> TensorTree:
        if not self._final_obs:
            return self._no_final_obs
        pieces = [leaves_by_key(as_tensors(self.space, obs)) for obs in self._final_obs]
        leaves = {key: torch.stack([piece[key] for piece in pieces]) for key in pieces[0]}
        return as_tree(leaves, "" not in leaves)


ENV_DIM = {
    **dict.fromkeys(("rewards", "terminated", "truncated", "actions", "obs"), 1),
    **dict.fromkeys(("hidden_states", "log_probs", "valid"), 1),
    **dict.fromkeys(("weights_seq_no", "replayed"), 0),
}
"""Columns, and the dimension in which their environments lie."""

FLAGS = {"valid": True, "replayed": False}
"""Columns that a rollout has only where not all rows or environments have this value."""


def join_rollouts(rollouts: Sequence[Rollout]) -> Rollout:
    """Join rollouts into one of all their environments, in order, in new memory.

    Rollouts of B_1, ..., B_k environments become one of B = B_1 + ... + B_k. Final observations
    are in the order of the rollouts, and within each rollout in its order; the positions say where
    they belong: t * B_i + b becomes t * B + B_1 + ... + B_{i-1} + b.

    Args:
        rollouts: Rollouts of the same T and of the same observations and actions, at least one; B
            may differ. Where only some of them lack `valid` or `replayed`, it is true or false for
            these.

    Raises:
        ShapeError: If T, shapes, dtypes or keys differ, or only some of them have `hidden_states`,
            `log_probs` or `weights_seq_no`.
    """
    if not rollouts:
        raise ShapeError("there are no rollouts to join: expected at least one")
    columns: dict[str, Any] = {}
    for name, dim in [*ENV_DIM.items(), ("final_obs", 0)]:
        parts = [getattr(rollout, name) for rollout in rollouts]
        missing = [i for i, part in enumerate(parts) if part is None]
        if len(missing) == len(parts):
            continue
        if missing and name not in FLAGS:
            raise ShapeError(f"rollouts {missing} have no {name}: expected it in all or in none")
        for i in missing:
            flags = rollouts[i].terminated
            parts[i] = torch.full_like(flags if dim else flags[0], FLAGS[name])
        columns[name] = _joined(name, parts, dim)
    return Rollout(final_positions=_joined_positions(rollouts), **columns)


def select_envs(rollout: Rollout, envs: slice) -> Rollout:
    """The part of a rollout that consecutive environments are.

    It shares the memory of the rollout; only the final observations and their positions are copies.

    Args:
        rollout: T steps of B environments.
        envs: Which of them, at least one.

    Raises:
        ShapeError: If these are no consecutive environments of the rollout.
    """
    first, stop, step = envs.indices(rollout.num_envs)
    if step != 1 or stop <= first:
        raise ShapeError(
            f"envs = {envs}: expected at least one of the {rollout.num_envs} environments, in "
            "steps of 1"
        )
    positions = rollout.final_positions
    steps = positions.div(rollout.num_envs, rounding_mode="floor")
    owners = positions - steps * rollout.num_envs
    chosen = (owners >= first) & (owners < stop)
    columns: dict[str, Any] = {
        name: tree_map(partial(torch.narrow, dim=dim, start=first, length=stop - first), column)
        for name, dim in ENV_DIM.items()
        if (column := getattr(rollout, name)) is not None
    }
    return Rollout(
        final_obs=tree_map(lambda leaf: leaf[chosen], rollout.final_obs),
        final_positions=(steps * (stop - first) + owners - first)[chosen],
        **columns,
    )


def _joined_positions(rollouts: Sequence[Rollout]) -> Tensor:
    """Positions t * B + b of the final observations of all rollouts."""
    sizes = [rollout.num_envs for rollout in rollouts]
    offsets = accumulate(sizes, initial=0)
    total = sum(sizes)
    parts = []
    for rollout, size, offset in zip(rollouts, sizes, offsets, strict=False):
        steps = rollout.final_positions.div(size, rounding_mode="floor")
        parts.append(rollout.final_positions + steps * (total - size) + offset)
    return torch.cat(parts)


def _joined(name: str, trees: Sequence[Any], dim: int) -> Any:
    """Trees joined leaf by leaf along a dimension."""
    leaves = [leaves_by_key(tree) for tree in trees]
    for i, found in enumerate(leaves):
        if found.keys() != leaves[0].keys():
            raise ShapeError(
                f"{name} of rollout {i} has the keys {list(found)}, that of rollout 0 has "
                f"{list(leaves[0])}: expected the same"
            )
    joined = {
        key: _joined_leaf(
            f"{name}[{key!r}]" if key else name, [found[key] for found in leaves], dim
        )
        for key in leaves[0]
    }
    return as_tree(joined, isinstance(trees[0], dict))


def _joined_leaf(name: str, parts: list[Tensor], dim: int) -> Tensor:
    # What must agree: the shape but for the joined dimension, and the dtype.
    forms = [([*x.shape[:dim], "*", *x.shape[dim + 1 :]], x.dtype) for x in parts]
    for i, form in enumerate(forms):
        if form != forms[0]:
            raise ShapeError(
                f"{name} of rollout {i} is {form}, that of rollout 0 is {forms[0]}: expected the "
                "same, apart from the size *"
            )
    return torch.cat(parts, dim)
