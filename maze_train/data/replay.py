"""Replay buffers: transitions of the past, sampled in any order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from maze_train.core.checks import check_at_least, check_between, check_one_of, check_positive
from maze_train.core.errors import ConfigError, ShapeError, TrainingError
from maze_train.core.types import Array, Tensor, TensorTree, as_tree, leaves_by_key, send, tree_map
from maze_train.data.replay_columns import STORAGES, ReplayLayout, Storage
from maze_train.data.replay_memory import ENDS, FINAL_OBS, TERMINATED, VALID, ReplayMemory
from maze_train.data.rollout import Rollout


class SumTree:
    """Priorities of N entries, all 0 at first, and sums of them in a binary tree.

    Node i is the sum of nodes 2 i and 2 i + 1; nodes N to 2 N - 1 are the priorities. So the tree
    is a function of the priorities, whatever the order of updates. Changing or finding k entries
    takes O(k log N).

    Args:
        size: N, >= 1.
    """

    entry_nbytes = 2 * np.dtype(np.float64).itemsize
    """Bytes of the nodes, by entry."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._nodes = np.zeros(2 * size)

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self._nodes[1])

    @property
    def priorities(self) -> Array:
        """A view of all priorities, `[N]` float64; `set` changes them."""
        return self._nodes[self._size :]

    def set(self, indices: Array, priorities: Array | float) -> None:
        """Change priorities, finite and >= 0; of an index that comes twice, the last one stays."""
        nodes = indices + self._size
        self._nodes[nodes] = priorities
        # Leaves lie on two levels: the shorter paths sum up the root once more.
        for _ in range((2 * self._size - 1).bit_length() - 1):
            nodes = np.maximum(nodes >> 1, 1)
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def find(self, sums: Array) -> Array:
        """The entries in whose share of [0, total) the numbers `[k]` fall.

        The shares have the lengths of the priorities, in the order of the leaves from left to
        right. An entry of priority 0 is never found, as long as the total is above 0.
        """
        nodes = np.ones(len(sums), np.int64)
        for _ in range(self._size.bit_length() - 1):
            nodes, sums = self._descend(nodes, sums)
        inner = np.flatnonzero(nodes < self._size)
        nodes[inner], _ = self._descend(nodes[inner], sums[inner])
        return nodes - self._size

    def _descend(self, nodes: Array, sums: Array) -> tuple[Array, Array]:
        left = 2 * nodes
        share = self._nodes[left]
        # Rounding must not lead into a branch that is empty.
        goes_right = (sums >= share) & (self._nodes[left + 1] > 0)
        return left + goes_right, sums - goes_right * share


@dataclass(frozen=True, slots=True)
class Transitions:
    """n transitions that were sampled, each over one step or several."""

    obs: TensorTree
    """Observations, `[n, ...]`."""

    actions: TensorTree
    """Actions as the distribution sampled them, `[n, ...]`."""

    rewards: Tensor
    """Σ_{i<k} gamma^i r_{t+i} over the k steps that were made, `[n]` float32."""

    discounts: Tensor
    """gamma^k, or 0 where the last of these steps was terminated, `[n]` float32."""

    next_obs: TensorTree
    """Observations after the last of these steps, `[n, ...]`: where it was truncated, the true last
    one; where it was terminated, any."""

    indices: Tensor
    """Positions in the buffer, for `update_priorities`, `[n]` int64."""

    weights: Tensor | None = None
    """Importance weights in (0, 1], `[n]` float32; None: all are 1."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One step of one environment, without batch dimension."""

    obs: TensorTree
    action: TensorTree
    reward: float
    next_obs: TensorTree
    """The observation that the step led to, also where the episode ended."""
    terminated: bool
    truncated: bool


class BaseReplayBuffer(ABC):
    """Stores experience in the order of time and returns samples of it."""

    keeps_terminal_obs: ClassVar[bool] = False
    """Whether rollouts need the last observations of terminated episodes as well."""

    entry_nbytes: ClassVar[int] = 0
    """Bytes of a transition in addition to its columns."""

    growing: ClassVar[Mapping[str, float]] = MappingProxyType({})
    """Arguments whose value grows to 1 over the run, and where each begins by default."""

    @abstractmethod
    def add_rollout(self, rollout: Rollout) -> None:
        """Store a rollout; it continues where the last one ended, unless `interrupt` was called."""

    @abstractmethod
    def add_transition(self, transition: Transition) -> None:
        """Store one step of a lone environment."""

    @abstractmethod
    def interrupt(self) -> None:
        """Say that all environments begin new episodes before the next rollout."""

    def reserve(self, n_transitions: int) -> None:  # noqa: B027
        """Limit memory to the transitions that will be stored; called before the first one."""

    def use_environment(self, make_env: Callable[[], gymnasium.Env[Any, Any]]) -> None:  # noqa: B027
        """Read properties of the environment before the first rollout.

        Args:
            make_env: Makes an environment like those that collect, in this process; it is not
                stepped.
        """

    @abstractmethod
    def sample_batch(self, n_samples: int) -> Transitions:
        """Transitions drawn with replacement."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of transitions that can be sampled."""

    def update_priorities(self, indices: Tensor, errors: Tensor) -> None:  # noqa: B027
        """Update priorities from prediction errors of samples; other buffers ignore them.

        Args:
            indices: `Transitions.indices`, `[n]`.
            errors: Errors of temporal differences, of any sign, `[n]`.
        """

    def set_progress(self, fraction: float) -> None:  # noqa: B027
        """Set the share of training that is over, in [0, 1], for what changes over time."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return everything that later samples depend on."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""


def as_rollout(transition: Transition) -> Rollout:
    """One step of one environment, with the observation after it."""
    obs, next_obs = leaves_by_key(transition.obs), leaves_by_key(transition.next_obs)
    shapes, next_shapes = ({k: list(x.shape) for k, x in o.items()} for o in (obs, next_obs))
    if shapes != next_shapes:
        raise ShapeError(f"obs has the shapes {shapes}, next_obs {next_shapes}: expected the same")
    rows = {key: torch.stack([leaf, next_obs[key]])[:, None] for key, leaf in obs.items()}
    has_keys = isinstance(transition.obs, dict)
    num_ended = int(transition.truncated or transition.terminated)
    return Rollout(
        obs=as_tree(rows, has_keys),
        actions=tree_map(lambda x: x[None, None], transition.action),
        rewards=torch.tensor([[transition.reward]], dtype=torch.float32),
        terminated=torch.tensor([[transition.terminated]]),
        truncated=torch.tensor([[transition.truncated]]),
        final_obs=as_tree({key: leaf[1, :num_ended] for key, leaf in rows.items()}, has_keys),
        final_positions=torch.zeros(num_ended, dtype=torch.int64),
    )


class Walk(NamedTuple):
    """Sums of rewards, discounts after the last steps, their positions and flags, `[n]` each."""

    rewards: Array
    discounts: Array
    last: Array
    flags: Array


class UniformReplayBuffer(BaseReplayBuffer):
    """The last transitions of B environments; each is equally likely to be sampled.

    Samples may span several steps: from row t,

        rewards = Σ_{i<k} gamma^i r_{t+i},  discounts = gamma^k,  next_obs = o_{t+k}

    with k = n_steps, or less where the episode ended before, or nothing more is known of it. After
    a terminal step the discount is 0; in all other cases the value of `next_obs` has to be added.

    Args:
        buffer_size: Transitions that are kept, >= 1; rounded down to full rows of B.
        observation_space: Flat observation space of one environment.
        actions: One action of the agent, `[...]`; its shape and dtype are used.
        num_envs: B.
        seed: Seed of the samples, which depend neither on storage nor on device.
        n_steps: Steps per sample, >= 1.
        gamma: Discount per step, in [0, 1].
        frame_stack: Observations that are stacks of the last n frames, newest last: n by key (the
            key of a lone observation is empty). Their frames are stored once.
        storage: `memory`; `disk`, in files that vanish with the buffer; or `device`. It holds for
            observations and actions; the rest, a few bytes per transition, is in memory.
        directory: Where files are mapped from, needed for `disk`.
        device: Where samples are needed.

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
    ) -> None:
        check_at_least("n_steps", n_steps, 1)
        check_between("gamma", gamma, 0.0, 1.0)
        check_one_of("storage", storage, STORAGES)
        if storage == "disk" and directory is None:
            raise ConfigError("directory", "storage=disk needs a directory for its files", None)
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
        self._may_jump = False
        self._steps = np.arange(n_steps)[:, None] * num_envs
        self._powers = np.power(gamma, np.arange(n_steps + 1)).astype(np.float32)

    def __len__(self) -> int:
        return self._memory.num_valid

    @property
    def nbytes(self) -> int:
        """Bytes of a full buffer, without last observations of truncated episodes."""
        layout = self._memory.layout
        return layout.nbytes + layout.ring.size * self.entry_nbytes

    def reserve(self, n_transitions: int) -> None:  # noqa: D102
        self._memory.reserve(-(-n_transitions // self.num_envs) + 1)

    def add_rollout(self, rollout: Rollout) -> None:
        """Store the transitions of a rollout; rows that are not valid are never sampled.

        Raises:
            ShapeError: If the rollout has another number of environments, other shapes, or lacks
                the last observation of a truncated episode.
        """
        if rollout.num_envs != self.num_envs:
            raise ShapeError(
                f"the rollout has {rollout.num_envs} environments, the replay buffer expects "
                f"{self.num_envs}"
            )
        self._add(rollout)
        self._may_jump = False

    def add_transition(self, transition: Transition) -> None:
        """Store one step.

        It continues where the last one ended if its observation is the one that the last step led
        to; both are stored once then. If it is not, no sample reaches from one to the other.

        Raises:
            ConfigError: If the buffer is for several environments.
            ShapeError: If shapes are other than those of the buffer.
        """
        if self.num_envs != 1:
            problem = "add_transition is for 1 environment: use add_rollout, with all of them"
            raise ConfigError("num_envs", problem, self.num_envs)
        self._may_jump = True
        self._add(as_rollout(transition))

    def interrupt(self) -> None:  # noqa: D102
        self._continues = False

    def sample_batch(self, n_samples: int) -> Transitions:
        """Transitions drawn with replacement, on the device.

        Raises:
            TrainingError: If the buffer is empty.
        """
        if not len(self):
            raise TrainingError("the replay buffer is empty: add a rollout before sampling")
        return self._gather(self._draw(n_samples))

    def state_dict(self) -> dict[str, Any]:
        """All that later samples depend on; Read `segments` before the buffer changes."""
        return {
            **self._memory.state_dict(),
            "continues": self._continues,
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, whatever storage and device it is from.

        Raises:
            ConfigError: If the buffer of `state` had another size, or held something else.
            RunDirectoryError: If a part of it is damaged.
        """
        self._memory.load_state_dict(state)
        self._continues = state["continues"]
        self._may_jump = self.num_envs == 1  # the state does not say how it was filled
        self._generator.set_state(state["generator"])

    def _add(self, rollout: Rollout) -> None:
        self._memory.write(rollout, *self._place(rollout))
        self._continues = True

    def _place(self, rollout: Rollout) -> tuple[int, bool]:
        """The row for the first step, and whether it holds the first observation already."""
        memory = self._memory
        if not self._continues:
            # its own row for the observation before the interruption, if there is one.
            return memory.head + (memory.head > 0), False
        if not self._may_jump:
            return memory.head, True
        # Single steps of a lone environment may come from anywhere.
        newest = memory.observations(np.array([memory.head]))
        goes_on = all(
            key in newest and torch.equal(newest[key], leaf[:1].to(newest[key]))
            for key, leaf in leaves_by_key(rollout.flat_obs()).items()
        )
        return memory.head + (not goes_on and not memory.has_ended), goes_on

    def _draw(self, n_samples: int) -> Array:
        """Positions of transitions, `[n]`."""
        memory = self._memory
        count = memory.num_rows * self.num_envs
        positions = self._draw_integers(count, n_samples)
        if memory.num_valid < count:
            while (gaps := np.flatnonzero(~self._is_valid(positions))).size:
                positions[gaps] = self._draw_integers(count, gaps.size)
        return positions

    def _draw_integers(self, count: int, n_samples: int) -> Array:
        drawn = torch.randint(count, (n_samples,), generator=self._generator).numpy()
        return drawn + self._memory.oldest * self.num_envs

    def _is_valid(self, positions: Array) -> Array:
        flags = self._memory.flags.take(positions % self._memory.ring.size)
        return (flags & VALID).astype(bool)

    def _gather(self, positions: Array) -> Transitions:
        return self._transitions(positions, self._walk(positions))

    def _transitions(self, positions: Array, walk: Walk) -> Transitions:
        memory, n_samples = self._memory, len(positions)
        rewards, discounts, last, flags = walk
        leaves = memory.observations(np.concatenate([positions, last + self.num_envs]))
        (at_final,) = (flags & FINAL_OBS).nonzero()
        if at_final.size:
            memory.put_final_obs(leaves, n_samples + at_final, last[at_final])
        halves = {key: x.tensor_split(2) for key, x in self._on_device(leaves).items()}
        indices = positions % memory.ring.size
        layout, weights = memory.layout, self._weights(indices)
        return Transitions(
            obs=as_tree({key: half[0] for key, half in halves.items()}, layout.has_obs_keys),
            actions=as_tree(self._on_device(memory.actions(indices)), layout.has_action_keys),
            rewards=self._send(rewards),
            discounts=self._send(discounts),
            next_obs=as_tree({key: half[1] for key, half in halves.items()}, layout.has_obs_keys),
            indices=self._send(indices),
            weights=None if weights is None else self._send(weights),
        )

    def _on_device(self, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: send(leaf, self._device) for key, leaf in leaves.items()}

    def _send(self, x: Array) -> Tensor:
        return send(torch.from_numpy(x), self._device)

    def _weights(self, indices: Array) -> Array | None:
        """Importance weights of samples `[n]`; None: all are 1."""
        return None

    def _walk(self, positions: Array) -> Walk:
        """Walk up to n steps from positions `[n]`."""
        if len(self._steps) == 1:  # what is sampled is a step
            indices = positions % self._memory.ring.size
            flags = self._memory.flags.take(indices)
            discounts = self._powers[1] * ((flags & TERMINATED) == 0)
            return Walk(self._memory.rewards.take(indices), discounts, positions, flags)
        where, indices, flags, counts = self._steps_from(positions)
        rewards = self._memory.rewards.take(indices)
        return self._summed(where, counts, rewards, flags, flags & TERMINATED)

    def _following(self, positions: Array) -> Array:
        """Positions of the n steps from positions `[n]`, `[n_steps, n]`."""
        return positions + self._steps

    def _steps_from(self, positions: Array) -> tuple[Array, Array, Array, Array]:
        """Positions, indices and flags of the n steps, and which count, `[n_steps, n]` each."""
        memory, where = self._memory, self._following(positions)
        indices = where % memory.ring.size
        flags = memory.flags.take(indices)
        # A row counts if it is a step, and no step before it was the last of an episode. The row of
        # the newest observation is not a step, so rows behind it in the ring are out of reach.
        counts = (flags & VALID) != 0
        counts[1:] &= (flags[:-1] & ENDS) == 0
        np.logical_and.accumulate(counts, axis=0, out=counts)
        return where, indices, flags, counts

    def _summed(
        self, where: Array, counts: Array, rewards: Array, flags: Array, terminal: Array
    ) -> Walk:
        """Join the steps that count of walks; all arrays `[n_steps, n]`, first their positions."""
        steps, samples = counts.sum(0), np.arange(counts.shape[1])
        sums = np.where(counts, rewards * self._powers[:-1, None], 0).sum(0)
        discounts = np.where(terminal[steps - 1, samples], 0, self._powers.take(steps))
        last = (steps - 1, samples)
        return Walk(sums, discounts, where[last], flags[last])


class PrioritizedReplayBuffer(UniformReplayBuffer):
    """A replay buffer that samples transitions in proportion to the errors of their predictions.

        P(i) = p_i^alpha / Σ_j p_j^alpha,  p_i = |error_i| + epsilon
        w_i = (N P(i))^-beta / max_j w_j

    New transitions have the largest priority so far. Samples are stratified: one from each of n
    shares of equal probability, in random order. The maximum of the weights is over the samples.

    Args:
        buffer_size: As for `UniformReplayBuffer`.
        observation_space: As for `UniformReplayBuffer`.
        actions: As for `UniformReplayBuffer`.
        alpha: How far priorities matter, >= 0; 0: samples are uniform.
        beta: How far weights correct for it at first, in [0, 1]; it grows linearly to 1.
        epsilon: Addend to every error, > 0, so that no transition is never sampled.
        **settings: All other arguments of `UniformReplayBuffer`.

    Raises:
        ConfigError: If a setting is out of range.

    Source: Schaul et al. (2016), arXiv:1511.05952, eq. 1, section 3.4 and algorithm 1;
    proportional variant.
    """

    entry_nbytes = SumTree.entry_nbytes
    growing = MappingProxyType({"beta": 0.4})

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        actions: TensorTree,
        *,
        alpha: float = 0.6,
        beta: float = growing["beta"],
        epsilon: float = 1e-6,
        **settings: Any,
    ) -> None:
        check_at_least("alpha", alpha, 0.0)
        check_between("beta", beta, 0.0, 1.0)
        check_positive("epsilon", epsilon)
        super().__init__(buffer_size, observation_space, actions, **settings)
        self._alpha = alpha
        self._beta = beta
        self._epsilon = epsilon
        self._progress = 0.0
        self._largest = 1.0
        self._tree = SumTree(self._memory.ring.size)

    def update_priorities(self, indices: Tensor, errors: Tensor) -> None:
        """Set the priorities of samples to `(|errors| + epsilon)^alpha`.

        Args:
            indices: `Transitions.indices`, `[n]`; where a row is no transition any more, nothing
                changes.
            errors: Errors of temporal differences, of any sign, `[n]`.

        Raises:
            TrainingError: If an error is not finite.
        """
        where = indices.cpu().numpy()
        priorities = errors.detach().cpu().numpy().astype(np.float64)
        priorities = (np.abs(priorities) + self._epsilon) ** self._alpha
        if not np.isfinite(priorities).all():
            raise TrainingError(
                "an error of a temporal difference is not finite, so it gives no priority: lower "
                "the learning rate, or clip or scale rewards"
            )
        valid = self._memory.flags[where] & VALID
        self._tree.set(where, priorities * valid)
        self._largest = max(self._largest, float(priorities.max(initial=0.0)))

    def set_progress(self, fraction: float) -> None:
        """Set beta between its first value (0) and 1 (1)."""
        self._progress = fraction

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        return {
            **super().state_dict(),
            "priorities": self._tree.priorities.copy(),
            "largest": self._largest,
            "progress": self._progress,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: D102
        super().load_state_dict(state)
        self._tree.set(np.arange(self._memory.ring.size), state["priorities"])
        self._largest = state["largest"]
        self._progress = state["progress"]

    def _add(self, rollout: Rollout) -> None:
        super()._add(rollout)
        changed = self._memory.changed
        self._tree.set(changed, (self._memory.flags[changed] & VALID) * self._largest)

    def _draw(self, n_samples: int) -> Array:
        shares = torch.rand(n_samples, dtype=torch.float64, generator=self._generator).numpy()
        shares = (shares + np.arange(n_samples)) / n_samples * self._tree.total
        # Shuffled, as otherwise a part of the samples would be from a part of the ring.
        order = torch.randperm(n_samples, generator=self._generator).numpy()
        return self._memory.positions(self._tree.find(shares)[order])

    def _weights(self, indices: Array) -> Array:
        beta = self._beta + (1.0 - self._beta) * self._progress
        # N and the sum of all priorities cancel out.
        priorities = self._tree.priorities[indices]
        weights: Array = (priorities / priorities.min(initial=np.inf)) ** -beta
        return weights.astype(np.float32)
