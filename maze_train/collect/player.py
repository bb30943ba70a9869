"""Runs seeded episodes in workers; results depend only on the policy and the seeds."""

from __future__ import annotations

import copy
import operator
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium
import numpy as np
from torch import nn

from maze_train.collect.custom_policies import UserPolicy
from maze_train.collect.episode_runner import (
    EpisodeRunner,
    Episodes,
    EpisodeTask,
    PlayedEpisode,
    RowAgent,
)
from maze_train.collect.recording import PlaySettings, Recorder, ffmpeg_path
from maze_train.collect.row_agents import PolicyAgent, model_agent, random_agent
from maze_train.core.checks import check_at_least
from maze_train.core.errors import ConfigError, EnvError
from maze_train.core.files import remove_leftovers
from maze_train.core.seeding import SEED_LIMIT
from maze_train.core.step_end import EpisodeEnd
from maze_train.core.targets import member_of
from maze_train.core.types import ArrayTree, leaves_by_key
from maze_train.data.trajectories import Trajectory
from maze_train.envs.building import closed_on_error
from maze_train.envs.calls import CALL_ENVS, EnvCall
from maze_train.envs.config import EnvConfig
from maze_train.envs.factory import BoundedEnvFactory, EnvFactory
from maze_train.envs.slice import EnvSlice
from maze_train.nets.acting import acts
from maze_train.spaces.agents import agents_of
from maze_train.workers.backends import Pickled, ThisProcess, WorkerBackend
from maze_train.workers.pool import Worker, WorkerContext, WorkerSpecs, shares, worker_names
from maze_train.workers.process_pool import LocalProcesses
from maze_train.workers.task_queue import TaskQueue

if TYPE_CHECKING:
    from typing import Self

RANDOM = "random"

MakeEnv: TypeAlias = Callable[[], gymnasium.Env[Any, Any]]
MakeAgent: TypeAlias = Callable[[EnvSlice], RowAgent]

LONGEST_S = 0.05
"""Maximum duration of a call in a remote worker in seconds; at least one step is taken."""

LONGEST_STEPS = 100
"""Maximum number of steps of a call in this process. A time limit would not be reproducible."""

CALLS = {"advance": "a step of an episode", "set_agent": "building its policy"}
CALLS |= {"make_calls": f"calls of {CALL_ENVS}"}
"""Description of each method, for messages."""


class SliceEpisodes(Episodes):
    """Runs a queue of episodes in the environments of a slice.

    Args:
        envs: The environments; the caller closes them.
    """

    def __init__(self, envs: EnvSlice) -> None:
        self.envs, self.num_envs = envs, len(envs)
        self.obs, self.rewards, self.end = envs.obs, envs.rewards, envs.end
        self.agents = agents_of((envs.observation.space, envs.action.space))
        self._waiting: deque[EpisodeTask] = deque()
        self._tasks: dict[int, EpisodeTask] = {}
        self.drop()
        envs.seed_from(self._next_seed)

    @property
    def load(self) -> int:
        """Number of running and queued episodes."""
        return len(self.envs.playing) + len(self._waiting)

    def add(self, tasks: Iterable[EpisodeTask]) -> None:
        """Add episodes to the queue."""
        self._waiting.extend(tasks)

    def drop(self) -> None:
        """Discard the running and queued episodes."""
        self._waiting.clear()
        self._tasks.clear()
        self.envs.rest()

    def _next_seed(self, i: int) -> int | None:
        if i in self._tasks or not self._waiting:  # The last result is still pending.
            return None
        self._tasks[i] = self._waiting.popleft()
        return self._tasks[i].seed

    def begin(self) -> dict[int, EpisodeTask]:
        """Begin queued episodes in free environments; see `Episodes`."""
        began = self.envs.begin() if self._waiting else []
        self.playing = self.envs.playing
        return {i: self._tasks[i] for i in began}

    def step(self, actions: ArrayTree) -> dict[int, EpisodeEnd | None]:
        """Step the environments with a running episode; see `Episodes`."""
        envs, rows = self.envs, self.envs.rows
        for key, column in leaves_by_key(actions).items():
            envs.actions[key][rows] = column[: len(rows)]
        report = envs.step()
        if report is None:
            return {}
        ends = {**{end.env: end for end in report.ends}, **dict.fromkeys(report.lost)}
        for i in ends:
            del self._tasks[i]
        return ends


class PlayerWorker(Worker):
    """Worker of `PlayerPool`; see `TaskQueue`.

    Args:
        factories: Functions that build the environments.
        settings: Settings of the episodes.
        on_non_finite: Reaction to non-finite values: `raise` or `skip`.
        report_s: Maximum time in seconds to buffer results, which reduces the number of messages.
        context: Context of the worker.
    """

    def __init__(
        self,
        factories: Pickled[Sequence[MakeEnv]],
        settings: PlaySettings,
        on_non_finite: str,
        report_s: float,
        context: WorkerContext,
    ) -> None:
        count = len(factories.value)
        self._envs = EnvSlice.for_playing(
            factories.value,
            number=context.index * count,
            on_non_finite=on_non_finite,
            final_obs="all" if settings.record else "none",
        )
        self._episodes = SliceEpisodes(self._envs)
        is_kept = settings.record or settings.video_dir is not None
        with closed_on_error(self._envs.envs):
            self._recorder = Recorder(self._envs, settings) if is_kept else None
        self._report_s = report_s
        self._context = context
        self._runner: EpisodeRunner | None = None

    def describe(self) -> tuple[Any, Any]:
        """Return the observation and action space of one environment."""
        return self._envs.observation.space, self._envs.action.space

    def set_agent(self, make_agent: Pickled[Callable[..., RowAgent]], *args: object) -> None:
        """Set the agent.

        Args:
            make_agent: Builds the agent; called with the environments.
            *args: Further arguments of `make_agent`.
        """
        agent = make_agent.value(self._envs, *args)
        self._runner = EpisodeRunner(self._episodes, agent, self._recorder, self._context.count)

    def make_calls(self, calls: Sequence[EnvCall]) -> None:
        """Make the new calls, see `EnvSlice.make_calls`."""
        self._envs.make_calls(calls)

    def begin_round(self, calls: Sequence[EnvCall], *args: object) -> None:
        """Make the new calls, and notify the agent that a round begins."""
        assert self._runner is not None, "set_agent() comes first"
        self.make_calls(calls)
        self._runner.agent.begin_round(*args)

    def advance(self, tasks: Iterable[EpisodeTask]) -> list[PlayedEpisode]:
        """Add episodes and run for a limited time; return the finished episodes."""
        assert self._runner is not None, "set_agent() comes first"
        self._episodes.add(tasks)
        began, steps, results = time.monotonic(), 0, list[PlayedEpisode]()
        while self._episodes.load:
            results += self._runner.step()
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
        self._episodes.drop()
        if self._recorder is not None:
            self._recorder.drop()

    def close(self) -> None:
        """Close the environments, and remove unfinished videos."""
        self.drop()
        self._envs.close()


class PlayerPool:
    """Pool of workers that run episodes.

    Args:
        env_factory: Builds an environment.
        num_envs: Total number of environments (>= 1), rounded up to the same number per worker.
        settings: Settings of the episodes.
        backend: Backend of the workers; None selects this process.
        on_non_finite: Reaction to non-finite values: `raise` or `skip`.
        report_s: See `PlayerWorker`.
        calls: List of all environment calls of the run. New calls are made before a round.

    Attributes:
        waiting: Finished episodes that have not been returned yet, by number.
    """

    def __init__(
        self,
        env_factory: MakeEnv,
        num_envs: int,
        settings: PlaySettings,
        backend: WorkerBackend | None,
        on_non_finite: str,
        report_s: float = LONGEST_S,
        calls: Sequence[EnvCall] = (),
    ) -> None:
        self._calls = calls
        backend = backend or ThisProcess()
        count = self._num_workers = backend.num_workers(num_envs)
        slots = -(-num_envs // count)
        factories = Pickled([env_factory] * slots, "env")
        names = worker_names("worker", shares(slots * count, count))
        make_worker = partial(PlayerWorker, factories, settings, on_non_finite, report_s)
        self._pool = backend.pool(WorkerSpecs([make_worker] * count, names, CALLS))
        self._queue: TaskQueue[PlayedEpisode] = TaskQueue(self._pool, slots, attrgetter("number"))
        self._round = 0
        self.waiting: dict[int, PlayedEpisode] = {}

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        return self._queue.spaces

    @property
    def worker_restarts(self) -> int:
        """Number of worker restarts."""
        return self._pool.restarts

    @property
    def steps_made(self) -> int:
        """Number of environment steps so far, including discarded episodes."""
        return sum(map(self._pool.steps, range(self._num_workers)))

    def _next_round(self) -> int:
        """Cancel the running episodes, and return the number of the next round."""
        self._round += 1
        return self._round

    def _play(
        self,
        round_: int,
        numbers: Iterable[int],
        task_of: Callable[[int], EpisodeTask],
        limit_of: Callable[[int], int],
        on_step: Callable[[int], object],
        *args: object,
    ) -> Generator[PlayedEpisode, None, None]:
        """Run a round of episodes.

        Args:
            round_: Result of `_next_round`.
            numbers: Indices of the episodes, in the order of the results.
            task_of: Returns the task with a given index.
            limit_of: Maps the index of the next result to an exclusive upper bound on the indices
                of episodes that may begin.
            on_step: See `RolloutPlayer.play`.
            *args: Arguments of `RowAgent.begin_round`.
        """
        self._check_round(round_)
        waiting = self.waiting = dict[int, PlayedEpisode]()
        self._queue.drop()
        calls = tuple(self._calls)
        self._queue.begin(
            calls, *args, task_of=task_of, seed_of=lambda number: task_of(number).seed
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
        if not len(self._pool):
            raise EnvError("this player is closed: build a new one")
        if number != self._round:
            raise EnvError(
                "these episodes were cancelled, because play() was called again: iterate over all "
                "episodes of a call before the next call"
            )

    def close(self) -> None:
        """Close the environments and remove unfinished videos. Closing again has no effect."""
        self._pool.close()


WINDOW = 2
"""Maximum number of episodes begun ahead of the first unfinished one, as a multiple of the number
of environments; limits the memory for finished episodes that have not been returned yet."""


class RolloutPlayer(PlayerPool):
    """Runs episodes with given seeds, and returns the episodes in the order of the seeds.

    Each episode depends only on the policy, the settings and the seed of the episode. Results are
    bit-for-bit identical for any number of workers, and do not depend on other episodes.
    Environments that keep state after a seeded reset, such as `BipedalWalker-v3`, are an exception.
    Call `close` at the end, or use the player as a context manager.

    The episodes of a failed worker are repeated with identical results, by other workers or, with
    `on_worker_failure="restart"`, by the restarted worker. The iterator raises an error if an
    episode raises twice, or if three workers die or hang during an episode.

    Args:
        env_factory: Builds an environment.
        make_agent: Builds the agent of a worker.
        settings: Settings of the episodes.
        backend: Backend of the workers; None selects this process.
        num_envs: Total number of environments (>= 1), rounded up to the same number per worker.
        on_non_finite: Reaction to non-finite values: `raise` or `skip`.

    Attributes:
        waiting: Finished episodes of the last call of `play` that have not been returned, by
            number. The episodes remain if the iteration stops early. An episode counts as returned
            when the next one is requested.

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
        make_agent: MakeAgent,
        settings: PlaySettings,
        backend: WorkerBackend | None = None,
        *,
        num_envs: int = 8,
        on_non_finite: str = "raise",
    ) -> None:
        check_at_least("num_envs", num_envs, 1)
        if settings.video_dir is not None:
            ffmpeg_path()
        self.settings = settings
        super().__init__(env_factory, num_envs, settings, backend, on_non_finite)
        self._queue.set_up("set_agent", Pickled(make_agent, "policy"))

    def play(
        self, seeds: Sequence[int], on_step: Callable[[int], object] | None = None
    ) -> Iterator[PlayedEpisode]:
        """Run an episode for each seed. The episodes of an earlier call are cancelled.

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
        total, ahead = len(checked), WINDOW * self._queue.capacity

        def task_of(number: int) -> EpisodeTask:
            seed = checked[number]
            return EpisodeTask(number, seed, action_seed_of(self.settings.action_seed, seed))

        def limit_of(number: int) -> int:
            return min(number + ahead, total)

        on_step = on_step or (lambda steps: None)
        return self._play(self._next_round(), range(total), task_of, limit_of, on_step)

    def close(self) -> None:
        """Close the environments and remove unfinished videos. Closing again has no effect."""
        super().close()
        video_dir = self.settings.video_dir
        if video_dir is not None:
            remove_leftovers(Path(video_dir))  # Remove unfinished videos of killed processes.

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


def agent_maker(policy: object, deterministic: bool = True) -> MakeAgent:
    """Return a factory of agents for any supported policy.

    Args:
        policy: See `RolloutGenerator`.
        deterministic: Whether a model takes the most likely action instead of sampling.

    Raises:
        ConfigError: If `policy` is not a supported policy.
    """
    if isinstance(policy, str) and policy == RANDOM:
        return random_agent
    model = model_of(policy)
    if model is not None:
        return partial(model_agent, model, deterministic=deterministic)
    if isinstance(policy, type):
        return partial(PolicyAgent, policy)
    return partial(PolicyAgent, partial(copy.deepcopy, UserPolicy(policy).policy))


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


class RolloutGenerator(RolloutPlayer):
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
            observation, or a class with a method `act`; see `PolicyAgent`. Objects are copied for
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
        super().__init__(
            factory,
            agent_maker(policy, deterministic),
            PlaySettings(record=True) if settings is None else settings,
            LocalProcesses(n_workers, **processes) if n_workers else ThisProcess(),
            num_envs=concurrency,
            on_non_finite=on_non_finite,
        )
        try:
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
