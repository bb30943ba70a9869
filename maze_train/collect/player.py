"""Plays episodes with a policy, each a function of the policy and its seed alone, by workers."""

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
from maze_train.collect.row_agents import ModelAgent, PolicyAgent, random_agent
from maze_train.core.checks import check_at_least
from maze_train.core.errors import ConfigError, EnvError
from maze_train.core.files import remove_leftovers
from maze_train.core.seeding import SEED_LIMIT
from maze_train.core.step_end import EpisodeEnd
from maze_train.core.targets import member_of
from maze_train.core.types import ArrayTree, leaves_by_key
from maze_train.data.trajectories import Trajectory
from maze_train.envs.building import closed_on_error
from maze_train.envs.config import EnvConfig
from maze_train.envs.factory import BoundedEnvFactory, EnvFactory
from maze_train.envs.slice import EnvSlice
from maze_train.nets.acting import acts
from maze_train.spaces.agents import agent_spaces
from maze_train.workers.places import Place, Portable, ThisProcess
from maze_train.workers.pool import Crew, Worker, WorkerContext, shares, worker_names
from maze_train.workers.process_pool import LocalProcesses
from maze_train.workers.task_queue import TaskQueue

if TYPE_CHECKING:
    from typing import Self

RANDOM = "random"


MakeEnv: TypeAlias = Callable[[], gymnasium.Env[Any, Any]]
MakeAgent: TypeAlias = Callable[[EnvSlice], RowAgent]


LONGEST_S = 0.05
"""Seconds after which a call returns elsewhere, unless a step takes longer."""

LONGEST_STEPS = 100
"""Steps after which one returns in this process, by no clock: what begins when does not vary."""

CALLS = {"advance": "a step of an episode", "set_agent": "building its policy"}
"""Names of calls in messages."""


class SliceEpisodes(Episodes):
    """The episodes of given tasks, each in the first environment of a slice that rests.

    Args:
        envs: The environments; closed by their owner.
    """

    def __init__(self, envs: EnvSlice) -> None:
        self.envs, self.num_envs = envs, len(envs)
        self.obs, self.rewards, self.end = envs.obs, envs.rewards, envs.end
        several = agent_spaces(envs.observation.space, envs.action.space)
        self.agents = several.agents if several is not None else ()
        self._waiting: deque[EpisodeTask] = deque()
        self._tasks: dict[int, EpisodeTask] = {}
        self.drop()
        envs.seed_from(self._next_seed)

    @property
    def load(self) -> int:
        """Episodes that are played or wait."""
        return len(self.envs.playing) + len(self._waiting)

    def add(self, tasks: Iterable[EpisodeTask]) -> None:
        """Add episodes, which begin in this order as soon as an environment rests."""
        self._waiting.extend(tasks)

    def drop(self) -> None:
        """Forget the episodes that are played and wait."""
        self._waiting.clear()
        self._tasks.clear()
        self.envs.rest()

    def _next_seed(self, i: int) -> int | None:
        if i in self._tasks or not self._waiting:  # the result of the last one is not taken
            return None
        self._tasks[i] = self._waiting.popleft()
        return self._tasks[i].seed

    def begin(self) -> dict[int, EpisodeTask]:
        """Begin the episodes that wait, see `Episodes`."""
        began = self.envs.begin()
        self.playing = self.envs.playing
        return {i: self._tasks[i] for i in began}

    def step(self, actions: ArrayTree) -> dict[int, EpisodeEnd | None]:
        """Take the actions, see `Episodes`."""
        envs, rows = self.envs, self.playing
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
    """A worker of `PlayerPool`, see `TaskQueue`.

    Args:
        factories: Functions that build its environments.
        settings: How episodes are played.
        on_non_finite: Reaction to numbers that are not finite: `raise` or `skip`.
        report_s: Seconds for which results wait for others, while there is something to play: each
            message to another process takes time from those who play.
        context: Where it lives.
    """

    def __init__(
        self,
        factories: Portable[Sequence[MakeEnv]],
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
        """Observation and action space of one environment."""
        return self._envs.observation.space, self._envs.action.space

    def set_agent(self, make_agent: Portable[Callable[..., RowAgent]], *args: Any) -> None:
        """Get what acts.

        Args:
            make_agent: Builds it; called with the environments.
            *args: Further arguments of `make_agent`.
        """
        agent = make_agent.value(self._envs, *args)
        self._runner = EpisodeRunner(self._episodes, agent, self._recorder, self._context.count)

    def begin_round(self, *args: Any) -> None:
        """Notify the agent that a round begins; no episodes are running then."""
        assert self._runner is not None, "set_agent() comes first"
        self._runner.agent.begin_round(*args)

    def advance(self, tasks: Iterable[EpisodeTask]) -> list[PlayedEpisode]:
        """Play for a while, further episodes too; returns those that ended."""
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
        """Forget all episodes; unfinished videos are removed."""
        self._episodes.drop()
        if self._recorder is not None:
            self._recorder.drop()

    def close(self) -> None:
        """Close the environments; unfinished videos are removed."""
        self.drop()
        self._envs.close()


class PlayerPool:
    """Workers that play episodes in a place, and the episodes that are done.

    Args:
        env_factory: Builds an environment.
        num_envs: Environments of all workers together, >= 1, rounded up to equally many in each.
        settings: How episodes are played.
        place: Where they are played; None: in this process.
        on_non_finite: Reaction to numbers that are not finite: `raise` or `skip`.
        report_s: See `PlayerWorker`.

    Attributes:
        waiting: Episodes that are done and were not taken, by number.
    """

    def __init__(
        self,
        env_factory: MakeEnv,
        num_envs: int,
        settings: PlaySettings,
        place: Place | None,
        on_non_finite: str,
        report_s: float = LONGEST_S,
    ) -> None:
        place = place or ThisProcess()
        count = self._num_workers = place.num_workers(num_envs)
        slots = -(-num_envs // count)
        factories = Portable([env_factory] * slots, "env")
        names = worker_names("worker", shares(slots * count, count))
        make_worker = partial(PlayerWorker, factories, settings, on_non_finite, report_s)
        self._pool = place.pool(Crew([make_worker] * count, names, CALLS))
        self._queue: TaskQueue[PlayedEpisode] = TaskQueue(self._pool, slots, attrgetter("number"))
        self._round = 0
        self.waiting: dict[int, PlayedEpisode] = {}

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        return self._queue.spaces

    @property
    def worker_restarts(self) -> int:
        """Number of times workers were started again."""
        return self._pool.restarts

    @property
    def steps_made(self) -> int:
        """Environment steps made so far, those included that are not needed any more."""
        return sum(map(self._pool.steps, range(self._num_workers)))

    def _next_round(self) -> int:
        """Cancel the running episodes; returns the number of the next round."""
        self._round += 1
        return self._round

    def _play(
        self,
        round_: int,
        numbers: Iterable[int],
        task_of: Callable[[int], EpisodeTask],
        limit_of: Callable[[int], int],
        on_step: Callable[[int], object],
        *args: Any,
    ) -> Generator[PlayedEpisode, None, None]:
        """Play a round.

        Args:
            round_: Result of `_next_round`.
            numbers: Numbers of the episodes, in the order in which they are returned.
            task_of: Gives an episode by its number.
            limit_of: Gives the number below which episodes may begin while one is waited for.
            on_step: See `RolloutPlayer.play`.
            *args: What `begin_round` of the agents gets.
        """
        self._check_round(round_)
        waiting = self.waiting = dict[int, PlayedEpisode]()
        self._queue.drop()
        self._queue.begin(*args, task_of=task_of, seed_of=lambda number: task_of(number).seed)
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
                "these episodes were called off, since play() was called again: take all episodes "
                "of one call before the next"
            )

    def close(self) -> None:
        """Close the environments and remove unfinished videos; calling it again does nothing."""
        self._pool.close()


WINDOW = 2
"""Episodes that are begun before the first one that is not done, for each that can be played at a
time: finished episodes wait in memory for their turn."""


class RolloutPlayer(PlayerPool):
    """Plays the episodes of given seeds in any order, and returns them in the order of the seeds.

    An episode follows from the policy, its seed and the settings, to the bit: not from the worker
    that plays it, nor from other episodes. The exception are environments which a reset with a seed
    does not make forget what was before, such as `BipedalWalker-v3`. To be closed; it is a context
    manager that does so.

    Episodes of a worker that fails are given to others, or to the one that takes its place with
    `on_worker_failure="restart"`, and come out the same. If it fails again after that, the iterator
    ends: when it raised for the second time, or when the third worker died or hung with it.

    Args:
        env_factory: Builds an environment.
        make_agent: Builds what acts in the environments of a worker.
        settings: How episodes are played.
        place: Where they are played.
        num_envs: Environments of all workers together, >= 1, rounded up to the same number in each
            worker. Each environment plays one episode at a time, and begins the next when one ends.
        on_non_finite: Reaction to numbers that are not finite: `raise` or `skip`.

    Attributes:
        waiting: Episodes of the last call of `play` that are done and were not taken, by number;
            they stay there when it ends early. One counts as taken when the next is asked for.

    Raises:
        ConfigError: If a setting is wrong, or something cannot be sent to another process.
        EnvError: If an environment cannot be built, or cannot make videos that are asked for; it
            is a WorkerError where a worker process fails.
        MissingExtraError: If a package that is needed is not installed.
        SpaceError: If the environments differ in their spaces.
    """

    def __init__(
        self,
        env_factory: MakeEnv,
        make_agent: MakeAgent,
        settings: PlaySettings,
        place: Place | None = None,
        *,
        num_envs: int = 8,
        on_non_finite: str = "raise",
    ) -> None:
        check_at_least("num_envs", num_envs, 1)
        if settings.video_dir is not None:
            ffmpeg_path()
        self.settings = settings
        super().__init__(env_factory, num_envs, settings, place, on_non_finite)
        self._queue.set_up("set_agent", Portable(make_agent, "policy"))

    def play(
        self, seeds: Sequence[int], on_step: Callable[[int], object] | None = None
    ) -> Iterator[PlayedEpisode]:
        """Play an episode for each seed; cancels the episodes of an earlier call.

        Args:
            seeds: Seeds >= 0. Episode j of these has the number j.
            on_step: Called again and again with the number of steps that were made meanwhile, 0
                included; what it raises goes through.

        Returns:
            The episodes in the order of their numbers, each as soon as all before it are done. Few
            are begun before it is asked for them, so little waits in memory.

        Raises:
            ConfigError: If a seed is no integer >= 0.
            EnvError: When it is asked for an episode, if an environment or a policy raises or
                returns something invalid.
            WorkerError: The same, if a process fails and is not started again.
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
        """Close the environments and remove unfinished videos; calling it again does nothing."""
        super().close()
        video_dir = self.settings.video_dir
        if video_dir is not None:
            remove_leftovers(Path(video_dir))  # of processes that were killed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def action_seed_of(action_seed: int, seed: int) -> int:
    """Return the seed of the random choices of an agent in an episode, in [0, 2^31).

    Args:
        action_seed: See `PlaySettings`.
        seed: Seed of the episode, >= 0.
    """
    return int(np.random.SeedSequence([action_seed, seed]).generate_state(1)[0]) % SEED_LIMIT


def checked_seeds(seeds: Iterable[Any]) -> list[int]:
    """Seeds as plain integers.

    Raises:
        ConfigError: If one is no integer >= 0.
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


def agent_maker(policy: Any, deterministic: bool = True) -> MakeAgent:
    """Return what builds the agent, for any form in which a caller names a policy.

    Args:
        policy: See `RolloutGenerator`.
        deterministic: Whether a model takes the most likely action instead of a sampled one.

    Raises:
        ConfigError: If it is no policy.
    """
    if isinstance(policy, str) and policy == RANDOM:
        return random_agent
    model = model_of(policy)
    if model is not None:
        return partial(ModelAgent, model, deterministic=deterministic)
    if isinstance(policy, type):
        return partial(PolicyAgent, policy)
    return partial(PolicyAgent, partial(copy.deepcopy, UserPolicy(policy).policy))


def model_of(policy: Any) -> nn.Module | None:
    """Return the model that acts for a policy: itself or its `model`; otherwise None."""
    for model in (policy, member_of(policy, "model")):
        if isinstance(model, nn.Module) and acts(model):
            return model
    return None


def spaces_of_policy(policy: Any) -> tuple[Any, Any]:
    """Observation and action space that a policy names; None: it names none."""
    if isinstance(policy, type):
        return None, None
    return member_of(policy, "observation_space"), member_of(policy, "action_space")


def check_policy_spaces(found: tuple[Any, Any], spaces: tuple[Any, Any]) -> None:
    """Refuse spaces that a policy names, if those of the environment are others.

    Raises:
        ConfigError: Naming both.
    """
    names = ("observation_space", "action_space")
    for name, own, space in zip(names, found, spaces, strict=True):
        if own is not None and own != space:
            raise ConfigError("policy", f"its {name} is {own}, that of the environment is {space}")


class RolloutGenerator(RolloutPlayer):
    """Plays episodes with a policy and records them.

        with RolloutGenerator("CartPole-v1", load_policy(run_dir)) as generator:
            trajectories = generator.rollout(100)

    An episode depends on the policy and its seed only, to the bit; not on `concurrency`,
    `n_workers` or other episodes. Call `close` at the end, or use it as a context manager.

    Args:
        env: A registered id, an `EnvConfig`, a factory, or a class or function that returns an
            environment. Wrappers for training are left out.
        policy: The policy: `"random"`; a model, or an object with a model as its attribute `model`,
            such as a `TrainedPolicy`; an object with a method `act(observation)`, a function of one
            observation, or a class of such objects. See `PolicyAgent`. Each environment gets a copy
            of an object. Models act with their current weights.
        deterministic: Whether a model takes the most likely action instead of a sampled one.
        concurrency: Episodes that are played at a time, >= 1.
        n_workers: Processes that play them; 0: this one.
        seed: Seed of the first episode, >= 0; the next ones have `seed + 1`, `seed + 2`, ...
        max_episode_steps: Steps after which an episode is truncated, >= 1; None: as the environment
            says.
        settings: How episodes are played; None: they are recorded. Its `deterministic` has no
            meaning here.
        on_non_finite: Reaction to numbers that are not finite: `raise` or `skip`.
        **processes: With processes, further settings of `LocalProcesses`: `start_method`,
            `timeout_s`, `on_worker_failure`, `max_worker_restarts`.

    Raises:
        ConfigError: If a setting is wrong, or a policy is for other spaces.
        EnvError: If an environment cannot be built.
        MissingExtraError: If a package that is needed is not installed.
    """

    def __init__(
        self,
        env: str | EnvConfig | EnvFactory | Callable[..., gymnasium.Env[Any, Any]],
        policy: Any = RANDOM,
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
        factory: Any = EnvFactory.from_any(env).for_evaluation()
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
        """Play episodes and return them, without those that were lost.

        Args:
            n_episodes: Number of episodes, >= 1.
            seeds: One seed for each; None: the next seeds, so that each call plays new episodes.

        Raises:
            ConfigError: If an argument is invalid, or the settings record nothing.
            EnvError: If an environment or the policy raises or returns something invalid.
            WorkerError: If a process fails and is not started again.
        """
        check_at_least("n_episodes", n_episodes, 1)
        if not self.settings.record:
            raise ConfigError(
                "settings.record", "rollout() returns what is recorded: set it", False
            )
        if seeds is None:
            seeds = range(self._next_seed, self._next_seed + n_episodes)
            self._next_seed += n_episodes
        elif len(seeds) != n_episodes:
            raise ConfigError("seeds", f"expected {n_episodes} of them, one per episode", seeds)
        played = self.play(seeds)
        return [episode.trajectory for episode in played if episode.trajectory is not None]
