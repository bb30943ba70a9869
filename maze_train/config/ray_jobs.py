"""Jobs in parallel on the machines of a cluster, where workers start their processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count

from maze_train.config.options import PROGRAM
from maze_train.config.sweeps import JobProcesses, JobRecord, ProcessJob, StartedJob
from maze_train.core.errors import ConfigError, WorkerError
from maze_train.core.notices import notify, say
from maze_train.workers.places import Place, Portable
from maze_train.workers.pool import (
    CallCancelledError,
    Crew,
    Worker,
    WorkerContext,
    WorkerFailedError,
    WorkerPool,
)

CALLS = {"begin": "its start", "run": "a job"}
"""Names of calls in messages."""

POLL_S = 1.0
"""Longest wait for news of the jobs: a signal that another thread got is noticed after it only."""

MOST_SIGNALS = 3
"""Signals of which the last one kills the jobs."""


class JobWorker(Worker):
    """Runs jobs where it lives, one after the other, each in its own process.

    Args:
        folders: Directories that the jobs need.
        context: Where it lives.
    """

    def __init__(self, folders: Sequence[str], context: WorkerContext) -> None:
        self._folders, self._context = folders, context

    def begin(self) -> None:
        """Check that the directories are there.

        Raises:
            ConfigError: If one is missing.
        """
        for folder in self._folders:
            if not os.path.isdir(folder):
                raise ConfigError(
                    "hydra/launcher",
                    f"the machine {socket.gethostname()} has no folder {folder}; expected that all "
                    "machines share the folder of the sweep (hydra.sweep.dir) and that from where "
                    "it is started, at the same paths",
                    "ray",
                )

    def run(self, job: Portable[ProcessJob]) -> JobRecord:
        """The record of a job; one that is cancelled gets a signal, and is waited for."""
        ended: list[StartedJob] = []
        beat = self._context.count
        processes = JobProcesses(ended.append, 1, start_method="spawn", beat=beat)
        with suppress(CallCancelledError):
            processes.run([job.value])
        return ended[0].outcome


class JobPool:
    """Runs jobs with the workers of a place, one each at a time; the others wait.

    A worker that is lost costs the job that it had, and is started again; where it cannot be, the
    others do the rest.

    Args:
        ended: Called with each job that ended.
        place: Where the jobs run; their workers may be started again.
        n_jobs: Most jobs at a time.
        folders: Directories that the jobs need.
    """

    def __init__(
        self,
        ended: Callable[[StartedJob], None],
        place: Place,
        n_jobs: int,
        folders: Sequence[str],
    ) -> None:
        self._ended, self._place, self._n_jobs, self._folders = ended, place, n_jobs, folders
        self._running: dict[int, StartedJob] = {}

    def run(self, jobs: Iterable[ProcessJob]) -> None:
        """Run jobs, each of which is asked for when there is room for it.

        Raises:
            ConfigError: If a machine has not the directories.
            KeyboardInterrupt: After a signal, when all jobs have ended.
            WorkerError: If jobs are left, and no worker is.
        """
        n_workers = self._place.num_workers(self._n_jobs)
        makers = [partial(JobWorker, self._folders)] * n_workers
        names = [f"place {i} of jobs" for i in range(n_workers)]
        pool = self._place.pool(Crew(makers, names, CALLS))
        try:
            self._run(pool, iter(jobs))
        except BaseException:
            self._end(pool)
            raise
        finally:
            pool.close()

    def _run(self, pool: WorkerPool, waiting: Iterator[ProcessJob]) -> None:
        workers = range(len(pool))
        for index in workers:
            pool.call(index, "begin")
        free: list[int] = []
        is_last = False
        while self._running or not is_last:
            while free and not is_last:
                job = next(waiting, None)
                if job is None:
                    is_last = True
                else:
                    self._start(pool, free.pop(0), job)
            if not (is_last or any(map(pool.pending, workers))):
                raise WorkerError("all places of jobs are lost, and jobs are left")
            free += [index for index in pool.ready(POLL_S) if self._take_in(pool, index)]

    def _start(self, pool: WorkerPool, index: int, job: ProcessJob) -> None:
        say(f"{PROGRAM}: {job.record.title}")
        pool.call(index, "run", Portable(job, "hydra/launcher"))
        self._running[index] = StartedJob(job)

    def _take_in(self, pool: WorkerPool, index: int) -> bool:
        """Record the start of a worker, or the outcome of its job; return whether it is free."""
        started = self._running.pop(index, None)
        lost: WorkerFailedError | None = None
        try:
            record = pool.receive(index)
        except WorkerFailedError as failure:
            lost = failure.with_traceback(None)
        if started is not None:
            self._note(started, replace(started.job.record, error=lost.text) if lost else record)
        if lost is None:
            return True
        if started is not None:
            pool.restart(lost, lost.text, "for jobs that wait")
            pool.call(index, "begin")
        elif lost.error is not None:
            raise lost.error
        else:  # Nothing has room for it.
            notify(f"note: {lost.text}; jobs run elsewhere")
            pool.stop(index)
        return False

    def _note(self, started: StartedJob, record: JobRecord) -> None:
        started.result = record
        self._ended(started)

    def _end(self, pool: WorkerPool) -> None:
        """Let the jobs end; the last signal kills them."""
        for times in count(2):
            try:
                for index in self._running if len(pool) else ():
                    pool.cancel(index)
                while self._running and len(pool):
                    for index in pool.ready(POLL_S):
                        self._take_in(pool, index)
                break
            except KeyboardInterrupt:
                if times == MOST_SIGNALS:
                    break
        for started in self._running.values():
            self._note(started, replace(started.job.record, error="killed"))
