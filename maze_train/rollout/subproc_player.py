"""Plays episodes in processes of their own."""

from __future__ import annotations

import os
import pickle
from functools import partial
from typing import TYPE_CHECKING, Any

from maze_train.checks import check_at_least
from maze_train.envs.building import pickled
from maze_train.envs.crew import Crew
from maze_train.rollout.job_board import JobBoard
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
        factories = pickled([env_factory] * slots, "env")
        agent = pickled(make_agent, "policy")
        make_task = partial(PlayerTask, factories, agent, settings, on_non_finite, os.getpid())
        self._crew = Crew(
            player_worker_main,
            make_task,
            [range(i * slots, (i + 1) * slots) for i in range(n_workers)],
            kind="worker",
            owner=self,
            start_method=start_method,
            timeout_s=timeout_s,
            on_worker_failure=on_worker_failure,
            max_worker_restarts=max_worker_restarts,
        )
        self._board = JobBoard(self._crew, slots)
        self._steps = [0] * n_workers

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        return self._board.spaces

    @property
    def worker_restarts(self) -> int:
        """How many times processes were started again."""
        return self._crew.restarts

    @property
    def _capacity(self) -> int:
        return self._board.capacity

    def _begin(self) -> None:
        self._end()
        self._board.begin(self._seeds.__getitem__)

    def _end(self) -> None:
        self._board.drop(DROP)

    def _advance(self, limit: int) -> None:
        """Hand episodes out, and wait for news."""
        for index, numbers in self._board.hand_out(limit).items():
            work = PlayWork(self._round, [(number, self._seeds[number]) for number in numbers])
            self._crew.workers[index].send(PLAY, pickle.dumps(work))
        self._board.listen(self._take_in)
        self._board.repair_hung(self._steps)

    def _take_in(self, index: int, news: PlayNews) -> list[PlayedEpisode]:
        """The episodes of which a process tells."""
        self._steps[index] += news.steps
        self.steps_made += news.steps
        self._board.suspect(index, news.failed_seed)
        if news.round != self._round:
            return []  # called off while they were on their way
        self._board.done(index, (episode.number for episode in news.episodes))
        self._note(news.episodes)  # here, since another process may fail meanwhile
        return news.episodes

    def _close(self) -> None:
        """End the processes."""
        self._crew.close()
