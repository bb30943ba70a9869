"""Parallel jobs on a cluster: workers on its machines start one process per job."""

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
"""Descriptions of worker calls for messages."""

POLL_S = 1.0
"""Maximum wait for results in seconds; bounds the delay until a signal is handled."""

MOST_SIGNALS = 3
"""Number of signals after which the jobs are killed."""


class JobWorker(Worker):
    """Runs jobs sequentially on its machine, each in a separate process.

    Args:
        folders: Directories that the jobs need.
        context: Context of the worker.
    """

    def __init__(self, folders: Sequence[str], context: WorkerContext) -> None:
        self._folders, self._context = folders, context

    def begin(self) -> None:
        """Check that the directories exist on this machine.

        Raises:
            ConfigError: If a directory is missing.
        """
        for folder in self._folders:
            if not os.path.isdir(folder):
                raise ConfigError(
                    "hydra/launcher",
                    f"the machine {socket.gethostname()} has no folder {folder}; all machines must "
                    "share the sweep directory (hydra.sweep.dir) and the working directory, at the "
                    "same paths",
                    "ray",
                )

    def run(self, job: Portable[ProcessJob]) -> JobRecord:
        """Run a job and return its record; if cancelled, signal the job and wait for its end."""
        ended: list[StartedJob] = []
        beat = self._context.count
        processes = JobProcesses(ended.append, 1, start_method="spawn", beat=beat)
        with suppress(CallCancelledError):
            processes.run([job.value])
        return ended[0].outcome


class JobPool:
    """Runs jobs on the workers of a backend, one job per worker at a time.

    If a worker is lost, its job fails and the worker is restarted. If it cannot be restarted, the
    remaining workers run the remaining jobs.

    Args:
        ended: Called with each job that ended.
        place: Backend that the workers run on; must allow restarts.
        n_jobs: Maximum number of parallel jobs.
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
        """Run jobs; each one is taken from `jobs` when a worker is free.

        Raises:
            ConfigError: If a machine lacks one of the directories.
            KeyboardInterrupt: After a signal, once all jobs have ended.
            WorkerError: If all workers are lost before all jobs have run.
        """
        n_workers = self._place.num_workers(self._n_jobs)
        makers = [partial(JobWorker, self._folders)] * n_workers
        names = [f"job worker {i}" for i in range(n_workers)]
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
                raise WorkerError("all job workers are lost, but not all jobs have run")
            free += [index for index in pool.ready(POLL_S) if self._take_in(pool, index)]

    def _start(self, pool: WorkerPool, index: int, job: ProcessJob) -> None:
        say(f"{PROGRAM}: {job.record.title}")
        pool.call(index, "run", Portable(job, "hydra/launcher"))
        self._running[index] = StartedJob(job)

    def _take_in(self, pool: WorkerPool, index: int) -> bool:
        """Process the reply of a worker (started, or job done); return whether it is free."""
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
        else:  # The cluster has no resources for this worker.
            notify(f"note: {lost.text}; the other workers run its jobs")
            pool.stop(index)
        return False

    def _note(self, started: StartedJob, record: JobRecord) -> None:
        started.result = record
        self._ended(started)

    def _end(self, pool: WorkerPool) -> None:
        """Cancel the running jobs and wait for them; kill them after repeated signals."""
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
