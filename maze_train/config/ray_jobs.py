"""Parallel jobs on a cluster: workers on the machines of the cluster start one process per job."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial

from maze_train.config.sweeps import POLL_S, JobPool, JobRecord, LocalJobs, ProcessJob, StartedJob
from maze_train.core.errors import ConfigError, WorkerError
from maze_train.core.notices import notify
from maze_train.workers.backends import Pickled, WorkerBackend
from maze_train.workers.pool import (
    CallCancelledError,
    Worker,
    WorkerContext,
    WorkerFailedError,
    WorkerPool,
    WorkerSpecs,
)

CALLS = {"begin": "its start", "run": "a job"}
"""Descriptions of worker calls for messages."""


class JobWorker(Worker):
    """Runs jobs sequentially on one machine, each in a separate process.

    Args:
        folders: Directories required by the jobs.
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

    def run(self, job: Pickled[ProcessJob]) -> JobRecord:
        """Run a job and return its record; if cancelled, signal the job and wait for it to end."""
        ended: list[StartedJob] = []
        pool = LocalJobs(ended.append, 1, start_method="spawn", beat=self._context.count)
        with suppress(CallCancelledError):
            pool.run([job.value])
        return ended[0].outcome


class WorkerJobs(JobPool[StartedJob]):
    """Runs jobs on the workers of a backend, one job per worker at a time.

    If a worker dies, its job fails and the worker is restarted. If the restart fails, the other
    workers run the remaining jobs. `run` raises a ConfigError if a directory is missing on a
    machine, and a WorkerError if all workers are lost before all jobs have run.

    Args:
        ended: Called with each job that ended.
        backend: Backend of the workers; must allow restarts.
        n_jobs: Maximum number of parallel jobs.
        folders: Directories required by the jobs.
    """

    def __init__(
        self,
        ended: Callable[[StartedJob], None],
        backend: WorkerBackend,
        n_jobs: int,
        folders: Sequence[str],
    ) -> None:
        super().__init__(ended)
        self._backend, self._n_jobs, self._folders = backend, n_jobs, folders
        self._is_killed = False
        self._pool: WorkerPool

    @contextmanager
    def _slots(self) -> Iterator[None]:
        n_workers = self._backend.num_workers(self._n_jobs)
        makers = [partial(JobWorker, self._folders)] * n_workers
        names = [f"job worker {i}" for i in range(n_workers)]
        self._pool = self._backend.pool(WorkerSpecs(makers, names, CALLS))
        with closing(self._pool):
            for index in range(n_workers):
                self._pool.call(index, "begin")
            yield

    def _start(self, slot: int, job: ProcessJob) -> StartedJob:
        self._pool.call(slot, "run", Pickled(job, "hydra/launcher"))
        return StartedJob(job)

    def _collect(self) -> None:
        if self._is_killed:
            for slot, started in [*self._running.items()]:
                self._finish(slot, replace(started.job.record, error="killed"))
            return
        if not any(map(self._pool.pending, range(len(self._pool)))):
            raise WorkerError("all job workers are lost, but not all jobs have run")
        for slot in self._pool.ready(POLL_S):
            self._take_in(slot)

    def _take_in(self, slot: int) -> None:
        """Process the reply of a worker, which has started or finished a job."""
        started = self._running.get(slot)
        try:
            record = self._pool.receive(slot)
        except WorkerFailedError as failure:
            lost = failure.with_traceback(None)
        else:
            self._free.append(slot)
            if started is not None:
                self._finish(slot, record)
            return
        if started is not None:
            self._finish(slot, replace(started.job.record, error=lost.text))
            self._pool.restart(lost, lost.text, "for jobs that wait")
            self._pool.call(slot, "begin")
        elif lost.error is not None:
            raise lost.error
        else:  # The cluster lacks resources for this worker.
            notify(f"note: {lost.text}; the other workers run its jobs")
            self._pool.stop(slot)

    def _signal(self, number: int) -> None:
        self._is_killed = number == signal.SIGKILL or not len(self._pool)
        for slot in () if self._is_killed else self._running:
            self._pool.cancel(slot)
