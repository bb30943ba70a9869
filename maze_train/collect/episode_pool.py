"""Runs seeded episodes in workers; results depend only on the policy and the seeds."""

from __future__ import annotations

import copy
import operator
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium
import numpy as np
from torch import nn

from maze_train.collect.custom_policies import UserPolicy
from maze_train.collect.play import Episode, EpisodeQueue, EpisodeRunner, PlayedEpisode, RowPolicy
from maze_train.collect.recording import PlaySettings, Recorder, ffmpeg_path
from maze_train.collect.row_policies import UserRows, model_rows, random_rows
from maze_train.core.checks import check_at_least
from maze_train.core.errors import ConfigError, EnvError
from maze_train.core.files import remove_leftovers
from maze_train.core.seeding import SEED_LIMIT
from maze_train.core.targets import member_of
from maze_train.data.trajectories import Trajectory
from maze_train.envs.building import closed_on_error
from maze_train.envs.calls import CALL_ENVS, EnvCall
from maze_train.envs.config import EnvConfig
from maze_train.envs.factory import BoundedEnvFactory, EnvFactory
from maze_train.envs.slice import EnvSlice
from maze_train.nets.acting import acts
from maze_train.workers.backends import Pickled, ThisProcess, WorkerBackend
from maze_train.workers.pool import Worker, WorkerContext, WorkerSpecs, shares, worker_names
from maze_train.workers.process_pool import LocalProcesses
from maze_train.workers.task_queue import TaskQueue

if TYPE_CHECKING:
    from typing import Self

RANDOM = "random"

MakeEnv: TypeAlias = Callable[[], gymnasium.Env[Any, Any]]
MakeRows: TypeAlias = Callable[[EnvSlice], RowPolicy]
"""Builds the policy of a worker for its environments."""

LONGEST_S = 0.05
"""Maximum duration of a call in a remote worker in seconds; at least one step is taken."""

LONGEST_STEPS = 100
"""Maximum number of steps of a call in this process. A time limit would not be reproducible."""

CALLS = {"advance": "a step of an episode", "set_policy": "building its policy"}
CALLS |= {"make_calls": f"calls of {CALL_ENVS}"}
"""Description of each method, for messages."""


class EpisodeWorker(Worker):
    """Worker of an `EpisodePool`; see `TaskQueue`.

    Args:
        factories: Functions that build the environments.
        number: Index of the first environment, for messages.
        settings: Settings of the episodes.
        on_non_finite: Reaction to non-finite values: `raise` or `skip`.
        report_s: Maximum time in seconds to buffer results, which reduces the number of messages.
        context: Context of the worker.
    """

    def __init__(
        self,
        factories: Pickled[Sequence[MakeEnv]],
        number: int,
        settings: PlaySettings,
        on_non_finite: str,
        report_s: float,
        context: WorkerContext,
    ) -> None:
        self._envs = EnvSlice.for_playing(
            factories.value,
            number=number,
            on_non_finite=on_non_finite,
            final_obs="all" if settings.record else "none",
        )
        is_kept = settings.record or settings.video_dir is not None
        with closed_on_error(self._envs.envs):
            self._recorder = Recorder(self._envs, settings) if is_kept else None
        self._report_s = report_s
        self._context = context
        self._waiting = EpisodeQueue()
        self._runner: EpisodeRunner | None = None

    def describe(self) -> tuple[Any, Any]:
        """Return the observation and action space of one environment."""
        return self._envs.observation.space, self._envs.action.space

    def set_policy(self, make_rows: Pickled[Callable[..., RowPolicy]], *args: object) -> None:
        """Set the policy.

        Args:
            make_rows: Builds the policy; called with the environments.
            *args: Further arguments of `make_rows`.
        """
        policy = make_rows.value(self._envs, *args)
        self._runner = EpisodeRunner(
            self._envs, policy, self._waiting, self._recorder, self._context.count
        )

    def make_calls(self, calls: Sequence[EnvCall]) -> None:
        """Make the new calls, see `EnvSlice.make_calls`."""
        self._envs.make_calls(calls)

    def begin_round(self, calls: Sequence[EnvCall], *args: object) -> None:
        """Make the new calls, and notify the policy that a round begins."""
        assert self._runner is not None, "set_policy() comes first"
        self.make_calls(calls)
        self._runner.policy.begin_round(*args)

    def advance(self, episodes: Iterable[Episode]) -> list[PlayedEpisode]:
        """Add episodes and run for a limited time; return the finished episodes."""
        assert self._runner is not None, "set_policy() comes first"
        runner, waiting = self._runner, self._waiting.waiting
        waiting.extend(episodes)
        began, steps, results = time.monotonic(), 0, list[PlayedEpisode]()
        while runner.running or waiting:
            results += runner.step()
            steps += 1
            if not self._context.is_remote:
                is_over = bool(results) or steps == LONGEST_STEPS
            else:
                is_over = time.monotonic() - began > (self._report_s if results else LONGEST_S)
            if is_over:
                break
        return results

    def drop(self) -> None:
        """Discard all episodes, and remove unfinished videos."""
        self._waiting.waiting.clear()
        self._envs.pause_all()
        if self._runner is not None:
            self._runner.clear()
        if self._recorder is not None:
            self._recorder.drop()

    def close(self) -> None:
        """Close the environments, and remove unfinished videos."""
        self.drop()
        self._envs.close()


WINDOW = 2
"""Maximum number of episodes begun ahead of the first unfinished one, as a multiple of the number
of environments; limits the memory for finished episodes that have not been returned yet."""


class EpisodePool:
    """Workers that play seeded episodes; results are returned in order.

    Each episode depends only on the policy, the settings and the seed of the episode. Results are
    bit-for-bit identical for any number of workers, and do not depend on other episodes.
    Environments that keep state after a seeded reset, such as `BipedalWalker-v3`, are an exception.
    Call `close` at the end, or use the pool as a context manager.

    The episodes of a failed worker are repeated with identical results, by other workers or, with
    `on_worker_failure="restart"`, by the restarted worker. The iterator raises an error if an
    episode raises twice, or if three workers die or hang during an episode.

    Args:
        env_factory: Builds an environment.
        settings: Settings of the episodes.
        backend: Backend of the workers; None selects this process.
        num_envs: Total number of environments, >= 1.
        on_non_finite: Reaction to non-finite values: `raise` or `skip`.
        report_s: See `EpisodeWorker`.
        calls: List of all environment calls of the run. New calls are made before a round.

    Attributes:
        workers: The workers.
        waiting: Finished episodes of the last round that have not been returned, by number. The
            episodes remain if the iteration stops early. An episode counts as returned when the
            next one is requested.

    Raises:
        ConfigError: If a setting is invalid, or an argument cannot be sent to another process.
        EnvError: If an environment cannot be built, or cannot render requested videos.
        WorkerError: If a worker process fails.
        MissingExtraError: If a required package is not installed.
        SpaceError: If the spaces of the environments differ.
    """

    def __init__(
        self,
        env_factory: MakeEnv,
        settings: PlaySettings,
        backend: WorkerBackend | None = None,
        *,
        num_envs: int = 8,
        on_non_finite: str = "raise",
        report_s: float = LONGEST_S,
        calls: Sequence[EnvCall] = (),
    ) -> None:
        check_at_least("num_envs", num_envs, 1)
        if settings.video_dir is not None:
            ffmpeg_path()
        self.settings, self._calls = settings, calls
        backend = ThisProcess() if backend is None else backend
        parts = shares(num_envs, backend.num_workers(num_envs))
        make_workers = [
            partial(
                EpisodeWorker,
                Pickled([env_factory] * len(part), "env"),
                part.start,
                settings,
                on_non_finite,
                report_s,
            )
            for part in parts
        ]
        self.workers = backend.pool(WorkerSpecs(make_workers, worker_names("worker", parts), CALLS))
        self._num_workers = len(parts)
        self._queue: TaskQueue[PlayedEpisode] = TaskQueue(
            self.workers, [len(part) for part in parts], attrgetter("number")
        )
        self._round = 0
        self.waiting: dict[int, PlayedEpisode] = {}

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        return self._queue.spaces

    @property
    def capacity(self) -> int:
        """Number of environments."""
        return self._queue.capacity

    @property
    def worker_restarts(self) -> int:
        """Number of worker restarts."""
        return self.workers.restarts

    @property
    def steps_made(self) -> int:
        """Number of environment steps so far, including discarded episodes."""
        return sum(map(self.workers.steps, range(self._num_workers)))

    def set_policy(self, make_rows: Callable[..., RowPolicy], name: str, *args: object) -> None:
        """Set the policy; must be called before the first episode.

        Args:
            make_rows: Builds the policy of a worker; called with its environments.
            name: Name of the policy in errors of pickling.
            *args: Further arguments of `make_rows`.
        """
        self._queue.set_up("set_policy", Pickled(make_rows, name), *args)

    def make_calls(self) -> None:
        """Make new calls in all environments between two rounds, see `EnvCalls`."""
        self._queue.ask_all("make_calls", tuple(self._calls))

    def play(
        self, seeds: Sequence[int], on_step: Callable[[int], object] | None = None
    ) -> Iterator[PlayedEpisode]:
        """Play an episode for each seed. The episodes of an earlier call are cancelled.

        Args:
            seeds: Seeds >= 0; episode j has number j.
            on_step: Function to call repeatedly with the number of new environment steps, which may
                be 0. Exceptions propagate.

        Returns:
            Iterator over the episodes in order. Only a limited number of episodes begin ahead of
            the iteration, to limit memory.

        Raises:
            ConfigError: If a seed is not an integer >= 0.
            EnvError: During iteration, if an environment or a policy raises or returns an invalid
                value.
            WorkerError: During iteration, if a process fails and is not restarted.
        """
        checked = checked_seeds(seeds)
        total, ahead = len(checked), WINDOW * self.capacity

        def episode_of(number: int) -> Episode:
            seed = checked[number]
            return Episode(number, seed, action_seed_of(self.settings.action_seed, seed))

        def limit_of(number: int) -> int:
            return min(number + ahead, total)

        return self.run(range(total), episode_of, limit_of, on_step or (lambda steps: None))

    def run(
        self,
        numbers: Iterable[int],
        episode_of: Callable[[int], Episode],
        limit_of: Callable[[int], int],
        on_step: Callable[[int], object],
        *args: object,
    ) -> Generator[PlayedEpisode, None, None]:
        """Play a round of episodes. The episodes of an earlier round are cancelled.

        Args:
            numbers: Indices of the episodes, in the order of the results.
            episode_of: Returns the episode with a given index.
            limit_of: Maps the index of the next result to an exclusive upper bound on the indices
                of episodes that may begin.
            on_step: See `play`.
            *args: Arguments of `RowPolicy.begin_round`.
        """
        self._round += 1
        return self._run(self._round, numbers, episode_of, limit_of, on_step, *args)

    def _run(
        self,
        round_: int,
        numbers: Iterable[int],
        episode_of: Callable[[int], Episode],
        limit_of: Callable[[int], int],
        on_step: Callable[[int], object],
        *args: object,
    ) -> Generator[PlayedEpisode, None, None]:
        self._check_round(round_)
        waiting = self.waiting = dict[int, PlayedEpisode]()
        self._queue.drop()
        self._queue.begin(
            tuple(self._calls),
            *args,
            task_of=episode_of,
            seed_of=lambda number: episode_of(number).seed,
        )
        made = self.steps_made

        def keep(episode: PlayedEpisode) -> None:
            waiting[episode.number] = episode

        try:
            for number in numbers:
                limit = limit_of(number)
                while number not in waiting:
                    self._check_round(round_)
                    self._queue.advance(limit, keep)
                    before, made = made, self.steps_made
                    on_step(made - before)
                yield waiting[number]
                del waiting[number]
        finally:
            if self._round == round_:
                self._queue.drop()

    def _check_round(self, number: int) -> None:
        if not len(self.workers):
            raise EnvError("this pool of episodes is closed: build a new one")
        if number != self._round:
            raise EnvError(
                "these episodes were cancelled, because play() was called again: iterate over all "
                "episodes of a call before the next call"
            )

    def close(self) -> None:
        """Close the environments and remove unfinished videos. Closing again has no effect."""
        self.workers.close()
        if self.settings.video_dir is not None:
            remove_leftovers(Path(self.settings.video_dir))  # Of killed processes.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def action_seed_of(action_seed: int, seed: int) -> int:
    """Return the seed of the agent's random choices in an episode, in [0, 2^31).

    Args:
        action_seed: See `PlaySettings`.
        seed: Seed of the episode, >= 0.
    """
    return int(np.random.SeedSequence([action_seed, seed]).generate_state(1)[0]) % SEED_LIMIT


def checked_seeds(seeds: Iterable[Any]) -> list[int]:
    """Convert seeds to plain integers.

    Raises:
        ConfigError: If a seed is not an integer >= 0.
    """
    checked: list[int] = []
    for i, seed in enumerate(seeds):
        try:
            number = operator.index(seed)
        except TypeError:
            number = -1
        if number < 0:
            raise ConfigError(f"seeds[{i}]", "expected an integer >= 0", seed)
        checked.append(number)
    return checked


def rows_maker(policy: object, deterministic: bool = True) -> MakeRows:
    """Return a factory of row policies for any supported policy.

    Args:
        policy: See `RolloutGenerator`.
        deterministic: Whether a model takes the most likely action instead of sampling.

    Raises:
        ConfigError: If `policy` is not a supported policy.
    """
    if isinstance(policy, str) and policy == RANDOM:
        return random_rows
    model = model_of(policy)
    if model is not None:
        return partial(model_rows, model, deterministic=deterministic)
    if isinstance(policy, type):
        return partial(UserRows, policy)
    return partial(UserRows, partial(copy.deepcopy, UserPolicy(policy).policy))


def model_of(policy: object) -> nn.Module | None:
    """Return the acting model: the policy, or the attribute `model`, or None."""
    for model in (policy, member_of(policy, "model")):
        if isinstance(model, nn.Module) and acts(model):
            return model
    return None


def spaces_of_policy(policy: object) -> tuple[Any, Any]:
    """Return the observation and action space declared by a policy; None for undeclared spaces."""
    if isinstance(policy, type):
        return None, None
    return member_of(policy, "observation_space"), member_of(policy, "action_space")


def check_policy_spaces(found: tuple[Any, Any], spaces: tuple[Any, Any]) -> None:
    """Check that the spaces declared by a policy match the environment.

    Raises:
        ConfigError: If the spaces differ.
    """
    names = ("observation_space", "action_space")
    for name, own, space in zip(names, found, spaces, strict=True):
        if own is not None and own != space:
            raise ConfigError("policy", f"its {name} is {own}, but the environment has {space}")


class RolloutGenerator(EpisodePool):
    """Runs episodes with a policy and records the episodes.

        with RolloutGenerator("CartPole-v1", load_policy(run_dir)) as generator:
            trajectories = generator.rollout(100)

    Each episode depends only on the policy and the seed of the episode. Results are bit-for-bit
    identical for any `concurrency` and `n_workers`. Call `close` at the end, or use the generator
    as a context manager.

    Args:
        env: A registered id, an `EnvConfig`, a factory, or a class or function that returns an
            environment. Training wrappers are not applied.
        policy: `"random"`; a model, or an object with a model as attribute `model`, such as a
            `TrainedPolicy`; an object with a method `act(observation)`, a function of one
            observation, or a class with a method `act`; see `UserRows`. Objects are copied for
            each environment. Models act with their current weights.
        deterministic: Whether a model takes the most likely action instead of sampling.
        concurrency: Number of episodes that run at a time, >= 1.
        n_workers: Number of worker processes; 0 selects this process.
        seed: Seed of the first episode, >= 0; the following episodes use `seed + 1`, `seed + 2`,
            ...
        max_episode_steps: Maximum length of an episode, >= 1; None selects the environment's limit.
        settings: Settings of the episodes; if None, trajectories are recorded.
        on_non_finite: Reaction to non-finite values: `raise` or `skip`.
        **processes: Further settings of `LocalProcesses` if `n_workers` > 0: `start_method`,
            `timeout_s`, `on_worker_failure`, `max_worker_restarts`.

    Raises:
        ConfigError: If a setting is invalid, or the spaces of the policy do not match.
        EnvError: If an environment cannot be built.
        MissingExtraError: If a required package is not installed.
    """

    def __init__(
        self,
        env: str | EnvConfig | EnvFactory | Callable[..., gymnasium.Env[Any, Any]],
        policy: object = RANDOM,
        *,
        deterministic: bool = True,
        concurrency: int = 8,
        n_workers: int = 0,
        seed: int = 0,
        max_episode_steps: int | None = None,
        settings: PlaySettings | None = None,
        on_non_finite: str = "raise",
        **processes: Any,
    ) -> None:
        check_at_least("concurrency", concurrency, 1)
        check_at_least("n_workers", n_workers, 0)
        check_at_least("seed", seed, 0)
        factory: EnvFactory | BoundedEnvFactory = EnvFactory.from_any(env).for_evaluation()
        if max_episode_steps is not None:
            check_at_least("max_episode_steps", max_episode_steps, 1)
            factory = BoundedEnvFactory(factory, max_episode_steps)
        self._next_seed = seed
        make_rows = rows_maker(policy, deterministic)
        super().__init__(
            factory,
            PlaySettings(record=True) if settings is None else settings,
            LocalProcesses(n_workers, **processes) if n_workers else None,
            num_envs=concurrency,
            on_non_finite=on_non_finite,
        )
        try:
            self.set_policy(make_rows, "policy")
            check_policy_spaces(spaces_of_policy(policy), self.spaces)
        except BaseException:
            self.close()
            raise

    def rollout(self, n_episodes: int, seeds: Sequence[int] | None = None) -> list[Trajectory]:
        """Run episodes and return the trajectories; lost episodes have no trajectory.

        Args:
            n_episodes: Number of episodes, >= 1.
            seeds: One seed per episode; if None, each call uses new seeds.

        Raises:
            ConfigError: If an argument is invalid, or recording is disabled in the settings.
            EnvError: If an environment or the policy raises or returns an invalid value.
            WorkerError: If a process fails and is not restarted.
        """
        check_at_least("n_episodes", n_episodes, 1)
        if not self.settings.record:
            raise ConfigError(
                "settings.record", "rollout() returns recorded trajectories: set record=True", False
            )
        if seeds is None:
            seeds = range(self._next_seed, self._next_seed + n_episodes)
            self._next_seed += n_episodes
        elif len(seeds) != n_episodes:
            raise ConfigError("seeds", f"expected {n_episodes} seeds, one per episode", seeds)
        return [own.trajectory for own in self.play(seeds) if own.trajectory is not None]
