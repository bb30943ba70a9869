"""Fixed-length experience of parallel environments: the record and its storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from maze_train.spaces.tensors import as_arrays, as_tensors, zeros_for
from maze_train.trees import tree_map

if TYPE_CHECKING:
    from gymnasium import spaces

    from maze_train.types import Array, ArrayTree, TensorTree

__all__ = ["Rollout", "RolloutStorage"]


@dataclass(frozen=True, slots=True)
class Rollout:
    """T steps of B environments, time-major.

    Row t holds the observation before action t and what the action brought. Row T of `obs` is the
    observation after the last action. Where an episode ended at step t, `obs[t + 1]` is the first
    observation of the next episode; the true last observation is in `final_obs`.
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
    """True last observations of the K truncated episodes, `[K, ...]`."""

    final_positions: Tensor
    """Where they belong: `t * B + b`, `[K]` int64."""

    @property
    def num_steps(self) -> int:
        """T."""
        return self.rewards.shape[0]

    @property
    def num_samples(self) -> int:
        """T * B."""
        return self.rewards.numel()

    def to(self, device: torch.device) -> Rollout:
        """The same rollout on a device (itself, if it is there already)."""
        if self.rewards.device == device:
            return self
        return Rollout(
            obs=tree_map(lambda x: x.to(device), self.obs),
            actions=tree_map(lambda x: x.to(device), self.actions),
            rewards=self.rewards.to(device),
            terminated=self.terminated.to(device),
            truncated=self.truncated.to(device),
            final_obs=tree_map(lambda x: x.to(device), self.final_obs),
            final_positions=self.final_positions.to(device),
        )


class RolloutStorage:
    """Memory for one rollout, allocated once and written in place.

    Args:
        observation_space: Flat observation space of one environment.
        num_steps: T.
        num_envs: B.
    """

    def __init__(self, observation_space: spaces.Space[Any], num_steps: int, num_envs: int) -> None:
        self.space = observation_space
        self.num_steps = num_steps
        self.num_envs = num_envs
        self.obs = zeros_for(observation_space, (num_steps + 1, num_envs))
        self.actions: TensorTree | None = None
        self.rewards = torch.zeros(num_steps, num_envs)
        self.terminated = torch.zeros(num_steps, num_envs, dtype=torch.bool)
        self.truncated = torch.zeros(num_steps, num_envs, dtype=torch.bool)
        # Views made once: indexing a tensor by row costs more than the copy of a small row.
        self._obs_pairs = [(key, array) for key, array in _items(as_arrays(self.obs))]
        self.obs_rows = _rows(self.obs)
        self._reward_rows = list(self.rewards.numpy())
        self._terminated_rows = list(self.terminated.numpy())
        self._truncated_rows = list(self.truncated.numpy())
        self._action_rows: list[TensorTree] = []
        self._final_positions: list[int] = []
        self._final_obs: list[ArrayTree] = []

    def start(self, obs: ArrayTree) -> None:
        """Begin a rollout with the observation before its first action, `[B, ...]`."""
        self._final_positions.clear()
        self._final_obs.clear()
        self._write_obs(0, obs)

    def write_actions(self, step: int, actions: TensorTree) -> None:
        """Store the actions of a step, `[B, ...]`."""
        if self.actions is None:
            steps = self.num_steps
            self.actions = tree_map(lambda x: x.new_zeros((steps, *x.shape)).cpu(), actions)
            self._action_rows = _rows(self.actions)
        row = self._action_rows[step]
        if isinstance(actions, dict):
            assert isinstance(row, dict)
            for key, action in actions.items():
                row[key].copy_(action)
        else:
            assert isinstance(row, Tensor)
            row.copy_(actions)

    def write_step(
        self, step: int, obs: ArrayTree, rewards: Array, terminated: Array, truncated: Array
    ) -> None:
        """Store what a step brought: the observation after it and `[B]` rewards and flags."""
        self._write_obs(step + 1, obs)
        self._reward_rows[step][:] = rewards
        self._terminated_rows[step][:] = terminated
        self._truncated_rows[step][:] = truncated

    def write_final_obs(self, step: int, env: int, obs: ArrayTree) -> None:
        """Store the true last observation of an episode that was truncated at this step."""
        self._final_positions.append(step * self.num_envs + env)
        self._final_obs.append(tree_map(lambda x: x.copy(), obs))

    def rollout(self) -> Rollout:
        """The finished rollout; it shares memory with the storage until the next one begins."""
        assert self.actions is not None
        return Rollout(
            obs=self.obs,
            actions=self.actions,
            rewards=self.rewards,
            terminated=self.terminated,
            truncated=self.truncated,
            final_obs=self._stacked_final_obs(),
            final_positions=torch.tensor(self._final_positions, dtype=torch.int64),
        )

    def _write_obs(self, row: int, obs: ArrayTree) -> None:
        if isinstance(obs, dict):
            for key, array in self._obs_pairs:
                array[row] = obs[key]
        else:
            self._obs_pairs[0][1][row] = obs

    def _stacked_final_obs(self) -> TensorTree:
        if not self._final_obs:
            return zeros_for(self.space, (0,))
        pieces = [as_tensors(self.space, obs) for obs in self._final_obs]
        if isinstance(pieces[0], dict):
            return {key: torch.stack([p[key] for p in pieces]) for key in pieces[0]}  # type: ignore[index]  # all pieces are alike
        return torch.stack(pieces)  # type: ignore[arg-type]  # all pieces are alike


def _items(tree: ArrayTree) -> list[tuple[str, Array]]:
    return list(tree.items()) if isinstance(tree, dict) else [("", tree)]


def _rows(tree: TensorTree) -> list[TensorTree]:
    """Views of the rows of every tensor."""
    if not isinstance(tree, dict):
        return list(tree.unbind(0))
    columns = [leaf.unbind(0) for leaf in tree.values()]
    return [dict(zip(tree, row, strict=True)) for row in zip(*columns, strict=True)]
