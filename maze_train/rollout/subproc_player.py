"""Plays episodes in processes of their own."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from typing import TYPE_CHECKING, Any

from maze_train.checks import check_at_least
from maze_train.envs.building import pickled
from maze_train.envs.crew import Crew, Movement
from maze_train.envs.workers import WorkerFailedError, check_spaces
from maze_train.rollout.player import RolloutPlayer
from maze_train.rollout.player_process import (
    DROP,
    PLAY,
    PlayerTask,
    PlayNews,
    PlayWork,
    player_worker_main,
)
from maze_train.rollout.video import ffmpeg_path

if TYPE_CHECKING:
    from maze_train.rollout.episode_player import PlayedEpisode, PlaySettings
    from maze_train.rollout.player import MakeAgent, MakeEnv

__all__ = ["SubprocPlayer"]

POLL_MS = 100
"""How long to wait at most for news of the processes."""

MOST_DEATHS = 3
"""How many processes may die or hang while an episode is played in them, before that is held to be
the doing of the episode."""

SEEDS_TOLD = 8
"""Seeds that a message names at most."""


class SubprocPlayer(RolloutPlayer):
    """Episodes are played in processes, several at a time in each.

    Episodes of a process that fails are given to others, or to the one that takes its place with
    `on_worker_failure="restart"`, and come out the same. One that fails again after that ends it
    all: when it raised for the second time, or when the third process died or hung with it.

    Args:
        env_factory: Builds an environment; sent to the processes, as `make_agent` is.
        make_agent: Builds what acts in the slots of a process.
        settings: How episodes are played.
        n_workers: How many processes, >= 1.
        concurrency: Episodes that are played at a time in all processes together, >= 1, rounded up
            to equally many in each.
        on_non_finite: What to do about numbers that are not finite: `raise` or `skip`.
        start_method: `forkserver`, `spawn` or `fork`.
        timeout_s: Seconds without a step after which a process counts as hung, > 0.
        on_worker_failure: `fail` or `restart`.
        max_worker_restarts: How many times processes are started again at most, >= 0.

    Raises:
        ConfigError: If a setting is wrong, or something can not be sent to another process.
        MissingExtraError: If a package that is needed is not installed.
        SpaceError: If the environments differ in their spaces.
        WorkerError: If an environment or the agent can not be built, or a process dies or hangs.
    """

    def __init__(
        self,
        env_factory: MakeEnv,
        make_agent: MakeAgent,
        settings: PlaySettings,
        *,
        n_workers: int,
        concurrency: int = 8,
        on_non_finite: str = "raise",
        start_method: str = "forkserver",
        timeout_s: float = 300.0,
        on_worker_failure: str = "fail",
        max_worker_restarts: int = 10,
    ) -> None:
        super().__init__(settings)
        check_at_least("n_workers", n_workers, 1)
        check_at_least("concurrency", concurrency, 1)
        if settings.video_dir is not None:
            ffmpeg_path()
        slots = -(-concurrency // n_workers)
        # Some wait in a process, so that no slot is empty while messages travel.
        self._most_jobs = slots + slots // 2 + 1
        self._slots = slots
        factories = pickled([env_factory] * slots, "env")
        agent = pickled(make_agent, "policy")
        task = PlayerTask(factories, agent, settings, on_non_finite, os.getpid())
        self._states = [_ProcessState() for _ in range(n_workers)]
        self._crew = Crew(
            player_worker_main,
            task,
            [range(i * slots, (i + 1) * slots) for i in range(n_workers)],
            kind="worker",
            owner=self,
            start_method=start_method,
            timeout_s=timeout_s,
            on_worker_failure=on_worker_failure,
            max_worker_restarts=max_worker_restarts,
        )
        self._next = 0
        self._again: list[int] = []
        self._failed_seeds: set[int] = set()
        self._deaths: Counter[int] = Counter()
        try:
            described = self._crew.first_replies("building its environments")
            for worker, spaces in zip(self._crew.workers, described, strict=True):
                check_spaces(worker, spaces, described[0])
        except BaseException:
            self.close()
            raise
        self._spaces: tuple[Any, Any] = described[0]

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        return self._spaces

    @property
    def worker_restarts(self) -> int:
        """How many times processes were started again."""
        return self._crew.restarts

    @property
    def _capacity(self) -> int:
        return self._slots * len(self._states)

    def _begin(self) -> None:
        self._next = 0
        self._end()

    def _end(self) -> None:
        for worker, state in zip(self._crew.workers, self._states, strict=False):
            if state.jobs and state.begun:
                worker.send(DROP)
            state.jobs.clear()
        self._again.clear()
        self._failed_seeds.clear()
        self._deaths.clear()

    def _advance(self, limit: int) -> list[PlayedEpisode]:
        """Hand episodes out, and wait for news."""
        self._hand_out(limit)
        ended: list[PlayedEpisode] = []
        for index in self._crew.ready(POLL_MS):
            try:
                told = self._crew.workers[index].receive("an episode", self._crew.timeout_s)
            except WorkerFailedError as failure:
                self._repair(index, failure.with_traceback(None))
                continue
            ended += self._take_in(index, told)
        for index, state in enumerate(self._states):
            if state.still_s() > self._crew.timeout_s:
                what = "a step" if state.begun else "building its environments"
                worker = self._crew.workers[index]
                self._repair(index, worker.hung(what, self._crew.timeout_s))
        return ended

    def _hand_out(self, limit: int) -> None:
        """Give episodes to those processes that have the fewest."""
        given: dict[int, list[int]] = {}
        while self._again or self._next < limit:
            index = min(
                (i for i, state in enumerate(self._states) if state.begun),
                key=lambda i: len(self._states[i].jobs),
                default=-1,
            )
            if index < 0 or len(self._states[index].jobs) >= self._most_jobs:
                break
            if self._again:
                number = self._again.pop(0)
            else:
                number, self._next = self._next, self._next + 1
            self._states[index].give(number)
            given.setdefault(index, []).append(number)
        for index, numbers in given.items():
            work = PlayWork(self._round, [(number, self._seeds[number]) for number in numbers])
            self._crew.workers[index].send(PLAY, pickle.dumps(work))

    def _take_in(self, index: int, told: Any) -> list[PlayedEpisode]:
        """What a process says: of its environments when it was started again, else news."""
        state = self._states[index]
        if not state.begun:
            check_spaces(self._crew.workers[index], told, self._spaces)
            state.begun = True
            return []
        news: PlayNews = told
        state.steps += news.steps
        self.steps_made += news.steps
        state.failed_seed = news.failed_seed
        if news.round != self._round:
            return []  # called off while they were on their way
        state.jobs.difference_update(episode.number for episode in news.episodes)
        return news.episodes

    def _repair(self, index: int, failure: WorkerFailedError) -> None:
        """Have a process started again, and its episodes played again.

        Raises:
            MazeTrainError: If it is not to be started again.
        """
        state = self._states[index]
        told = failure.text + self._blame(state, failure)
        outlook = f"and its {len(state.jobs)} episodes are played again, with the same numbers"
        self._again = sorted([*self._again, *state.jobs])
        state.restart()
        self._crew.replace(index, failure, told, outlook)

    def _blame(self, state: _ProcessState, failure: WorkerFailedError) -> str:
        """Note which episodes may have made a process fail; returns what to say of them."""
        if not state.jobs:
            return ""
        if state.failed_seed is not None:
            is_guilty = state.failed_seed in self._failed_seeds
            self._failed_seeds.add(state.failed_seed)
            told = ""
        else:
            self._deaths.update(state.jobs)
            is_guilty = max(self._deaths[number] for number in state.jobs) >= MOST_DEATHS
            numbers = sorted(state.jobs)[:SEEDS_TOLD]
            rest = ", ..." if len(state.jobs) > SEEDS_TOLD else ""
            seeds = ", ".join(str(self._seeds[number]) for number in numbers)
            told = f"; it had the episodes with the seeds {seeds}{rest}"
        if not is_guilty:
            return told
        failure.final = True
        return f"{told}; it failed when it was played again, too"

    def _close(self) -> None:
        """End the processes."""
        self._crew.close()


class _ProcessState:
    """What is known of a process, which may be another one later."""

    def __init__(self) -> None:
        self.begun = True
        """Whether its environments are built."""
        self.jobs: set[int] = set()
        """Numbers of the episodes that were given to it."""
        self.steps = 0
        """Environment steps of which it told."""
        self.failed_seed: int | None = None
        """Seed of an episode that failed there just now."""
        self.movement = Movement()

    def give(self, number: int) -> None:
        """Note an episode that is to be played there."""
        if not self.jobs:
            self.movement.expect()
        self.jobs.add(number)

    def still_s(self) -> float:
        """Seconds since news of steps came; 0 while it has nothing to do."""
        return self.movement.still_s(self.steps, has_work=not self.begun or bool(self.jobs))

    def restart(self) -> None:
        """Wait for a new process."""
        self.begun = False
        self.jobs.clear()
        self.failed_seed = None
        self.movement.expect()
