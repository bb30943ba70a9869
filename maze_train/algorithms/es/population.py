"""A population of perturbed policies: its noise, its members, and the workers that play them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import nn

from maze_train.collect.actor_worker import WeightsReader, WeightsWriter, weights_nbytes
from maze_train.collect.episode_runner import EpisodeTask, ObservationMoments, PlayedEpisode
from maze_train.collect.player import MakeEnv, PlayerPool
from maze_train.collect.recording import PlaySettings
from maze_train.collect.row_agents import PopulationAgent
from maze_train.core.checks import check_at_least
from maze_train.core.errors import ConfigError, ShapeError, TrainingError
from maze_train.core.seeding import SEED_LIMIT
from maze_train.core.types import Array, Tensor, TensorTree
from maze_train.envs.slice import EnvSlice
from maze_train.nets.normalization import ObservationNormalizer
from maze_train.nets.population import find_normalizer
from maze_train.workers.places import Place, Portable
from maze_train.workers.pool import SharedMemory

NOISE_NBYTES = 4
"""Bytes of a number in the noise table."""


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

    Attributes:
        array: All numbers, [count] float32; not to be written.

    Raises:
        ConfigError: If an argument is out of range.

    Source: Salimans et al. (2017), arXiv:1703.03864, section 2.1.
    """

    def __init__(self, count: int = 10_000_000, seed: int = 0) -> None:
        check_at_least("count", count, 1)
        check_at_least("seed", seed, 0)
        self._lay_over(SharedMemory(count * NOISE_NBYTES), count, seed)
        np.random.default_rng(seed).standard_normal(dtype=np.float32, out=self.array)

    def _lay_over(self, memory: SharedMemory, count: int, seed: int) -> None:
        self._memory, self.count, self.seed = memory, count, seed
        self.array: Array = np.ndarray(count, np.float32, buffer=memory.buffer)
        self._numbers = torch.from_numpy(self.array)

    def __getstate__(self) -> tuple[Any, ...]:
        return self._memory, self.count, self.seed

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._lay_over(*state)

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

    def sample_index(
        self, generator: np.random.Generator, dim: int, size: int | None = None
    ) -> Any:
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


PAIRS_PER_BLOCK = 64
"""Pairs whose random numbers are drawn together: a generator takes longer to make than to use."""


BLOCKS_KEPT = 64
"""Blocks that are kept until they are asked for again."""


class PairDraws:
    """The episodes of members: all chance in them follows from iteration and number of the pair.

    So it makes no difference who plays them, nor when.

    Args:
        seed: Seed of the run.
        table: The noise table.
        dim: Number of parameters.
    """

    def __init__(self, seed: int, table: SharedNoiseTable, dim: int) -> None:
        self._seed, self._table, self._dim = seed, table, dim
        self._block = lru_cache(BLOCKS_KEPT)(self._draw_block)

    def task(self, iteration: int, member: int) -> EpisodeTask:
        """The episode of a member; both of a pair have the same numbers."""
        number, offset = divmod(member // 2, PAIRS_PER_BLOCK)
        return EpisodeTask(member, *self._block(iteration, number)[offset])

    def _draw_block(self, iteration: int, number: int) -> list[tuple[int, int, int]]:
        """Seeds of the episodes, seeds of the actions, and places of the noise."""
        sequence = np.random.SeedSequence(self._seed, spawn_key=(iteration, number))
        generator = np.random.default_rng(sequence)
        n = PAIRS_PER_BLOCK
        indices = self._table.sample_index(generator, self._dim, n)
        env_seeds = generator.integers(SEED_LIMIT, size=n)
        action_seeds = generator.integers(2**63, size=n)
        columns = env_seeds.tolist(), action_seeds.tolist(), indices.tolist()
        return list(zip(*columns, strict=True))


@dataclass(frozen=True)
class MemberSettings:
    """Settings of members for acting."""

    seed: int
    """Seed of episodes and noise."""

    deterministic: bool
    """Whether the most likely action is taken instead of a sampled one."""

    action_noise_stddev: float
    """Deviation of the noise that is added to real-valued actions."""


class MemberAgent(PopulationAgent):
    """Members of a population act, each with weights that follow from its number.

    The member of an even number 2 k has the parameters θ + σε of pair k, member 2 k + 1 has θ - σε;
    both play the episode with the same seed. The actions of a member follow from θ, σ, ε, the
    statistics of observations and the seeds: not from which others are played with it.

    Parameters are perturbed, buffers are not. Statistics of observations stay as they are while
    members play; those of what a member observed are part of its result.

    Args:
        make_model: Builds the policy θ; perturbed copies of it act.
        envs: The environments.
        weights: Memory that a `WeightsWriter` writes.
        noise_table: The noise.
        settings: How members act.

    Source: Salimans et al. (2017), arXiv:1703.03864, algorithm 2; pairs: section 2.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        envs: EnvSlice,
        weights: Any,
        noise_table: SharedNoiseTable,
        settings: MemberSettings,
    ) -> None:
        self._model = make_model()
        self._reader = WeightsReader(self._model, weights.buffer)
        super().__init__(self._model, envs, settings.deterministic, settings.action_noise_stddev)
        self._table = noise_table
        self._normalizer = find_normalizer(self._model)
        self._observed: _Observed | None = None
        self._theta: Array = np.zeros(0)
        self._noise_stddev = 0.0

    def begin_round(self, noise_stddev: float) -> None:
        """Begin an iteration with the weights that were published last.

        Args:
            noise_stddev: Deviation σ of the perturbation, >= 0.
        """
        self._reader.load()
        trained = [p.detach().reshape(-1) for p in self._model.parameters() if p.requires_grad]
        self._theta = torch.cat(trained).numpy()
        self._noise_stddev = noise_stddev
        normalizer, self._observed = self._normalizer, None
        if normalizer is not None and not bool(normalizer.frozen):
            self._observed = _Observed(normalizer, self._population.rows)

    def begin(self, row: int, task: EpisodeTask) -> None:
        """Begin the episode of a member, see `RowAgent`."""
        super().begin(row, task)
        noise = self._table.array[task.noise_index : task.noise_index + self._population.dim]
        signed = self._noise_stddev if task.number % 2 == 0 else -self._noise_stddev
        weights = self._population.weights_of(row)
        np.multiply(noise, weights.dtype.type(signed), out=weights)
        weights += self._theta
        if self._observed is not None:
            self._observed.forget(row)

    def _observe(self) -> TensorTree:
        """The observations of this step, which are counted as well."""
        obs = super()._observe()
        if self._observed is not None:
            self._observed.take_in(self._envs.playing, obs)
        return obs

    def moments(self, row: int) -> ObservationMoments | None:
        """Moments of the observations of the episode, where they are normalised."""
        return None if self._observed is None else self._observed.moments(row)


class _Observed:
    """Moments of the observations of each member, by Welford's method, float64.

    Each row is computed entry by entry, so that it does not depend on the others. `batch_moments`
    and `merge_moments` of `functional.moments` take the samples of one row instead.
    """

    def __init__(self, normalizer: ObservationNormalizer, rows: int) -> None:
        self._keys = normalizer.keys
        size = len(normalizer.mean)
        self._sums = np.zeros((rows, 1 + 2 * size))
        parts = np.split(self._sums, [1, 1 + size], axis=1)
        self._count, self._mean, self._squares = parts

    def forget(self, row: int) -> None:
        """Begin an episode."""
        self._sums[row] = 0.0

    def take_in(self, rows: list[int], obs: TensorTree) -> None:
        """Add the observations of some members."""
        leaves = obs if isinstance(obs, dict) else {"": obs}
        parts = [leaves[key].numpy()[rows].reshape(len(rows), -1) for key in self._keys]
        x = (parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)).astype(np.float64)
        mean = self._mean[rows]
        self._count[rows] += 1.0
        shift = x - mean
        mean += shift / self._count[rows]
        self._mean[rows] = mean
        x -= mean
        x *= shift
        self._squares[rows] += x

    def moments(self, row: int) -> ObservationMoments:
        """Moments of the episode of a member."""
        count = self._count[row, 0].copy()
        return ObservationMoments(
            count, self._mean[row].copy(), self._squares[row] / max(count, 1.0)
        )


REPORT_S = 0.005
"""Seconds for which results wait for others, while members play."""


@dataclass(frozen=True, slots=True)
class ESRolloutResult:
    """The episodes of an antithetic pair."""

    pair: int
    """Number of the pair in its iteration."""

    noise_index: int
    """Index of its noise ε in the noise table."""

    members: tuple[PlayedEpisode, PlayedEpisode]
    """Results of θ + σε and θ - σε."""

    @property
    def lost(self) -> bool:
        """Whether one of the episodes was given up; both are left out then."""
        return any(member.lost for member in self.members)

    @property
    def num_steps(self) -> int:
        """Environment steps of both."""
        return sum(member.length for member in self.members)


class ESDistributedRollouts(PlayerPool):
    """Plays the pairs of an iteration in any order, and returns their results in order.

    The result of a pair follows from the policy, the deviation of the noise, the iteration and the
    number of the pair. So the numbers of training do not depend on who plays.

    Workers get numbers of members and send back returns. Members of a worker that fails are
    given to others, or to the one that takes its place with `on_worker_failure="restart"`, and do
    the same again. One that fails again after that ends training: when an episode with its seed
    raised for the second time, or when the third worker died or hung with it.

    Args:
        env_factory: Builds an environment.
        num_envs: Environments of all workers together, >= 1, rounded up to equally many in each.
        noise_table: The noise.
        settings: How members act.
        place: Where they play; None: in this process.
        on_non_finite: Reaction to numbers that are not finite: `raise` or `skip`.

    Raises:
        EnvError: If an environment cannot be built; it is a WorkerError where a worker process
            fails.
        SpaceError: If the environments differ in their spaces.
    """

    def __init__(
        self,
        env_factory: MakeEnv,
        num_envs: int,
        noise_table: SharedNoiseTable,
        settings: MemberSettings,
        place: Place | None = None,
        *,
        on_non_finite: str = "raise",
    ) -> None:
        self.noise_table, self.settings = noise_table, settings
        self._draws: PairDraws | None = None
        self._writer: WeightsWriter | None = None
        super().__init__(env_factory, num_envs, PlaySettings(), place, on_non_finite, REPORT_S)

    def begin(self, model: nn.Module, make_model: Callable[[], nn.Module]) -> None:
        """Get the policy, before the first iteration.

        Args:
            model: The policy as it is trained.
            make_model: Builds one like it, in whatever process.

        Raises:
            ConfigError: If there is nothing to perturb, or the noise table is too small for it.
        """
        dim = trained_size(model)
        if not dim:
            raise ConfigError("model", "no parameter of the policy can be trained", "0 parameters")
        self.noise_table.check_dim(dim)
        self._draws = PairDraws(self.settings.seed, self.noise_table, dim)
        self._weights = self._pool.allocate(weights_nbytes(model))
        self._writer = WeightsWriter(model, self._weights.buffer)
        make_agent = Portable(partial(MemberAgent, make_model), "model")
        self._queue.set_up("set_agent", make_agent, self._weights, self.noise_table, self.settings)

    def generate_rollouts(
        self,
        iteration: int,
        noise_stddev: float,
        expected: int,
        idle: Callable[[], object] = lambda: None,
    ) -> Generator[ESRolloutResult, None, None]:
        """The pairs 0, 1, 2, ... of an iteration, without an end; close it when it is enough.

        Args:
            iteration: Number of the iteration, >= 0. The policy plays as it is at its beginning.
            noise_stddev: Deviation σ of the perturbation, >= 0.
            expected: Pairs that are needed at least. Further ones are begun when they are asked
                for, a few at a time.
            idle: Called again and again meanwhile; what it raises goes through.

        Raises:
            EnvError: If an environment raises or returns something invalid.
            WorkerError: If a worker fails and is not started again.
        """
        assert self._draws is not None, "begin() comes first"
        assert self._writer is not None
        task_of = partial(self._draws.task, iteration)

        def limit_of(member: int) -> int:
            # All that can play at once, so that none waits for the next question.
            ahead = 0 if member < 2 * expected else self._queue.capacity // 2
            return 2 * max(expected, member // 2 + 1 + ahead)

        self._writer.publish(iteration)
        self._pool.publish(self._weights, self._writer.newest())
        found = self._play(
            self._next_round(), count(), task_of, limit_of, lambda steps: idle(), noise_stddev
        )
        with closing(found):
            for pair in count():
                members = (next(found), next(found))
                yield ESRolloutResult(pair, task_of(2 * pair).noise_index, members)

    def close(self) -> None:
        """Close the environments; calling it again does nothing."""
        super().close()
        if self._writer is not None:
            self._weights.close()


def trained_size(model: nn.Module) -> int:
    """Number of parameters that can be trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
