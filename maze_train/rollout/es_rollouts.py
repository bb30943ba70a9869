"""Workers that play the members of a population, as trainers ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from maze_train.errors import ConfigError
from maze_train.rollout.members import MemberResult, PairDraws
from maze_train.rollout.player import worker_names
from maze_train.rollout.population import PopulationWorker
from maze_train.rollout.weights import WeightsWriter, weights_nbytes
from maze_train.workers.messages import Portable
from maze_train.workers.places import LocalProcesses, ThisProcess
from maze_train.workers.task_queue import TaskQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    import gymnasium
    from torch import nn

    from maze_train.rollout.noise_table import SharedNoiseTable
    from maze_train.rollout.population import MemberSettings
    from maze_train.workers.places import Place

    MakeEnv = Callable[[], gymnasium.Env[Any, Any]]

__all__ = [
    "ESDistributedRollouts",
    "ESDummyDistributedRollouts",
    "ESRolloutResult",
    "ESSubprocDistributedRollouts",
    "trained_size",
]


@dataclass(frozen=True, slots=True)
class ESRolloutResult:
    """The episodes of an antithetic pair."""

    pair: int
    """Number of the pair in its iteration."""

    noise_index: int
    """Index of its noise ε in the noise table."""

    members: tuple[MemberResult, MemberResult]
    """Results of θ + σε and θ - σε."""

    @property
    def lost(self) -> bool:
        """Whether one of the episodes was given up; then neither counts."""
        return any(member.lost for member in self.members)

    @property
    def num_steps(self) -> int:
        """Environment steps of both."""
        return sum(member.length for member in self.members)


class ESDistributedRollouts:
    """Plays the pairs of an iteration in any order, and returns their results in order.

    The result of a pair follows from the policy, the deviation of the noise, the iteration and the
    number of the pair. So the numbers of training do not depend on who plays.

    Workers get numbers of members and send back returns. Members of a worker that fails are
    given to others, or to the one that takes its place with `on_worker_failure="restart"`, and do
    the same again. One that fails again after that ends training: when an episode with its seed
    raised for the second time, or when the third worker died or hung with it.

    Args:
        env_factory: Builds an environment.
        num_envs: Environments of all workers together, at least one each.
        noise_table: The noise.
        settings: How members act.
        place: Where they play.
        on_non_finite: Reaction to numbers that are not finite: `raise` or `skip`.

    Raises:
        EnvError: If an environment can not be built; it is a WorkerError where a worker process
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
        self.noise_table = noise_table
        self.settings = settings
        place = ThisProcess() if place is None else place
        self._num_workers = place.num_workers(num_envs)
        slots = -(-num_envs // self._num_workers)
        factories = Portable([env_factory] * slots, "env")
        self._pool = place.pool(
            [partial(PopulationWorker, factories, on_non_finite)] * self._num_workers,
            worker_names(self._num_workers, slots),
            {"advance": "a step of an episode"},
        )
        self._queue: TaskQueue[MemberResult] = TaskQueue(self._pool, slots, attrgetter("member"))
        self._draws: PairDraws | None = None
        self._writer: WeightsWriter | None = None
        self._results: dict[int, MemberResult] = {}

    @property
    def steps_made(self) -> int:
        """Environment steps made so far, those of unused episodes included."""
        return sum(map(self._pool.steps, range(self._num_workers)))

    @property
    def worker_restarts(self) -> int:
        """Number of times workers were started again."""
        return self._pool.restarts

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        return self._queue.spaces

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
        self._queue.set_up(
            "set_policy",
            Portable(make_model, "model"),
            self._weights,
            self.noise_table,
            self.settings,
        )

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
        draws = self._draws
        self._results.clear()
        self._writer.publish(iteration)
        self._queue.begin(
            iteration,
            noise_stddev,
            task_of=int,
            seed_of=lambda member: draws.draw(iteration, member // 2).env_seed,
        )
        try:
            for pair in count():
                # All that can play at once, so that none waits for the next question.
                ahead = 0 if pair < expected else self._queue.capacity // 2
                limit = 2 * max(expected, pair + 1 + ahead)
                while not {2 * pair, 2 * pair + 1} <= self._results.keys():
                    self._queue.advance(limit, self._note)
                    idle()
                members = (self._results.pop(2 * pair), self._results.pop(2 * pair + 1))
                yield ESRolloutResult(pair, draws.draw(iteration, pair).noise_index, members)
        finally:
            self._queue.drop()

    def _note(self, result: MemberResult) -> None:
        self._results[result.member] = result

    def close(self) -> None:
        """Close the environments; calling it again does nothing."""
        self._pool.close()
        if self._writer is not None:
            self._weights.close()


class ESDummyDistributedRollouts(ESDistributedRollouts):
    """All members play in this process; see `ESDistributedRollouts`."""


class ESSubprocDistributedRollouts(ESDistributedRollouts):
    """Members play in processes of this machine, several at a time in each.

    Args:
        env_factory: Builds an environment.
        n_workers: How many processes, >= 1; never more than environments.
        num_envs: Environments of all processes together.
        noise_table: The noise.
        settings: How members act.
        on_non_finite: Reaction to numbers that are not finite: `raise` or `skip`.
        **processes: Further settings of `LocalProcesses`.
    """

    def __init__(
        self,
        env_factory: MakeEnv,
        n_workers: int,
        num_envs: int,
        noise_table: SharedNoiseTable,
        settings: MemberSettings,
        *,
        on_non_finite: str = "raise",
        **processes: Any,
    ) -> None:
        super().__init__(
            env_factory,
            num_envs,
            noise_table,
            settings,
            LocalProcesses(n_workers, **processes),
            on_non_finite=on_non_finite,
        )


def trained_size(model: nn.Module) -> int:
    """Number of parameters that can be trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
