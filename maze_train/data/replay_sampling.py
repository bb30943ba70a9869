"""Samplers of replay buffers, and n-step walks from sampled transitions."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from maze_train.core.checks import check_at_least, check_between, check_positive
from maze_train.core.errors import TrainingError
from maze_train.core.step_end import RUNNING, WAITING, is_terminated, is_transition
from maze_train.core.types import Array, Tensor
from maze_train.data.replay_memory import ReplayMemory


class SumTree:
    """Binary tree of sums over the priorities of N entries, initially 0.

    Node i is the sum of nodes 2 i and 2 i + 1; nodes N to 2 N - 1 are the priorities. The tree
    depends only on the priorities, not on the order of updates. Updating or finding k entries takes
    O(k log N).

    Args:
        size: N, >= 1.
    """

    entry_nbytes = 2 * np.dtype(np.float64).itemsize
    """Memory of the tree nodes per entry, in bytes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._nodes = np.zeros(2 * size)

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self._nodes[1])

    @property
    def priorities(self) -> Array:
        """View of all priorities, `[N]` float64; use `set` to modify priorities."""
        return self._nodes[self._size :]

    def set(self, indices: Array, priorities: Array | float) -> None:
        """Set priorities (finite, >= 0); if an index occurs twice, the last value is used."""
        nodes = indices + self._size
        self._nodes[nodes] = priorities
        # Leaves are on two levels. For leaves on the upper level, the root is computed twice.
        for _ in range((2 * self._size - 1).bit_length() - 1):
            nodes = np.maximum(nodes >> 1, 1)
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def find(self, sums: Array) -> Array:
        """Return the entries whose interval of [0, total) contains each of `sums`, `[k]`.

        The length of an interval is the priority, and intervals are in the order of the leaves.
        Entries of priority 0 are never returned if the total is positive.
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
        # Rounding errors must not lead into a branch with sum 0.
        goes_right = (sums >= share) & (self._nodes[left + 1] > 0)
        return left + goes_right, sums - goes_right * share


class UniformSampler:
    """Samples transitions uniformly with replacement.

    Args:
        memory: Memory of the buffer.
        generator: Random number generator of the buffer.
    """

    def __init__(self, memory: ReplayMemory, generator: torch.Generator) -> None:
        self.memory = memory
        self.generator = generator

    def draw(self, n_samples: int) -> Array:
        """Sample positions of transitions, `[n]`; the memory must not be empty."""
        memory = self.memory
        count = memory.num_rows * memory.ring.num_envs
        positions = self._draw_integers(count, n_samples)
        if memory.num_valid < count:
            while (gaps := np.flatnonzero(~memory.is_transition(positions))).size:
                positions[gaps] = self._draw_integers(count, gaps.size)
        return positions

    def _draw_integers(self, count: int, n_samples: int) -> Array:
        drawn = torch.randint(count, (n_samples,), generator=self.generator).numpy()
        return drawn + self.memory.oldest * self.memory.ring.num_envs

    def weights(self, indices: Array) -> Array | None:
        """Return importance weights of samples, `[n]`; None if all weights are 1."""
        return None

    def follow(self) -> None:
        """Update the sampler after a write to the memory."""

    def update(self, indices: Tensor, errors: Tensor) -> None:
        """Update priorities from TD errors; see `BaseReplayBuffer.update_priorities`."""

    def set_progress(self, fraction: float) -> None:
        """Set the fraction of training done, in [0, 1]."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sampler, excluding the memory and the generator."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a mapping that contains the entries of `state_dict`."""


class PrioritizedSampler(UniformSampler):
    """Prioritized experience replay: samples transitions in proportion to their TD errors.

        P(i) = p_i^alpha / Σ_j p_j^alpha,  p_i = |error_i| + epsilon
        w_i = (N P(i))^-beta / max_j w_j

    New transitions get the largest priority so far. Samples are stratified over n ranges of equal
    probability and shuffled. Weights are normalized by the maximum over the batch.

    Args:
        memory: Memory of the buffer.
        generator: Random number generator of the buffer.
        alpha: Exponent of the priorities, >= 0; 0 samples uniformly.
        beta: Initial exponent of the importance weights, in [0, 1]; annealed linearly to 1.
        epsilon: Constant added to every error, > 0, so that every transition can be sampled.

    Raises:
        ConfigError: If a setting is out of range.

    Source: Schaul et al. (2016), arXiv:1511.05952, eq. 1, section 3.4 and algorithm 1;
    proportional variant.
    """

    def __init__(
        self,
        memory: ReplayMemory,
        generator: torch.Generator,
        *,
        alpha: float,
        beta: float,
        epsilon: float,
    ) -> None:
        check_at_least("alpha", alpha, 0.0)
        check_between("beta", beta, 0.0, 1.0)
        check_positive("epsilon", epsilon)
        super().__init__(memory, generator)
        self._alpha, self._beta, self._epsilon = alpha, beta, epsilon
        self._progress = 0.0
        self._largest = 1.0
        self.tree = SumTree(memory.ring.size)

    def draw(self, n_samples: int) -> Array:  # noqa: D102
        shares = torch.rand(n_samples, dtype=torch.float64, generator=self.generator).numpy()
        shares = (shares + np.arange(n_samples)) / n_samples * self.tree.total
        # Shuffle the samples, because the strata are in the order of the ring.
        order = torch.randperm(n_samples, generator=self.generator).numpy()
        return self.memory.positions(self.tree.find(shares)[order])

    def weights(self, indices: Array) -> Array:  # noqa: D102
        beta = self._beta + (1.0 - self._beta) * self._progress
        # N and the sum of all priorities cancel in the normalization.
        priorities = self.tree.priorities[indices]
        weights: Array = (priorities / priorities.min(initial=np.inf)) ** -beta
        return weights.astype(np.float32)

    def follow(self) -> None:
        """Set the priority of new transitions to the largest priority so far, of others to 0.

        Other changed rows are rows that are no longer transitions.
        """
        changed = self.memory.changed
        self.tree.set(changed, is_transition(self.memory.end[changed]) * self._largest)

    def update(self, indices: Tensor, errors: Tensor) -> None:
        """Set the priorities of samples to `(|errors| + epsilon)^alpha`.

        Rows that are no longer transitions are skipped.

        Raises:
            TrainingError: If an error is not finite.
        """
        where = indices.cpu().numpy()
        priorities = errors.detach().cpu().numpy().astype(np.float64)
        priorities = (np.abs(priorities) + self._epsilon) ** self._alpha
        if not np.isfinite(priorities).all():
            raise TrainingError(
                "a TD error is NaN or infinite and cannot be used as a priority: reduce "
                "the learning rate, or clip or scale the rewards"
            )
        self.tree.set(where, priorities * is_transition(self.memory.end[where]))
        self._largest = max(self._largest, float(priorities.max(initial=0.0)))

    def set_progress(self, fraction: float) -> None:
        """Interpolate beta between its initial value (`fraction` 0) and 1 (`fraction` 1)."""
        self._progress = fraction

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        return {
            "priorities": self.tree.priorities.copy(),
            "largest": self._largest,
            "progress": self._progress,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: D102
        self.tree.set(np.arange(self.memory.ring.size), state["priorities"])
        self._largest = state["largest"]
        self._progress = state["progress"]


class Walk(NamedTuple):
    """N-step rewards, discounts, and positions and end codes of the last steps, `[n]` each."""

    rewards: Array
    discounts: Array
    last: Array
    end: Array


class Steps(NamedTuple):
    """Positions and end codes of steps, and a mask of valid steps, `[n_steps, n]` each."""

    where: Array
    end: Array
    counts: Array


class NStepWalker:
    """Collects up to n steps from a position, skipping rows in which the agent does not act.

    Args:
        memory: Memory of the buffer.
        n_steps: n, >= 1.
        gamma: Discount per step, in [0, 1].

    Raises:
        ConfigError: If a setting is out of range.
    """

    def __init__(self, memory: ReplayMemory, n_steps: int, gamma: float) -> None:
        check_at_least("n_steps", n_steps, 1)
        check_between("gamma", gamma, 0.0, 1.0)
        self.memory = memory
        self._offsets = np.arange(n_steps)[:, None] * memory.ring.num_envs
        self._powers = np.power(gamma, np.arange(n_steps + 1)).astype(np.float32)

    def walk(self, positions: Array) -> Walk:
        """Compute n-step transitions from positions `[n]`."""
        memory = self.memory
        if len(self._offsets) == 1:  # One step: every sampled row is a transition.
            indices = positions % memory.ring.size
            end = memory.end.take(indices)
            discounts = self._powers[1] * ~is_terminated(end)
            return Walk(memory.rewards.take(indices), discounts, positions, end)
        steps = self.steps_from(positions)
        rewards = memory.rewards.take(steps.where % memory.ring.size)
        return self.join(steps, rewards, is_terminated(steps.end))

    def steps_from(self, positions: Array) -> Steps:
        """Return the `n_steps` steps from positions `[n]`."""
        memory, where = self.memory, self._following(positions)
        end = memory.end.take(where % memory.ring.size)
        # A step is valid if it is a transition and no earlier step ended the episode. The row of
        # the newest observation is not a transition, so walks end before this row.
        counts = is_transition(end)
        counts[1:] &= end[:-1] == RUNNING
        np.logical_and.accumulate(counts, axis=0, out=counts)
        return Steps(where, end, counts)

    def join(self, steps: Steps, rewards: Array, terminal: Array) -> Walk:
        """Reduce valid steps to n-step transitions, from rewards and ends `[n_steps, n]`."""
        where, end, counts = steps
        lengths, samples = counts.sum(0), np.arange(counts.shape[1])
        sums = np.where(counts, rewards * self._powers[:-1, None], 0).sum(0)
        last = (lengths - 1, samples)
        discounts = np.where(terminal[last], 0, self._powers.take(lengths))
        return Walk(sums, discounts, where[last], end[last])

    def _following(self, positions: Array) -> Array:
        """Return the positions of `n_steps` steps from positions `[n]`, `[n_steps, n]`."""
        if not self.memory.has_waiting:
            return positions + self._offsets
        memory, where = self.memory, [positions]
        for _ in self._offsets[1:]:
            after = where[-1] + memory.ring.num_envs
            walking = np.flatnonzero(memory.end.take(where[-1] % memory.ring.size) == RUNNING)
            while walking.size:
                end = memory.end.take(after[walking] % memory.ring.size)
                walking = walking[end == WAITING]
                after[walking] += memory.ring.num_envs
            where.append(after)
        return np.stack(where)
