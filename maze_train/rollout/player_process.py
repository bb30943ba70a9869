"""A process in which episodes are played, and the words it speaks with its parent.

The pipe carries one byte per message, some of them followed by a framed pickle, as that of
`envs.worker` does.
"""

from __future__ import annotations

import os
import pickle
import select
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from maze_train.envs.slots import EpisodeError
from maze_train.envs.worker import QUIT, REPORT, ParentWatch, limit_threads, reply, run_process
from maze_train.rollout.episode_player import build_player

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack
    from multiprocessing.connection import Connection

    from maze_train.rollout.episode_player import EpisodePlayer, PlayedEpisode, PlaySettings

__all__ = ["DROP", "PLAY", "PlayNews", "PlayWork", "PlayerTask", "player_worker_main"]

PLAY, DROP = b"p", b"a"
"""Commands: play episodes (a `PlayWork` follows); drop all episodes."""

PARENT_CHECK_S = 1.0
"""How often a process looks whether its parent lives while it plays."""

TELL_S = 0.05
"""How often a process tells of steps and episodes while it plays, unless a step takes longer."""

IDLE_CHECK_MS = 2000
"""How long it waits for a command while it does not play."""


@dataclass(frozen=True)
class PlayerTask:
    """What a process is to do first: build environments and the agent."""

    factories: bytes
    """Functions that build the environments, as pickled by cloudpickle."""

    make_agent: bytes
    """Function that builds the agent, pickled in the same way."""

    settings: PlaySettings
    """How episodes are played."""

    on_non_finite: str
    """What to do about numbers that are not finite."""

    parent: int
    """Process that gives the commands."""

    first: int
    """Number of its first environment."""


@dataclass(frozen=True)
class PlayWork:
    """Episodes that are to be played."""

    round: int
    """Number of the round; with another one than before, what is left of that is dropped."""

    jobs: list[tuple[int, int]]
    """Number and seed of each."""


@dataclass(frozen=True)
class PlayNews:
    """What happened since the last news."""

    round: int
    """Number of the round."""

    steps: int
    """Environment steps that were made."""

    episodes: list[PlayedEpisode]
    """Episodes that ended."""

    failed_seed: int | None = None
    """Seed of an episode that failed, and of which the process dies."""


def player_worker_main(conn: Connection, inherited: Sequence[Connection], task: PlayerTask) -> None:
    """Build environments and agent, then play until told to quit or the parent is gone.

    Args:
        conn: This end of the pipe to the parent.
        inherited: Ends that belong to the parent and were copied by a fork; they are closed here.
        task: What to build.
    """

    def work(closing: ExitStack) -> None:
        factories, make_agent = pickle.loads(task.factories), pickle.loads(task.make_agent)
        player = build_player(factories, make_agent, task.settings, task.on_non_finite, task.first)
        closing.callback(player.close)
        limit_threads()  # again: building the environments may have imported what has some
        _Episodes(conn, player).serve(ParentWatch(task.parent))

    run_process(conn, inherited, work)


class _Episodes:
    """The episodes of this process."""

    def __init__(self, conn: Connection, player: EpisodePlayer) -> None:
        self._conn = conn
        self._player = player
        self._round = -1
        self._ended: list[PlayedEpisode] = []
        self._steps_told = 0
        self._last_told = 0.0

    def serve(self, watch: ParentWatch) -> None:
        """Tell the parent about the environments, then play and listen by turns."""
        import cloudpickle  # Imported here, since only worker processes and their parents need it.

        slots = self._player.slots
        spaces = (slots.env_observation_space, slots.single_action_space)
        reply(self._conn, REPORT, cloudpickle.dumps(spaces))
        poller = select.poll()
        poller.register(self._conn.fileno(), select.POLLIN)
        next_look = time.monotonic() + PARENT_CHECK_S
        while True:
            plays = self._player.load > 0
            if poller.poll(0 if plays else IDLE_CHECK_MS):
                command = os.read(self._conn.fileno(), 1)
                if command in (b"", QUIT):
                    return
                self._obey(command)
            elif plays:
                self._play()
            if not plays or time.monotonic() > next_look:
                next_look = time.monotonic() + PARENT_CHECK_S
                if watch.is_gone():
                    return

    def _obey(self, command: bytes) -> None:
        """Do what the parent asks for."""
        if command == DROP:
            self._drop()
            return
        work: PlayWork = pickle.loads(self._conn.recv_bytes())
        if work.round != self._round:
            self._round = work.round
            self._drop()
        self._player.add(work.jobs)

    def _drop(self) -> None:
        self._player.drop()
        self._ended.clear()

    def _play(self) -> None:
        """One step; the parent is told from time to time what came of it."""
        try:
            self._ended += self._player.step()
        except EpisodeError as error:
            self._tell(error.seed)
            raise
        is_done = self._player.load == 0
        if is_done or time.monotonic() - self._last_told > TELL_S:
            self._tell()

    def _tell(self, failed_seed: int | None = None) -> None:
        steps = self._player.steps_made - self._steps_told
        news = PlayNews(self._round, steps, self._ended, failed_seed)
        reply(self._conn, REPORT, pickle.dumps(news, pickle.HIGHEST_PROTOCOL))
        self._steps_told += steps
        self._ended = []
        self._last_told = time.monotonic()
