"""Replay buffers for off-policy algorithms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from maze_train.core.checks import check_one_of
from maze_train.core.errors import ConfigError, ShapeError, TrainingError
from maze_train.core.step_end import end_codes
from maze_train.core.types import Array, Tensor, TensorTree, as_tree, leaves_by_key, send, tree_map
from maze_train.data.relabelling import Hindsight
from maze_train.data.replay_memory import STORAGES, ReplayLayout, ReplayMemory, Storage
from maze_train.data.replay_sampling import (
    NStepWalker,
    PrioritizedSampler,
    SumTree,
    UniformSampler,
    Walk,
)
from maze_train.data.rollout import Rollout


@dataclass(frozen=True, slots=True)
class Transitions:
    """Batch of n sampled one-step or n-step transitions.

    Attributes:
        obs: Observations, `[n, ...]`.
        actions: Actions as sampled from the distribution, `[n, ...]`.
        rewards: Σ_{i<k} gamma^i r_{t+i} over the k steps of a transition, `[n]` float32.
        discounts: gamma^k, or 0 if the last of these steps terminated, `[n]` float32.
        next_obs: Observations after the last of these steps, `[n, ...]`: the true final observation
            if the episode was truncated, arbitrary if it terminated.
        indices: Positions in the buffer, for `update_priorities`, `[n]` int64.
        weights: Importance weights in (0, 1], `[n]` float32; None: all weights are 1.
        extra: Additional columns of the learner, `[n, ...]` each, keyed by name; see `__getitem__`.
    """

    obs: TensorTree
    actions: TensorTree
    rewards: Tensor
    discounts: Tensor
    next_obs: TensorTree
    indices: Tensor
    weights: Tensor | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        """Return an additional column by name."""
        return self.extra[name]

    def with_columns(self, columns: Mapping[str, Tensor]) -> Transitions:
        """Return a copy with the additional columns `columns`."""
        return replace(self, extra={**self.extra, **columns})


class BaseReplayBuffer(ABC):
    """Base class of replay buffers: stores experience in temporal order and samples from it.

    Attributes:
        keeps_terminal_obs: Whether rollouts must include final observations of terminated episodes.
        entry_nbytes: Bytes per transition in addition to its columns.
        growing: Default initial values of arguments that are annealed to 1 over the run.
    """

    keeps_terminal_obs: ClassVar[bool] = False
    entry_nbytes: ClassVar[int] = 0
    growing: ClassVar[Mapping[str, float]] = MappingProxyType({})

    @abstractmethod
    def add_rollout(self, rollout: Rollout) -> None:
        """Store a rollout, which continues the previous one unless `interrupt` was called."""

    @abstractmethod
    def interrupt(self) -> None:
        """Signal that all environments are reset before the next rollout."""

    def reserve(self, n_transitions: int) -> None:  # noqa: B027
        """Limit memory to the expected number of transitions; call before `add_rollout`."""

    def use_environment(self, make_env: Callable[[], gymnasium.Env[Any, Any]]) -> None:  # noqa: B027
        """Read properties of an environment before the first rollout.

        Args:
            make_env: Factory of a training environment. The environment is created in this process
                and never stepped.
        """

    @abstractmethod
    def sample_batch(self, n_samples: int) -> Transitions:
        """Sample transitions with replacement."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of transitions that can be sampled."""

    def update_priorities(self, indices: Tensor, errors: Tensor) -> None:  # noqa: B027
        """Update priorities from TD errors; does nothing in buffers without priorities.

        Args:
            indices: `Transitions.indices`, `[n]`.
            errors: TD errors, `[n]`; the sign is ignored.
        """

    def set_progress(self, fraction: float) -> None:  # noqa: B027
        """Set the fraction of training done, in [0, 1], for annealed arguments."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines later samples."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""


def rollout_of_step(
    obs: TensorTree,
    action: TensorTree,
    reward: float,
    next_obs: TensorTree,
    *,
    terminated: bool,
    truncated: bool,
) -> Rollout:
    """Return one step of one environment as a rollout with T = B = 1, for `add_rollout`.

    After the last step of an episode, call `interrupt` of the buffer, because the next step begins
    with the first observation of a new episode instead of `next_obs`.

    Args:
        obs: Observation before the step.
        action: Action of the agent.
        reward: Reward of the step.
        next_obs: Observation after the step, also if the episode ended.
        terminated: Whether the step terminated the episode.
        truncated: Whether the step truncated the episode.

    Raises:
        ShapeError: If the shapes of the observations differ.
    """
    before, after = leaves_by_key(obs), leaves_by_key(next_obs)
    shapes, next_shapes = ({k: list(x.shape) for k, x in o.items()} for o in (before, after))
    if shapes != next_shapes:
        raise ShapeError(f"obs has the shapes {shapes}, next_obs {next_shapes}: expected the same")
    rows = {key: torch.stack([leaf, after[key]])[:, None] for key, leaf in before.items()}
    has_keys, num_ended = isinstance(obs, dict), int(truncated or terminated)
    return Rollout(
        obs=as_tree(rows, has_keys),
        actions=tree_map(lambda x: x[None, None], action),
        rewards=torch.tensor([[reward]], dtype=torch.float32),
        end=torch.from_numpy(end_codes(np.array([[terminated]]), np.array([[truncated]]))),
        final_obs=as_tree({key: leaf[1, :num_ended] for key, leaf in rows.items()}, has_keys),
        final_positions=torch.zeros(num_ended, dtype=torch.int64),
    )


class UniformReplayBuffer(BaseReplayBuffer):
    """Replay buffer that samples the transitions of B environments uniformly.

    For n-step returns, a sample at row t has

        rewards = Σ_{i<k} gamma^i r_{t+i},  discounts = gamma^k,  next_obs = o_{t+k}

    with k = n_steps, or fewer steps if the episode ends earlier or the next steps are not stored.
    The discount is 0 after a terminal step; otherwise bootstrap from `next_obs`.

    Args:
        buffer_size: Capacity in transitions, >= 1; rounded down to a multiple of B.
        observation_space: Flat observation space of one environment.
        actions: Example action of the agent, `[...]`, which determines shape and dtype.
        num_envs: B.
        seed: Seed of the samples. Samples do not depend on storage or device.
        n_steps: Steps per sample, >= 1.
        gamma: Discount per step, in [0, 1].
        frame_stack: Number of frames n of stacked observations (newest last), by key (empty for
            unnested observations). Each frame is stored once.
        storage: Where observations and actions are stored: `memory`; `disk`, in temporary files; or
            `device`. Other columns (a few bytes per transition) are stored in memory.
        directory: Directory of the temporary files, required for `disk`.
        device: Device of the samples.
        sampler: Factory of the sampler.
        relabelling: Factory of the hindsight relabelling; None: no relabelling.

    Raises:
        ConfigError: If a setting is out of range.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        actions: TensorTree,
        *,
        num_envs: int = 1,
        seed: int = 0,
        n_steps: int = 1,
        gamma: float = 0.99,
        frame_stack: Mapping[str, int] | None = None,
        storage: Storage = "memory",
        directory: Path | None = None,
        device: torch.device | str = "cpu",
        sampler: Callable[[ReplayMemory, torch.Generator], UniformSampler] = UniformSampler,
        relabelling: Callable[[NStepWalker, torch.Generator], Hindsight] | None = None,
    ) -> None:
        check_one_of("storage", storage, STORAGES)
        if storage == "disk" and directory is None:
            raise ConfigError("directory", "required for storage=disk", None)
        layout = ReplayLayout(
            buffer_size,
            observation_space,
            actions,
            num_envs=num_envs,
            frame_stack=frame_stack,
            keeps_terminal_obs=self.keeps_terminal_obs,
        )
        self.num_envs = num_envs
        self._memory = ReplayMemory(layout, storage, directory, device)
        self._device = torch.device(device)
        self._generator = torch.Generator().manual_seed(seed)
        self._continues = False
        self._walker = NStepWalker(self._memory, n_steps, gamma)
        self._sampler = sampler(self._memory, self._generator)
        self._relabelling = (
            None if relabelling is None else relabelling(self._walker, self._generator)
        )

    def __len__(self) -> int:
        return self._memory.num_valid

    @property
    def nbytes(self) -> int:
        """Bytes of a full buffer, excluding final observations of truncated episodes."""
        layout = self._memory.layout
        return layout.nbytes + layout.ring.size * self.entry_nbytes

    def reserve(self, n_transitions: int) -> None:  # noqa: D102
        self._memory.reserve(-(-n_transitions // self.num_envs) + 1)

    def use_environment(self, make_env: Callable[[], gymnasium.Env[Any, Any]]) -> None:
        """Set the reward function for relabelling; does nothing without relabelling.

        Raises:
            EnvError: If the environment has no `compute_reward`.
        """
        if self._relabelling is not None:
            self._relabelling.use_environment(make_env())

    def add_rollout(self, rollout: Rollout) -> None:
        """Store the transitions of a rollout; rows that are not transitions are never sampled.

        Raises:
            ShapeError: If the number of environments or the shapes differ from the buffer's, or the
                final observation of a truncated episode is missing.
            EnvError: If relabelling is used and rewards contradict the goals.
        """
        if rollout.num_envs != self.num_envs:
            raise ShapeError(
                f"the rollout has {rollout.num_envs} environments, the replay buffer expects "
                f"{self.num_envs}"
            )
        if self._relabelling is not None:
            self._relabelling.check(rollout)
        before = self._memory.head
        # After an interruption, the row of the last observation is kept.
        first = before + (before > 0 and not self._continues)
        self._memory.write(rollout, first, self._continues)
        self._continues = True
        self._sampler.follow()
        if self._relabelling is not None:
            self._relabelling.follow(before)

    def interrupt(self) -> None:  # noqa: D102
        self._continues = False

    def sample_batch(self, n_samples: int) -> Transitions:
        """Sample transitions with replacement; returns tensors on `device`.

        Raises:
            TrainingError: If the buffer is empty.
        """
        if not len(self):
            raise TrainingError("the replay buffer is empty: add a rollout before sampling")
        positions = self._sampler.draw(n_samples)
        walk = self._walker.walk(positions)
        if self._relabelling is None:
            return self._transitions(positions, walk)
        samples, goals = self._relabelling.relabel(positions, walk)
        batch = self._transitions(positions, walk)
        self._relabelling.write_goals(batch.obs, batch.next_obs, samples, goals)
        return batch

    def update_priorities(self, indices: Tensor, errors: Tensor) -> None:  # noqa: D102
        self._sampler.update(indices, errors)

    def set_progress(self, fraction: float) -> None:  # noqa: D102
        self._sampler.set_progress(fraction)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the buffer. Read the entry `segments` before the next write."""
        return {
            **self._memory.state_dict(),
            "continues": self._continues,
            "generator": self._generator.get_state(),
            **self._sampler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state`; the saved buffer may have had a different storage and device.

        Raises:
            ConfigError: If the saved buffer has a different size or different columns.
            RunDirectoryError: If a segment is damaged.
        """
        self._memory.load_state_dict(state)
        self._continues = state["continues"]
        self._generator.set_state(state["generator"])
        self._sampler.load_state_dict(state)
        if self._relabelling is not None:
            self._relabelling.reload()

    def _transitions(self, positions: Array, walk: Walk) -> Transitions:
        memory, n_samples = self._memory, len(positions)
        leaves = memory.observations(np.concatenate([positions, walk.last + self.num_envs]))
        (at_final,) = memory.has_final_obs(walk.end).nonzero()
        if at_final.size:
            memory.put_final_obs(leaves, n_samples + at_final, walk.last[at_final])
        halves = {key: x.tensor_split(2) for key, x in self._on_device(leaves).items()}
        indices = positions % memory.ring.size
        layout, weights = memory.layout, self._sampler.weights(indices)
        return Transitions(
            obs=as_tree({key: half[0] for key, half in halves.items()}, layout.has_obs_keys),
            actions=as_tree(self._on_device(memory.actions(indices)), layout.has_action_keys),
            rewards=self._send(walk.rewards),
            discounts=self._send(walk.discounts),
            next_obs=as_tree({key: half[1] for key, half in halves.items()}, layout.has_obs_keys),
            indices=self._send(indices),
            weights=None if weights is None else self._send(weights),
        )

    def _on_device(self, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: send(leaf, self._device) for key, leaf in leaves.items()}

    def _send(self, x: Array) -> Tensor:
        return send(torch.from_numpy(x), self._device)


class PrioritizedReplayBuffer(UniformReplayBuffer):
    """Replay buffer that samples with a `PrioritizedSampler`.

    Args:
        *args: Size, observation space and actions, as for `UniformReplayBuffer`.
        alpha: Exponent of the priorities (>= 0); 0 samples uniformly.
        beta: Initial exponent of the importance weights, in [0, 1]; it grows linearly to 1.
        epsilon: Constant added to every error (> 0), so that every transition can be sampled.
        **settings: All other arguments of `UniformReplayBuffer`.

    Raises:
        ConfigError: If a setting is out of range.
    """

    entry_nbytes = SumTree.entry_nbytes
    growing = MappingProxyType({"beta": 0.4})

    def __init__(
        self,
        *args: Any,
        alpha: float = 0.6,
        beta: float = growing["beta"],
        epsilon: float = 1e-6,
        **settings: Any,
    ) -> None:
        sampler = partial(PrioritizedSampler, alpha=alpha, beta=beta, epsilon=epsilon)
        super().__init__(*args, sampler=sampler, **settings)
