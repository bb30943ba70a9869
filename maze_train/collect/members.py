"""Members of a population: their actions, their random numbers, the table of noise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import torch

from maze_train.collect.collector import chosen_actions, draws, env_actions
from maze_train.core.checks import check_at_least
from maze_train.core.errors import ConfigError, ShapeError, TrainingError
from maze_train.core.types import tree_leaves, tree_map
from maze_train.workers.pool import SharedMemory

if TYPE_CHECKING:
    from maze_train.core.types import Array, ArrayTree, Tensor, TensorTree
    from maze_train.distributions.base import Distribution
    from maze_train.envs.stepped import EnvSlots


class EpisodeTask(NamedTuple):
    """An episode that is to be played."""

    number: int
    """Its place among those that were asked for, from 0 on."""

    seed: int
    """Seed of the environment."""

    action_seed: int
    """Seed of what the agent does by chance."""

    noise_index: int = 0
    """Index in the noise table, where the weights of the agent are perturbed; see `MemberAgent`."""


class SlotAgent(ABC):
    """Chooses the actions of the first slots."""

    def begin_round(self, *args: Any) -> None:  # noqa: B027 (not all have something to do)
        """Get ready for the episodes of a round; `args` are what its owner says of it."""

    @abstractmethod
    def begin(self, row: int, task: EpisodeTask) -> None:
        """Begin an episode, which the environment of this row has just begun.

        Args:
            row: Which slot.
            task: The episode.
        """

    @abstractmethod
    def act(self, count: int, slots: EnvSlots) -> ArrayTree:
        """Actions of the first slots, in new memory.

        Args:
            count: How many slots.
            slots: The environments, with what they observe.

        Returns:
            `[rows, ...]` with at least `count` rows, or a flat dict of such arrays when the action
            space is a Dict or Tuple.
        """

    @abstractmethod
    def swap(self, i: int, j: int) -> None:
        """Exchange two rows with all that belongs to them."""

    def moments(self, row: int) -> ObservationMoments | None:
        """Moments of the observations of the episode, where the agent takes them."""
        return None


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
    """Chooses the actions of members, each with random its own numbers.

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


NUMBER_NBYTES = 4


class SharedNoiseTable:
    """Standard normal numbers in memory that several processes map.

    A piece of `dim` numbers at a random index serves as one vector of noise, so processes exchange
    indices instead of vectors. The numbers are one stream of one generator,
    `numpy.random.default_rng(seed)`: no part of the table repeats another one. Pieces may overlap.

    No one writes to the numbers, though nothing prevents it: all processes would see it. A worker
    that gets the table as an argument of a call maps the same memory.

    Args:
        count: How many numbers, >= 1.
        seed: Seed of the numbers, >= 0.

    Raises:
        ConfigError: If an argument is out of range.

    Source: Salimans et al. (2017), arXiv:1703.03864, section 2.1.
    """

    def __init__(self, count: int = 10_000_000, seed: int = 0) -> None:
        check_at_least("count", count, 1)
        check_at_least("seed", seed, 0)
        self._lay_over(SharedMemory(count * NUMBER_NBYTES), count, seed)
        np.random.default_rng(seed).standard_normal(dtype=np.float32, out=self._array)

    def _lay_over(self, memory: SharedMemory, count: int, seed: int) -> None:
        self.count = count
        self.seed = seed
        self._memory = memory
        self._array: Array = np.ndarray(count, np.float32, buffer=memory.buffer)
        self._numbers = torch.from_numpy(self._array)

    def __getstate__(self) -> tuple[Any, ...]:
        return self._memory, self.count, self.seed

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._lay_over(*state)

    @property
    def array(self) -> Array:
        """All numbers, [count] float32; not to be written."""
        return self._array

    def close(self) -> None:
        """Close the memory for further workers; again does nothing.

        The numbers stay as long as this object, or a view of them, does.
        """
        self._memory.close()

    def check_dim(self, dim: int) -> None:
        """Refuse a policy for which the table has no two different pieces.

        Args:
            dim: Number of parameters of the policy.

        Raises:
            ConfigError: Unless `count` > `dim`.
        """
        if self.count <= dim:
            raise ConfigError(
                "algorithm.noise_table_size",
                f"expected more than {dim}, the number of parameters of the policy, "
                "and better a hundred times as many",
                self.count,
            )

    def get(self, index: int, dim: int) -> Tensor:
        """One vector of noise.

        Args:
            index: Where it begins, in [0, count - dim].
            dim: Its length, in [1, count].

        Returns:
            A view of the table, [dim] float32; not to be written.

        Raises:
            ShapeError: If the vector would begin before the table or end behind it.
        """
        last = self._last_index(dim)
        if not 0 <= index <= last:
            raise ShapeError(
                f"index = {index}: expected one in [0, {last}], "
                f"where {dim} of {self.count} numbers begin"
            )
        return self._numbers[index : index + dim]

    @overload
    def sample_index(self, generator: np.random.Generator, dim: int, size: None = None) -> int: ...

    @overload
    def sample_index(self, generator: np.random.Generator, dim: int, size: int) -> Array: ...

    def sample_index(
        self, generator: np.random.Generator, dim: int, size: int | None = None
    ) -> int | Array:
        """Draw where vectors of noise begin: every place in [0, count - dim] is as likely.

        Args:
            generator: Source of the random numbers.
            dim: Length of the vectors, in [1, count].
            size: How many; None: a single one.

        Returns:
            An index for `get`, or [size] int64.

        Raises:
            ShapeError: If the table holds no vector of that length.
        """
        drawn = generator.integers(0, self._last_index(dim), size=size, endpoint=True)
        return int(drawn) if size is None else drawn

    def _last_index(self, dim: int) -> int:
        if not 1 <= dim <= self.count:
            raise ShapeError(f"dim = {dim}: expected one in [1, {self.count}], the table's size")
        return self.count - dim

    def state_dict(self) -> dict[str, Any]:
        """Return the seed and the size, which determine the numbers."""
        return {"seed": self.seed, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make sure that `state` is that of a table of the same numbers.

        Raises:
            TrainingError: If seed or count differ: indices would mean other noise.
        """
        own = self.state_dict()
        if state != own:
            raise TrainingError(f"the noise table is that of {own}, the state is that of {state}")
