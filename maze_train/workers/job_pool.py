"""Parallel job processes for sweeps and searches, here and on a cluster, and the table `jobs.csv`.

Each job runs in a separate session, so it handles signals and exits like a separate `maze-run`. The
output of a job is written to a file; this process only reports the start and the end of jobs. On a
cluster, workers start one process per job.
"""

from __future__ import annotations

import csv
import math
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from io import StringIO
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from maze_train.core.errors import ConfigError, RunDirectoryError, WorkerError
from maze_train.core.files import atomic_write, open_own, read_regular
from maze_train.core.folders import make_folders
from maze_train.core.names import JOBS, PROGRAM, SIGNALS
from maze_train.core.notices import HEARTBEAT_S, notify, say
from maze_train.core.report import csv_text
from maze_train.core.signals import signal_of
from maze_train.core.text import duration, readable
from maze_train.workers.backends import Pickled, WorkerBackend, available_cores, signals_later
from maze_train.workers.pool import (
    CallCancelledError,
    Worker,
    WorkerContext,
    WorkerFailedError,
    WorkerPool,
    WorkerSpecs,
)

COLUMNS = ("job", "settings", "run_dir", "objective", "error")


@dataclass(frozen=True)
class JobRecord:
    """Outcome of a job that has ended."""

    number: int
    """Index of the job in its sweep; 0 outside a sweep."""

    settings: str
    """The user's overrides, as on the command line."""

    run_dir: str
    """Output directory of the job; might not exist after a failure."""

    sweep_dir: str = ""
    """Directory of the sweep; empty outside a sweep."""

    objective: float = math.nan
    """Objective value for the sweeper; NaN after a failure."""

    error: str = ""
    """Error message; empty if the job succeeded."""

    code: int = 0
    """Exit code."""

    word: ClassVar[str] = "job"

    @property
    def name(self) -> str:
        """Short name, such as `job 3`."""
        return f"{self.word} {self.number}"

    @property
    def title(self) -> str:
        """Line printed when the job starts."""
        return f"{self.name}: {self.settings}"

    @property
    def label(self) -> str:
        """Name of the job with its settings, for messages."""
        return f"{self.name} ({self.settings})"


def write_jobs(sweep_dir: Path, records: Iterable[JobRecord]) -> None:
    """Write `jobs.csv`. Run directories inside the sweep directory are stored as relative paths.

    Raises:
        OSError: If the file cannot be written.
    """
    rows = []
    for record in sorted(records, key=lambda record: record.number):
        run_dir, objective = record.run_dir, float(record.objective)
        if Path(run_dir).is_relative_to(sweep_dir):
            run_dir = os.path.relpath(run_dir, sweep_dir)
        values = (record.number, record.settings, run_dir, objective, record.error)
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    with atomic_write(sweep_dir / JOBS) as file:
        file.write(csv_text(rows, COLUMNS).encode())


def read_jobs(sweep_dir: Path) -> list[JobRecord]:
    """Read `jobs.csv` with absolute run directories; an empty list if the file does not exist.

    Raises:
        RunDirectoryError: If the file is damaged.
    """
    path = sweep_dir / JOBS
    if not path.exists():
        return []
    try:
        lines = list(csv.reader(StringIO(read_regular(path).decode())))
        return [
            JobRecord(
                int(number),
                settings,
                str(sweep_dir / run_dir),
                objective=float(objective or "nan"),
                error=error,
            )
            for number, settings, run_dir, objective, error in lines[1:]
        ]
    except (OSError, ValueError, csv.Error) as error:
        raise RunDirectoryError(f"{path} is damaged: {error}") from error


LOG_FILE = "job.log"

STOP = signal.SIGTERM
"""Signal that a job sends to itself if the parent process dies."""

POLL_S = 1.0
"""Maximum time in seconds to wait for jobs, and interval of the check for a dead parent."""


@dataclass(frozen=True)
class ProcessJob:
    """A job to run in a separate process."""

    record: JobRecord
    """Default record, used if the process ends without sending a record."""

    log: Path
    """File for the output of the job."""

    work: Callable[[], JobRecord | None]
    """Function that runs the job in its process and returns the record; None if the job did not
    finish."""


@dataclass
class StartedJob:
    """A job that is running or has ended."""

    job: ProcessJob
    started_at: float = field(default_factory=time.monotonic, init=False)

    result: JobRecord | None = field(default=None, init=False)
    """Record sent by the job; None if no record was received."""

    @property
    def outcome(self) -> JobRecord:
        """Record of the job, available after the job has ended."""
        assert self.result is not None
        return self.result

    @property
    def log(self) -> Path:
        """File with the output of the job."""
        return self.job.log

    @property
    def seconds(self) -> float:
        """Seconds since the job started."""
        return time.monotonic() - self.started_at


Started = TypeVar("Started", bound=StartedJob)


class JobPool(ABC, Generic[Started]):
    """Runs jobs in parallel, one per slot.

    Args:
        ended: Called with each job that ended.

    Attributes:
        is_ending: Whether the jobs have been signalled to stop.
    """

    def __init__(self, ended: Callable[[StartedJob], None]) -> None:
        self._ended = ended
        self._free: deque[int] = deque()
        self._running: dict[int, Started] = {}
        self.is_ending = False
        self._told_at = 0.0

    def run(self, jobs: Iterable[ProcessJob]) -> None:
        """Run jobs; the next job is taken from `jobs` when a slot is free.

        Raises:
            KeyboardInterrupt: If a signal was received. Raised once all jobs have ended.
        """
        waiting, is_last = iter(jobs), False
        self._told_at = time.monotonic()
        with self._slots():
            try:
                while self._running or not is_last:
                    while self._free and not is_last:
                        if (job := next(waiting, None)) is None:
                            is_last = True
                        else:
                            say(f"{PROGRAM}: {job.record.title}")
                            self._told_at = time.monotonic()
                            with signals_later():
                                slot = self._free.popleft()
                                self._running[slot] = self._start(slot, job)
                    if self._running or not is_last:
                        self._collect()
                        self._tell()
            except BaseException as error:
                self._end(signal_of(error))
                raise

    def _tell(self) -> None:
        """Outside a terminal, report that jobs are running if nothing was printed for a while."""
        is_silent = time.monotonic() - self._told_at >= HEARTBEAT_S
        if self._running and is_silent and not sys.stdout.isatty():
            longest = duration(max(job.seconds for job in self._running.values()))
            say(f"{PROGRAM}: {len(self._running)} running, the longest for {longest}")
            self._told_at = time.monotonic()

    def _end(self, number: int) -> None:
        """Forward a signal to the jobs and wait for them to end; a third signal kills them."""
        self.is_ending = True
        for times in count():
            try:
                with signals_later():  # Signal every job before handling the next signal.
                    self._signal(number if times < 2 else signal.SIGKILL)
                while self._running:
                    self._collect()
                return
            except KeyboardInterrupt:
                continue

    def _finish(self, slot: int, record: JobRecord | None) -> None:
        """Report the end of the job in a slot; `record` is None if no record was received."""
        job = self._running.pop(slot)
        job.result = record
        self._told_at = time.monotonic()
        self._ended(job)

    @abstractmethod
    def _slots(self) -> AbstractContextManager[None]:
        """Return a context manager that provides free slots."""

    @abstractmethod
    def _start(self, slot: int, job: ProcessJob) -> Started:
        """Start a job in a slot."""

    @abstractmethod
    def _collect(self) -> None:
        """Wait up to `POLL_S` for jobs to end, finish these jobs and free their slots.

        The timeout bounds the delay until a signal received by a different thread is handled.
        """

    @abstractmethod
    def _signal(self, number: int) -> None:
        """Send a signal to all jobs; SIGKILL ends the jobs immediately."""


@dataclass
class ProcessOfJob(StartedJob):
    """A job in a process on this machine."""

    process: BaseProcess
    conn: Connection

    @property
    def outcome(self) -> JobRecord:
        """Record of the job, available after its process has ended."""
        return self.result or _lost(self.job.record, self.process.exitcode or 0)


class LocalJobs(JobPool[ProcessOfJob]):
    """Runs each job in a process on this machine.

    Args:
        ended: Called with each job that ended.
        n_jobs: Maximum number of parallel jobs; 0: one per core.
        gpus: GPU indices assigned to jobs round-robin, one per job; empty: all GPUs are visible.
        start_method: `fork` requires a process without threads and CUDA; otherwise use `spawn`.
        beat: Called once per second; an exception in this function stops all jobs.

    Raises:
        ConfigError: If the platform does not support the processes.
    """

    def __init__(
        self,
        ended: Callable[[StartedJob], None],
        n_jobs: int = 0,
        gpus: Sequence[int] = (),
        start_method: str = "fork",
        beat: Callable[[], object] = lambda: None,
    ) -> None:
        if not hasattr(signal, "pthread_sigmask"):
            problem = "jobs in other processes require Linux or macOS; for sweeps, use basic"
            raise ConfigError("hydra/launcher", problem)
        super().__init__(ended)
        self._free.extend(range(n_jobs or available_cores()))
        self._gpus, self._start_method, self._beat = list(gpus), start_method, beat

    def _slots(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _start(self, slot: int, job: ProcessJob) -> ProcessOfJob:
        sys.stderr.flush()  # A forked child would write the buffered text again.
        receiver, sender = multiprocessing.Pipe(duplex=False)
        gpu = self._gpus[slot % len(self._gpus)] if self._gpus else None
        process: BaseProcess = multiprocessing.get_context(self._start_method).Process(  # type: ignore[attr-defined]  # BaseContext lacks it
            target=work_in_process,
            args=(Pickled(job, "hydra/launcher"), gpu, os.getpid(), sender),
            name=f"{PROGRAM} {job.record.name}",
        )
        process.start()
        sender.close()
        return ProcessOfJob(job, process, receiver)

    def _collect(self) -> None:
        slots = {job.conn: slot for slot, job in self._running.items()}
        for conn in wait(list(slots), POLL_S):
            assert isinstance(conn, Connection)
            slot = slots[conn]
            job = self._running[slot]
            with signals_later():
                job.result = job.result or _received(conn)
            job.process.join()  # Still in `_running`: signals reach a process that hangs on exit.
            with signals_later():
                conn.close()
                self._free.append(slot)
                self._finish(slot, job.result)
        if not self.is_ending:
            self._beat()

    def _signal(self, number: int) -> None:
        for job in self._running.values():
            pid = job.process.pid
            assert pid is not None
            with suppress(ProcessLookupError):  # The process has already ended.
                (os.killpg if number == signal.SIGKILL else os.kill)(pid, number)


def work_in_process(
    sent: Pickled[ProcessJob], gpu: int | None, parent: int, sender: Connection
) -> None:
    """Run a job in its process and send its record to the parent.

    Args:
        sent: The job.
        gpu: Index of the GPU that is visible to the job; None: all GPUs.
        parent: Process id of the parent; the job stops if the parent dies.
        sender: Connection to the parent.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.setsid()  # Ctrl-C only reaches the parent, which forwards the signal once.
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    job = sent.value
    make_folders(job.log.parent)
    # Line-buffered for `tail -f`; appended, because a resumed job already has a log.
    log = open_own(job.log, os.O_WRONLY | os.O_APPEND)
    sys.stdout = sys.stderr = os.fdopen(log, "a", encoding="utf-8", buffering=1)
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    try:
        record = job.work()
    except KeyboardInterrupt as stop:
        sys.exit(128 + signal_of(stop))
    if record is not None:
        sender.send(record)


def _follow(parent: int) -> None:
    """Send `END` to this process if the parent dies, so that a run saves a checkpoint."""
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os.kill(os.getpid(), STOP)


def _received(conn: Connection) -> JobRecord | None:
    """Receive the record of a job; None if its process ended without sending a record."""
    try:
        record: JobRecord = conn.recv()
    except EOFError:
        return None
    return record


def _lost(record: JobRecord, code: int) -> JobRecord:
    """Return the record of a job whose process ended without sending a record."""
    number = -code if code < 0 else code - 128
    if number in signal.valid_signals():
        reason = f"ended by {signal.Signals(number).name}"
    else:
        reason = f"its process ended with exit code {code}"
    return replace(record, error=reason)


def tell_failure(job: StartedJob) -> None:
    """Print the error of a failed job."""
    record = job.outcome
    notify(f"{PROGRAM}: error: {record.label}: {record.error}\n  its output: {job.log}")


def tell_end(job: StartedJob) -> None:
    """Print the outcome of a job."""
    record, took = job.outcome, duration(job.seconds)
    if record.error:
        tell_failure(job)
    else:
        has_value = math.isfinite(record.objective)
        value = f", objective {readable(record.objective)}" if has_value else ""
        say(f"{PROGRAM}: job {record.number}: done in {took}{value}")


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
