"""What is drawn from a ring of transitions: positions, and the steps that follow them."""

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


class UniformSampler:
    """Draws transitions with replacement, each with the same probability.

    Args:
        memory: Holds the transitions.
        generator: Random numbers of the buffer.
    """

    def __init__(self, memory: ReplayMemory, generator: torch.Generator) -> None:
        self.memory = memory
        self.generator = generator

    def draw(self, n_samples: int) -> Array:
        """Return the positions of transitions, `[n]`; the memory holds at least one."""
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
        """Return importance weights of samples, `[n]`; None: all are 1."""
        return None

    def follow(self) -> None:
        """Take note of the rows that the last write changed."""

    def update(self, indices: Tensor, errors: Tensor) -> None:
        """Take note of the prediction errors of samples, see `BaseReplayBuffer`."""

    def set_progress(self, fraction: float) -> None:
        """Set the share of training that is over, in [0, 1]."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything but memory and generator that later samples depend on."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a mapping with the entries of `state_dict`."""


class PrioritizedSampler(UniformSampler):
    """Draws transitions in proportion to the errors of their predictions.

        P(i) = p_i^alpha / Σ_j p_j^alpha,  p_i = |error_i| + epsilon
        w_i = (N P(i))^-beta / max_j w_j

    New transitions have the largest priority so far. Samples are stratified: one from each of n
    shares of equal probability, in random order. The maximum of the weights is over the samples.

    Args:
        memory: Holds the transitions.
        generator: Random numbers of the buffer.
        alpha: How far priorities matter, >= 0; 0: samples are uniform.
        beta: How far weights correct for it at first, in [0, 1]; it grows linearly to 1.
        epsilon: Addend to every error, > 0, so that no transition is never sampled.

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
        # Shuffled, as otherwise a part of the samples would be from a part of the ring.
        order = torch.randperm(n_samples, generator=self.generator).numpy()
        return self.memory.positions(self.tree.find(shares)[order])

    def weights(self, indices: Array) -> Array:  # noqa: D102
        beta = self._beta + (1.0 - self._beta) * self._progress
        # N and the sum of all priorities cancel out.
        priorities = self.tree.priorities[indices]
        weights: Array = (priorities / priorities.min(initial=np.inf)) ** -beta
        return weights.astype(np.float32)

    def follow(self) -> None:
        """Give new transitions the largest priority so far, and other rows none."""
        changed = self.memory.changed
        self.tree.set(changed, is_transition(self.memory.end[changed]) * self._largest)

    def update(self, indices: Tensor, errors: Tensor) -> None:
        """Set the priorities of samples to `(|errors| + epsilon)^alpha`.

        Where a row is no transition any more, nothing changes.

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
        self.tree.set(where, priorities * is_transition(self.memory.end[where]))
        self._largest = max(self._largest, float(priorities.max(initial=0.0)))

    def set_progress(self, fraction: float) -> None:
        """Set beta between its first value (0) and 1 (1)."""
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
    """Sums of rewards, discounts after the last steps, their positions and ends, `[n]` each."""

    rewards: Array
    discounts: Array
    last: Array
    end: Array


class Steps(NamedTuple):
    """Positions and ends of the n steps of walks, and which of them count, `[n_steps, n]` each."""

    where: Array
    end: Array
    counts: Array


class NStepWalker:
    """Walks up to n steps through the rows of a memory; rows in which an agent waits are no steps.

    Args:
        memory: Holds the rows.
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
        """Walk from the transitions at positions `[n]`."""
        memory = self.memory
        if len(self._offsets) == 1:  # what is sampled is a step
            indices = positions % memory.ring.size
            end = memory.end.take(indices)
            discounts = self._powers[1] * ~is_terminated(end)
            return Walk(memory.rewards.take(indices), discounts, positions, end)
        steps = self.steps_from(positions)
        rewards = memory.rewards.take(steps.where % memory.ring.size)
        return self.join(steps, rewards, is_terminated(steps.end))

    def steps_from(self, positions: Array) -> Steps:
        """Return the n steps from positions `[n]`."""
        memory, where = self.memory, self._following(positions)
        end = memory.end.take(where % memory.ring.size)
        # A row counts if it is a step, and no step before it was the last of an episode. The row of
        # the newest observation is not a step, so rows behind it in the ring are out of reach.
        counts = is_transition(end)
        counts[1:] &= end[:-1] == RUNNING
        np.logical_and.accumulate(counts, axis=0, out=counts)
        return Steps(where, end, counts)

    def join(self, steps: Steps, rewards: Array, terminal: Array) -> Walk:
        """Join the steps that count of walks; rewards and terminal steps are `[n_steps, n]`."""
        where, end, counts = steps
        lengths, samples = counts.sum(0), np.arange(counts.shape[1])
        sums = np.where(counts, rewards * self._powers[:-1, None], 0).sum(0)
        last = (lengths - 1, samples)
        discounts = np.where(terminal[last], 0, self._powers.take(lengths))
        return Walk(sums, discounts, where[last], end[last])

    def _following(self, positions: Array) -> Array:
        """Positions of the n steps from positions `[n]`, `[n_steps, n]`."""
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
