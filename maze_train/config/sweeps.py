"""Jobs of sweeps and searches in parallel processes, and the table `jobs.csv`.

A job has the same process group, signals and end as a separate `maze-run`. Its output goes to a
file; this process reports when it begins.
"""

from __future__ import annotations

import csv
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import StringIO
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import ClassVar

from maze_train.config.options import PROGRAM
from maze_train.core.errors import RunDirectoryError
from maze_train.core.files import atomic_write, open_own, read_regular
from maze_train.core.folders import make_folders
from maze_train.core.names import JOBS
from maze_train.core.notices import notify, say
from maze_train.core.text import csv_text, duration, readable
from maze_train.training.outcome import SIGNALS
from maze_train.workers.places import Portable, available_cores

COLUMNS = ("job", "settings", "run_dir", "objective", "error")


@dataclass(frozen=True)
class JobRecord:
    """One job that ended."""

    number: int
    """Number of the job in its sweep; 0 without one."""

    settings: str
    """The choices of the user, as on the command line."""

    run_dir: str
    """Directory of the results; there may be none after a failure."""

    sweep_dir: str = ""
    """Directory of the sweep; empty without a sweep."""

    objective: float = math.nan
    """Value that a sweeper optimises; NaN after a failure."""

    error: str = ""
    """Message of a failure; empty: there was none."""

    code: int = 0
    """Exit code."""

    word: ClassVar[str] = "job"

    @property
    def name(self) -> str:
        """Word and number of the job."""
        return f"{self.word} {self.number}"

    @property
    def title(self) -> str:
        """Line with which the job begins."""
        return f"{self.name}: {self.settings}"

    @property
    def label(self) -> str:
        """Name of the job for people, with its settings."""
        return f"{self.name} ({self.settings})"


def write_jobs(sweep_dir: Path, records: Iterable[JobRecord]) -> None:
    """Write the jobs so far; directories within that of the sweep are relative to it.

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
        file.write(csv_text(rows, COLUMNS, nan="").encode())


def read_jobs(sweep_dir: Path) -> list[JobRecord]:
    """The jobs of a sweep with absolute directories; none if there is no such file.

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
"""Signal for jobs whose owner has failed, or is gone."""

PARENT_CHECK_S = 1.0
"""Seconds between two checks of a job that the process of its owner lives."""


@dataclass(frozen=True)
class ProcessJob:
    """A job that waits for its process."""

    record: JobRecord
    """The job as it would be recorded if its process said nothing."""

    log: Path
    """File for all that it prints."""

    work: Callable[[], JobRecord | None]
    """Called in its process; gives its record; None if it has not finished."""


@dataclass
class StartedJob:
    """A job that is under way, or has ended."""

    job: ProcessJob
    started_at: float = field(default_factory=time.monotonic, init=False)

    result: JobRecord | None = field(default=None, init=False)
    """Its record, if there is one: of a process, what it sent before its end."""

    @property
    def outcome(self) -> JobRecord:
        """The record of the job, which has ended."""
        assert self.result is not None
        return self.result

    @property
    def log(self) -> Path:
        """File with its output."""
        return self.job.log

    @property
    def seconds(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self.started_at


@dataclass
class RunningJob(StartedJob):
    """A job in a process of this machine."""

    slot: int
    process: BaseProcess
    conn: Connection

    @property
    def outcome(self) -> JobRecord:
        """The record of the job, whose process has ended."""
        return self.result or _lost(self.job.record, self.process.exitcode or 0)


class JobProcesses:
    """Runs up to `n_jobs` jobs at a time; the others wait.

    Args:
        ended: Called with each job that ended.
        n_jobs: Jobs at a time; 0: one per core.
        gpus: GPUs of which the jobs see one each in turn.
        start_method: `fork`, where this process has neither threads nor CUDA; else `spawn`.
        beat: Called once a second; what it raises ends the jobs.
    """

    def __init__(
        self,
        ended: Callable[[RunningJob], None],
        n_jobs: int = 0,
        gpus: Sequence[int] = (),
        start_method: str = "fork",
        beat: Callable[[], object] = lambda: None,
    ) -> None:
        self._ended, self._start_method, self._beat = ended, start_method, beat
        self._n_jobs = n_jobs or available_cores()
        self._gpus = list(gpus)
        self.is_ending = False
        """Whether the jobs are asked to end."""

    def run(self, jobs: Iterable[ProcessJob]) -> None:
        """Run jobs, each of which is asked for when there is room for it.

        Raises:
            KeyboardInterrupt: After a signal, when all jobs have ended.
        """
        free = deque(range(self._n_jobs))
        waiting = iter(jobs)
        running: dict[Connection, RunningJob] = {}
        try:
            while True:
                while free and (job := next(waiting, None)) is not None:
                    with _signals_later():
                        started = self._start(job, free.popleft())
                        running[started.conn] = started
                if not running:
                    return
                free.extend(job.slot for job in self._collect(running))
                self._beat()
        except BaseException as error:
            is_signal = isinstance(error, KeyboardInterrupt)
            self._end(running, getattr(error, "number", signal.SIGINT if is_signal else STOP))
            raise

    def _start(self, job: ProcessJob, slot: int) -> RunningJob:
        """Start the process of a job."""
        say(f"{PROGRAM}: {job.record.title}")
        sys.stderr.flush()  # What is in a buffer now, the child would write once more.
        receiver, sender = multiprocessing.Pipe(duplex=False)
        gpu = self._gpus[slot % len(self._gpus)] if self._gpus else None
        process: BaseProcess = multiprocessing.get_context(self._start_method).Process(  # type: ignore[attr-defined]  # BaseContext lacks it
            target=work_in_process,
            args=(Portable(job, "hydra/launcher"), gpu, os.getpid(), sender),
            name=f"{PROGRAM} {job.record.name}",
        )
        process.start()
        sender.close()
        return RunningJob(job, slot, process, receiver)

    def _collect(self, running: dict[Connection, RunningJob]) -> list[RunningJob]:
        """Wait for the end of a job, for a while, and record the outcomes of those that ended.

        Not longer: a signal that another thread got would be noticed after it only.
        """
        jobs = [
            running[conn]
            for conn in wait(list(running), PARENT_CHECK_S)
            if isinstance(conn, Connection)
        ]
        for job in jobs:
            with _signals_later():
                if job.result is None:
                    job.result = _received(job.conn)
            job.process.join()  # A signal still finds it, should it hang at its end.
            with _signals_later():
                job.conn.close()
                del running[job.conn]
                self._ended(job)
        return jobs

    def _end(self, running: dict[Connection, RunningJob], number: int) -> None:
        """Hand a signal on each time it comes, kill the third time; wait for the jobs."""
        self.is_ending = True
        for times in count():
            try:
                with _signals_later():  # Each job hears of it before the next one is handed on.
                    for job in running.values():
                        _signal(job, number if times < 2 else signal.SIGKILL)
                while running:
                    self._collect(running)
                return
            except KeyboardInterrupt:
                continue


def work_in_process(
    sent: Portable[ProcessJob], gpu: int | None, parent: int, sender: Connection
) -> None:
    """Do the work of a job in its process, and send its record.

    Args:
        sent: The job.
        gpu: The only GPU that it sees; None: all of them.
        parent: Process of the owner, without which it ends.
        sender: End of a pipe to the owner.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.setsid()  # Ctrl-C of the terminal reaches the owner, which hands it on once.
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    job = sent.value
    make_folders(job.log.parent)
    # Line by line, so that it can be followed; what is continued has lines already.
    log = open_own(job.log, os.O_WRONLY | os.O_APPEND)
    sys.stdout = sys.stderr = os.fdopen(log, "a", encoding="utf-8", buffering=1)
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    try:
        record = job.work()
    except KeyboardInterrupt as stop:
        sys.exit(128 + getattr(stop, "number", signal.SIGINT))
    if record is not None:
        sender.send(record)


@contextmanager
def _signals_later() -> Iterator[None]:
    """Within this block no signal comes between a job and its place in the books."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _follow(parent: int) -> None:
    """End this process when that of the owner is gone; a run saves a checkpoint."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os.kill(os.getpid(), STOP)


def _signal(job: RunningJob, number: int) -> None:
    pid = job.process.pid
    assert pid is not None
    try:
        if number == signal.SIGKILL:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except ProcessLookupError:  # It ended by itself.
        pass


def _received(conn: Connection) -> JobRecord | None:
    """The record of a job; None if its process ended without one."""
    try:
        record: JobRecord = conn.recv()
    except EOFError:
        return None
    return record


def _lost(record: JobRecord, code: int) -> JobRecord:
    """The record of a job whose process ended without one."""
    number = -code if code < 0 else code - 128
    if number in signal.valid_signals():
        reason = f"ended by {signal.Signals(number).name}"
    else:
        reason = f"its process ended with exit code {code}"
    return replace(record, error=reason)


def tell_end(job: StartedJob) -> None:
    """Print what became of a job."""
    record, took = job.outcome, duration(job.seconds)
    if record.error:
        notify(f"{PROGRAM}: error: {record.label}: {record.error}\n  its output: {job.log}")
    else:
        best = f", best {readable(record.objective)}" if math.isfinite(record.objective) else ""
        say(f"{PROGRAM}: job {record.number}: done in {took}{best}")
