"""Members of a population: their random numbers, and their actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from maze_train.rollout.acting import chosen_actions, draws, env_actions
from maze_train.types import tree_leaves, tree_map

if TYPE_CHECKING:
    from maze_train.distributions.base import Distribution
    from maze_train.rollout.noise_table import SharedNoiseTable
    from maze_train.types import ArrayTree, Tensor, TensorTree


PAIRS_PER_BLOCK = 64
"""Pairs whose random numbers are drawn together: a generator takes longer to make than to use."""

STEPS_PER_DRAW = 64
"""Steps of an episode for which the noise of actions is drawn at once."""


@dataclass(frozen=True, slots=True)
class ObservationMoments:
    """Moments of the observations that one member acted on, float64."""

    count: int
    """Number of observations."""

    mean: np.ndarray[Any, np.dtype[np.float64]]
    """Means, all normalised entries in one vector."""

    var: np.ndarray[Any, np.dtype[np.float64]]
    """Variances with divisor `count`."""


@dataclass(frozen=True, slots=True)
class PairDraw:
    """Random numbers of a pair."""

    noise_index: int
    """Index of the noise of the pair in the noise table."""

    env_seed: int
    """Seed of the episode that both members play."""

    action_seed: int
    """Seed of the noise of their actions."""


class PairDraws:
    """The random numbers of pairs, which follow from iteration and number of the pair alone.

    So it makes no difference who plays the episodes of a pair, nor when.

    Args:
        seed: Seed of the run.
        table: The noise table.
        dim: Number of parameters.
    """

    def __init__(self, seed: int, table: SharedNoiseTable, dim: int) -> None:
        self._seed = seed
        self._table = table
        self._dim = dim
        self._iteration = -1
        self._blocks: dict[int, list[PairDraw]] = {}

    def draw(self, iteration: int, pair: int) -> PairDraw:
        """The random numbers of a pair."""
        number, offset = divmod(pair, PAIRS_PER_BLOCK)
        if iteration != self._iteration:
            self._iteration = iteration
            self._blocks.clear()
        if number not in self._blocks:
            self._blocks[number] = self._draw_block(number)
        return self._blocks[number][offset]

    def _draw_block(self, number: int) -> list[PairDraw]:
        sequence = np.random.SeedSequence(self._seed, spawn_key=(self._iteration, number))
        generator = np.random.default_rng(sequence)
        n = PAIRS_PER_BLOCK
        indices = self._table.sample_index(generator, self._dim, n)
        env_seeds = generator.integers(2**32, size=n)
        action_seeds = generator.integers(2**63, size=n)
        return [
            PairDraw(*map(int, numbers))
            for numbers in zip(indices, env_seeds, action_seeds, strict=True)
        ]


def num_reals(distribution: Distribution) -> int:
    """Number of real numbers in an action, as the agent has it."""
    example = distribution.mode(torch.zeros(1, distribution.param_size))
    return sum(leaf.numel() for leaf in tree_leaves(example) if leaf.is_floating_point())


class MemberActions:
    """Chooses the actions of members, each with random numbers of its own.

    Args:
        distribution: The family of action distributions.
        count: Number of members at a time.
        deterministic: Whether the most likely action is taken instead of a sampled one.
        noise_stddev: Deviation of normal noise that is added to real-valued actions as the agent
            has them, >= 0.
    """

    def __init__(
        self,
        distribution: Distribution,
        count: int,
        *,
        deterministic: bool = True,
        noise_stddev: float = 0.0,
    ) -> None:
        self._distribution = distribution
        self._noise_stddev = noise_stddev
        self._deterministic = deterministic
        self._num_sampled = distribution.noise_size if draws(distribution, deterministic) else 0
        self._num_added = num_reals(distribution) if noise_stddev else 0
        size = self._num_sampled + self._num_added
        self._noise = torch.zeros(count, STEPS_PER_DRAW, size) if size else None
        self._steps = np.zeros(count, np.int64)
        self._generators = [torch.Generator() for _ in range(count if size else 0)]

    def begin(self, row: int, seed: int) -> None:
        """Begin an episode."""
        if self._noise is not None:
            self._steps[row] = 0
            self._generators[row].manual_seed(seed)

    def swap(self, i: int, j: int) -> None:
        """Exchange two members."""
        if self._noise is None:
            return
        self._steps[[i, j]] = self._steps[[j, i]]
        self._noise[[i, j]] = self._noise[[j, i]]
        generators = self._generators
        generators[i], generators[j] = generators[j], generators[i]

    def choose(self, params: Tensor, count: int) -> ArrayTree:
        """Actions of the first members, as the environment takes them.

        Args:
            params: Distribution parameters, `[n, param_size]`.
            count: Number of members that matter, at most n.

        Returns:
            Actions, `[n, ...]`.
        """
        distribution = self._distribution
        if self._noise is None:
            return env_actions(distribution, distribution.mode(params))
        noise = torch.zeros(len(params), self._noise.shape[2])
        noise[:count] = self._next_noise(count)
        own = noise[:, : self._num_sampled] if self._num_sampled else None
        actions = chosen_actions(distribution, params, own, self._deterministic)
        if self._num_added:
            actions = self._with_added(actions, noise[:, self._num_sampled :])
        return env_actions(distribution, actions)

    def _next_noise(self, count: int) -> Tensor:
        """The noise of this step, `[count, size]`."""
        assert self._noise is not None
        at = self._steps[:count] % STEPS_PER_DRAW
        for row in (at == 0).nonzero()[0].tolist():
            generator = self._generators[row]
            drawn = self._distribution.draw_noise((STEPS_PER_DRAW,), generator)
            self._noise[row, :, : self._num_sampled] = drawn[:, : self._num_sampled]
            self._noise[row, :, self._num_sampled :] = torch.randn(
                STEPS_PER_DRAW, self._num_added, generator=generator
            )
        self._steps[:count] += 1
        return self._noise[torch.arange(count), torch.from_numpy(at)]

    def _with_added(self, actions: TensorTree, noise: Tensor) -> TensorTree:
        """Actions with noise `[n, size]` added to those that are real numbers."""
        real = [leaf for leaf in tree_leaves(actions) if leaf.is_floating_point()]
        parts = iter(torch.split(noise, [leaf[0].numel() for leaf in real], dim=1))

        def add(leaf: Tensor) -> Tensor:
            if not leaf.is_floating_point():
                return leaf
            return leaf + self._noise_stddev * next(parts).view_as(leaf)

        return tree_map(add, actions)
