"""Population of perturbed policies: shared noise table, members, and workers that evaluate them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
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
from maze_train.envs.calls import EnvCall
from maze_train.envs.slice import EnvSlice
from maze_train.nets.normalization import ObservationNormalizer
from maze_train.nets.population import find_normalizer
from maze_train.workers.backends import Pickled, WorkerBackend
from maze_train.workers.pool import SharedMemory

NOISE_NBYTES = 4
"""Bytes per value of the noise table."""


class SharedNoiseTable:
    """Standard normal values in memory that is shared by several processes.

    A slice of `dim` values at a random index serves as a noise vector, so processes exchange
    indices instead of vectors. The values are the stream of `numpy.random.default_rng(seed)`.
    Slices may overlap. Workers that receive the table as an argument map the same memory, which
    must not be written.

    Args:
        count: Number of values, >= 1.
        seed: Seed of the values, >= 0.

    Attributes:
        array: All values, [count] float32; read-only by convention.

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
        """Release the memory; may be called more than once.

        The values remain valid while this object, or a view of them, exists.
        """
        self._memory.close()

    def check_dim(self, dim: int) -> None:
        """Raise if the table is too small for a policy to have two different noise vectors.

        Args:
            dim: Number of parameters of the policy.

        Raises:
            ConfigError: If `count` <= `dim`.
        """
        if self.count <= dim:
            raise ConfigError(
                "algorithm.noise_table_size",
                f"expected more than the {dim} parameters of the policy, and preferably 100 times "
                "as many",
                self.count,
            )

    def get(self, index: int, dim: int) -> Tensor:
        """Return one noise vector.

        Args:
            index: First index, in [0, count - dim].
            dim: Length, in [1, count].

        Returns:
            A view of the table, [dim] float32, which must not be written.

        Raises:
            ShapeError: If the vector exceeds the table.
        """
        last = self._last_index(dim)
        if not 0 <= index <= last:
            raise ShapeError(
                f"index = {index}: expected a value in [0, {last}] for vectors of length {dim} in "
                f"a table of {self.count}"
            )
        return self._numbers[index : index + dim]

    def sample_index(
        self, generator: np.random.Generator, dim: int, size: int | None = None
    ) -> Any:
        """Draw start indices of noise vectors, uniformly in [0, count - dim].

        Args:
            generator: Random generator.
            dim: Length of the vectors, in [1, count].
            size: Number of indices; None: a single one.

        Returns:
            An index for `get`, or [size] int64.

        Raises:
            ShapeError: If the table is shorter than `dim`.
        """
        drawn = generator.integers(0, self._last_index(dim), size=size, endpoint=True)
        return int(drawn) if size is None else drawn

    def _last_index(self, dim: int) -> int:
        if not 1 <= dim <= self.count:
            raise ShapeError(f"dim = {dim}: expected a value in [1, {self.count}], the table size")
        return self.count - dim

    def state_dict(self) -> dict[str, Any]:
        """Return seed and size, which determine the values."""
        return {"seed": self.seed, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that `state` describes the same values.

        Raises:
            TrainingError: If seed or count differ, so that indices would refer to other noise.
        """
        own = self.state_dict()
        if state != own:
            raise TrainingError(f"the noise table {own} differs from the one in the state, {state}")


PAIRS_PER_BLOCK = 64
"""Pairs whose random values are drawn together, since creating a generator is expensive."""


BLOCKS_KEPT = 64
"""Maximum number of cached blocks."""


class PairDraws:
    """Draws seeds and noise of the members' episodes, as a function of iteration and pair.

    Results therefore depend neither on the worker that plays an episode nor on the order.

    Args:
        seed: Seed of the run.
        table: The noise table.
        dim: Number of parameters.
    """

    def __init__(self, seed: int, table: SharedNoiseTable, dim: int) -> None:
        self._seed, self._table, self._dim = seed, table, dim
        self._block = lru_cache(BLOCKS_KEPT)(self._draw_block)

    def task(self, iteration: int, member: int) -> EpisodeTask:
        """Return the episode of a member; both members of a pair share seeds and noise."""
        number, offset = divmod(member // 2, PAIRS_PER_BLOCK)
        return EpisodeTask(member, *self._block(iteration, number)[offset])

    def _draw_block(self, iteration: int, number: int) -> list[tuple[int, int, int]]:
        """Draw episode seeds, action seeds and noise indices of a block of pairs."""
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
    """Settings for the actions of members."""

    seed: int
    """Seed of episodes and noise."""

    deterministic: bool
    """Whether members take the most likely action instead of sampling."""

    action_noise_stddev: float
    """Standard deviation of the noise added to real-valued actions."""


class MemberAgent(PopulationAgent):
    """Acts for members of a population, each with its perturbed weights.

    Member 2 k has the parameters θ + σε of pair k, member 2 k + 1 has θ - σε; both play the episode
    with the same seed. The actions of a member depend only on θ, σ, ε, the observation statistics
    and the seeds, not on the other members of its batch. Parameters are perturbed, buffers are not.
    Observation statistics are constant during episodes; the result of a member includes the moments
    of the observations.

    Args:
        make_model: Builds the policy θ.
        envs: The environments.
        weights: Memory that a `WeightsWriter` writes.
        noise_table: The noise table.
        settings: Settings for the actions of members.

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
        """Begin an iteration with the latest published weights.

        Args:
            noise_stddev: Standard deviation σ of the perturbations, >= 0.
        """
        self._reader.load()
        trained = [p.detach().reshape(-1) for p in self._model.parameters() if p.requires_grad]
        self._theta = torch.cat(trained).numpy()
        self._noise_stddev = noise_stddev
        normalizer, self._observed = self._normalizer, None
        if normalizer is not None and not bool(normalizer.frozen):
            self._observed = _Observed(normalizer, self._population.rows)

    def begin(self, row: int, task: EpisodeTask) -> None:
        """Begin the episode of a member; see `RowAgent`."""
        super().begin(row, task)
        noise = self._table.array[task.noise_index : task.noise_index + self._population.dim]
        signed = self._noise_stddev if task.number % 2 == 0 else -self._noise_stddev
        weights = self._population.weights_of(row)
        np.multiply(noise, weights.dtype.type(signed), out=weights)
        weights += self._theta
        if self._observed is not None:
            self._observed.forget(row)

    def _observe(self) -> TensorTree:
        """Return the observations of this step, after adding them to the statistics."""
        obs = super()._observe()
        if self._observed is not None:
            self._observed.take_in(self._envs.playing, obs)
        return obs

    def moments(self, row: int) -> ObservationMoments | None:
        """Return moments of the episode's observations, or None without normalization."""
        return None if self._observed is None else self._observed.moments(row)


class _Observed:
    """Moments of the observations of each member, by Welford's method in float64.

    Each row is computed independently of the others, unlike `batch_moments` and `merge_moments` of
    `functional.moments`, which process all samples of one batch together.
    """

    def __init__(self, normalizer: ObservationNormalizer, rows: int) -> None:
        self._keys = normalizer.keys
        size = len(normalizer.mean)
        self._sums = np.zeros((rows, 1 + 2 * size))
        parts = np.split(self._sums, [1, 1 + size], axis=1)
        self._count, self._mean, self._squares = parts

    def forget(self, row: int) -> None:
        """Reset the moments of a row at the beginning of an episode."""
        self._sums[row] = 0.0

    def take_in(self, rows: list[int], obs: TensorTree) -> None:
        """Add the observations of some rows."""
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
        """Return the moments of a row's episode."""
        count = self._count[row, 0].copy()
        return ObservationMoments(
            count, self._mean[row].copy(), self._squares[row] / max(count, 1.0)
        )


REPORT_S = 0.005
"""Seconds for which a worker batches results before reporting them."""


@dataclass(frozen=True, slots=True)
class ESRolloutResult:
    """Episodes of an antithetic pair."""

    pair: int
    """Index of the pair within the iteration."""

    noise_index: int
    """Index of the noise ε of the pair in the noise table."""

    members: tuple[PlayedEpisode, PlayedEpisode]
    """Results of θ + σε and θ - σε."""

    @property
    def lost(self) -> bool:
        """Whether an episode was lost, in which case both episodes are discarded."""
        return any(member.lost for member in self.members)

    @property
    def num_steps(self) -> int:
        """Number of environment steps of both members."""
        return sum(member.length for member in self.members)


class ESDistributedRollouts(PlayerPool):
    """Evaluates the pairs of an iteration in any order, and returns the results in order.

    The result of a pair depends only on the policy, the noise standard deviation, the iteration and
    the index of the pair, so training results do not depend on the number of workers.

    Workers receive member indices and return results. Members of a failed worker are given to other
    workers, or to its replacement with `on_worker_failure="restart"`, with identical results.
    Training fails if an episode raises an error twice with the same seed, or if three workers die
    or time out on it.

    Args:
        env_factory: Builds an environment.
        num_envs: Total number of environments, >= 1, rounded up to the same number per worker.
        noise_table: The noise table.
        settings: Settings for the actions of members.
        place: Backend of the workers; None: this process.
        on_non_finite: What to do about non-finite values: `raise` or `skip`.
        calls: See `PlayerPool`.

    Raises:
        EnvError: If an environment cannot be built (WorkerError if a worker process fails).
        SpaceError: If the environments have different spaces.
    """

    def __init__(
        self,
        env_factory: MakeEnv,
        num_envs: int,
        noise_table: SharedNoiseTable,
        settings: MemberSettings,
        place: WorkerBackend | None = None,
        *,
        on_non_finite: str = "raise",
        calls: Sequence[EnvCall] = (),
    ) -> None:
        self.noise_table, self.settings = noise_table, settings
        self._draws: PairDraws | None = None
        self._writer: WeightsWriter | None = None
        super().__init__(
            env_factory, num_envs, PlaySettings(), place, on_non_finite, REPORT_S, calls
        )

    def begin(self, model: nn.Module, make_model: Callable[[], nn.Module]) -> None:
        """Set the policy, before the first iteration.

        Args:
            model: The policy that is trained.
            make_model: Builds a policy with the same architecture, in any process.

        Raises:
            ConfigError: If no parameter is trainable, or the noise table is too small.
        """
        dim = trained_size(model)
        if not dim:
            raise ConfigError("model", "the policy has no trainable parameters", "0 parameters")
        self.noise_table.check_dim(dim)
        self._draws = PairDraws(self.settings.seed, self.noise_table, dim)
        self._weights = self._pool.allocate(weights_nbytes(model))
        self._writer = WeightsWriter(model, self._weights.buffer)
        make_agent = Pickled(partial(MemberAgent, make_model), "model")
        self._queue.set_up("set_agent", make_agent, self._weights, self.noise_table, self.settings)

    def make_calls(self, calls: Sequence[EnvCall]) -> None:
        """Make calls in all environments between two iterations, see `Called`."""
        self._calls = calls
        self._queue.ask_all("make_calls", tuple(calls))

    def generate_rollouts(
        self,
        iteration: int,
        noise_stddev: float,
        expected: int,
        idle: Callable[[], object] = lambda: None,
    ) -> Generator[ESRolloutResult, None, None]:
        """Yield the pairs 0, 1, 2, ... of an iteration indefinitely; close it to stop.

        Args:
            iteration: Index of the iteration, >= 0. The weights at the beginning of the iteration
                are used.
            noise_stddev: Standard deviation σ of the perturbations, >= 0.
            expected: Minimum number of pairs that will be needed. Further pairs are started on
                demand, a few ahead.
            idle: Called repeatedly while waiting; its exceptions are propagated.

        Raises:
            EnvError: If an environment raises an error or returns an invalid value.
            WorkerError: If a worker fails and is not restarted.
        """
        assert self._draws is not None, "begin() comes first"
        assert self._writer is not None
        task_of = partial(self._draws.task, iteration)

        def limit_of(member: int) -> int:
            # Queue one episode per environment ahead of time, so that no environment is idle.
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
        """Close the environments; may be called more than once."""
        super().close()
        if self._writer is not None:
            self._weights.close()


def trained_size(model: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
