"""A process in which members of a population play, and the words it speaks with its parent.

The pipe carries one byte per message, some of them followed by a framed pickle, as that of
`envs.worker` does. Weights and noise do not travel: they lie in memory that all processes map.
"""

from __future__ import annotations

import os
import pickle
import select
import time
from dataclasses import dataclass
from multiprocessing.reduction import recv_handle
from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.envs.buffers import map_shared
from maze_train.envs.slots import EnvSlots, EpisodeError
from maze_train.envs.worker import (
    QUIT,
    REPORT,
    ParentWatch,
    limit_threads,
    reply,
    run_process,
)
from maze_train.nets.population import row_blocks
from maze_train.rollout.noise_table import SharedNoiseTable
from maze_train.rollout.population import ESRolloutWorkerWrapper
from maze_train.rollout.weights import WeightsReader

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack
    from multiprocessing.connection import Connection

    from torch import nn

    from maze_train.rollout.members import MemberResult
    from maze_train.rollout.population import MemberSettings
    from maze_train.types import Array

__all__ = [
    "ABORT",
    "BEGIN",
    "COUNTS_NBYTES",
    "PLAY",
    "ESTask",
    "MemberNews",
    "PopulationMemory",
    "Work",
    "es_worker_main",
]

BEGIN, PLAY, ABORT = b"b", b"p", b"a"
"""Commands: begin with a policy (a `PopulationMemory`, and the descriptors of weights, noise and
counts follow); let members play (a `Work` follows); drop all members."""

COUNTS_NBYTES = 4096
"""Memory of what is counted: a page."""

PARENT_CHECK_S = 1.0
"""How often a process looks whether its parent lives while members play."""

TELL_S = 0.005
"""How long results wait for others, while there is something to do: each message takes time from
those who play."""

IDLE_CHECK_MS = 2000
"""How often it does while none plays."""


@dataclass(frozen=True)
class ESTask:
    """What a process is to do first: build its environments."""

    factories: bytes
    """Functions that build them, as pickled by cloudpickle."""

    on_non_finite: str
    """What to do about numbers that are not finite."""

    parent: int
    """Process that gives the commands."""

    first: int
    """Number of its first environment."""


@dataclass(frozen=True)
class PopulationMemory:
    """What a process needs to let members play."""

    make_model: bytes
    """Function that builds the policy, as pickled by cloudpickle."""

    settings: MemberSettings
    """How members act."""

    weights_nbytes: int
    """Size of the memory of the weights."""

    table: dict[str, Any]
    """What the noise table is, see `SharedNoiseTable.state_dict`."""


@dataclass(frozen=True)
class Work:
    """Members that are to play."""

    round: int
    """Number of the round; with another one than before, what is left of that is dropped, and the
    weights that were published last are those of the policy."""

    iteration: int
    """Iteration of the members."""

    noise_stddev: float
    """Deviation of the perturbation."""

    members: list[int]
    """Their numbers."""


@dataclass(frozen=True)
class MemberNews:
    """What came of members since the last news."""

    round: int
    """Number of the round."""

    results: list[MemberResult]
    """Of members that are done."""

    failed_seed: int | None = None
    """Seed of an episode that failed, and of which the process ends."""


def es_worker_main(conn: Connection, inherited: Sequence[Connection], task: ESTask) -> None:
    """Build environments, then let members play until told to quit or the parent is gone.

    Args:
        conn: This end of the pipe to the parent.
        inherited: Ends that belong to the parent and were copied by a fork; they are closed here.
        task: The environments to build.
    """

    def work(closing: ExitStack) -> None:
        factories = pickle.loads(task.factories)
        rows = row_blocks(len(factories))
        slots = EnvSlots(factories, rows, first=task.first, on_non_finite=task.on_non_finite)
        closing.callback(slots.close)
        limit_threads()  # again: building the environments may have imported what has some
        _serve(conn, slots, task.parent)

    run_process(conn, inherited, work)


def _serve(conn: Connection, slots: EnvSlots, parent: int) -> None:
    """Tell the parent about the environments, then play and listen by turns."""
    import cloudpickle  # Imported here, since only worker processes and their parents need it.

    spaces = (slots.env_observation_space, slots.single_action_space)
    reply(conn, REPORT, cloudpickle.dumps(spaces))
    members: _Members | None = None
    poller, watch = select.poll(), ParentWatch(parent)
    poller.register(conn.fileno(), select.POLLIN)
    next_look = time.monotonic() + PARENT_CHECK_S
    while True:
        plays = members is not None and members.plays
        if poller.poll(0 if plays else IDLE_CHECK_MS):
            command = os.read(conn.fileno(), 1)
            if command == BEGIN:
                members = _Members(conn, slots)
            elif members is None or command in (b"", QUIT):
                return
            else:
                members.obey(command)
        elif plays and members is not None:
            members.play()
        if not plays or time.monotonic() > next_look:
            next_look = time.monotonic() + PARENT_CHECK_S
            if watch.is_gone():
                return


class _Members:
    """The members of this process; reads what they need from the pipe."""

    def __init__(self, conn: Connection, slots: EnvSlots) -> None:
        memory: PopulationMemory = pickle.loads(conn.recv_bytes())
        weights = map_shared(recv_handle(conn), memory.weights_nbytes)
        table = SharedNoiseTable.attach(recv_handle(conn), **memory.table)
        counts = map_shared(recv_handle(conn), COUNTS_NBYTES)
        self._conn = conn
        self._steps: Array = np.ndarray(1, np.int64, counts)
        model: nn.Module = pickle.loads(memory.make_model)()
        self._reader = WeightsReader(model, weights)
        self._worker = ESRolloutWorkerWrapper(
            slots, model, table, memory.settings, self._count_steps
        )
        self._round = -1
        self._results: list[MemberResult] = []
        self._last_told = 0.0
        limit_threads()

    def _count_steps(self, steps: int) -> None:
        self._steps[0] += steps

    @property
    def plays(self) -> bool:
        """Whether there is something to do."""
        return self._worker.load > 0

    def obey(self, command: bytes) -> None:
        """Do what the parent asks for."""
        if command == ABORT:
            self._worker.drop()
            self._results.clear()
            return
        work: Work = pickle.loads(self._conn.recv_bytes())
        if work.round != self._round:
            self._round = work.round
            self._results.clear()
            self._reader.load()
            self._worker.begin(work.iteration, work.noise_stddev)
        self._worker.add(work.members)

    def play(self) -> None:
        """One step; the parent is told from time to time what came of it."""
        try:
            self._results += self._worker.step()
        except EpisodeError as error:
            self._tell(error.seed)
            raise
        is_due = not self.plays or time.monotonic() - self._last_told > TELL_S
        if self._results and is_due:
            self._tell()

    def _tell(self, failed_seed: int | None = None) -> None:
        news = MemberNews(self._round, self._results, failed_seed)
        reply(self._conn, REPORT, pickle.dumps(news))
        self._results.clear()
        self._last_told = time.monotonic()
