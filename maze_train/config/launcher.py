"""Hydra launcher that runs the jobs of a sweep in parallel, each in a process of its own.

A job has the process group, the signals and the end of a `maze-run` of its own. What it prints goes
to `job.log` in its directory; this process tells when it begins and how it ends.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf, open_dict

from maze_train.checks import check_at_least
from maze_train.config.sweep_jobs import JobRecord
from maze_train.errors import TrainingError
from maze_train.notices import tell
from maze_train.tracking.formatting import duration, readable
from maze_train.training.outcome import SIGNALS
from maze_train.workers.remote import available_cores

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.context import ForkProcess

    from hydra.types import HydraContext, TaskFunction


LOG_FILE = "job.log"
PROGRAM = "maze-run"
FAILURE = 1
LAUNCHER = "hydra_plugins.maze_train.LocalLauncher"
"""Name of the launcher for Hydra, which takes plug-ins from this namespace only."""

STOP = signal.SIGTERM
"""Signal for jobs whose sweep has failed, or is gone."""

PARENT_CHECK_S = 1.0
"""Seconds between two checks of a job that the process of the sweep lives."""


@dataclass
class LocalLauncherConf:
    """Settings of the launcher, `hydra.launcher.<name>`."""

    _target_: str = LAUNCHER

    n_jobs: int = 0
    """Jobs at a time; 0: one per core. >= 0."""

    gpus: list[int] = field(default_factory=list)
    """GPUs of which the jobs see one each in turn (CUDA_VISIBLE_DEVICES); none: all of them."""


def stops_at_failures(hydra_settings: Any) -> bool:
    """Whether the sweeper has to know of a failure: some count them, Hydra's own stops."""
    sweeper = str(OmegaConf.select(hydra_settings, "sweeper._target_"))
    return not sweeper.endswith(".BasicSweeper")


@dataclass
class _Running:
    """A job that is under way."""

    record: JobRecord
    """The job as it would be recorded if its process said nothing."""

    slot: int
    log: Path
    process: ForkProcess
    conn: Connection
    started_at: float

    result: JobRecord | None = None
    """What its process sent before its end."""


class LocalLauncher(Launcher):
    """Runs up to `n_jobs` jobs at a time; the others wait.

    Args:
        n_jobs: Jobs at a time; 0: one per core.
        gpus: GPUs of which the jobs see one each in turn.
    """

    def __init__(self, n_jobs: int = 0, gpus: Sequence[int] = ()) -> None:
        self._n_jobs = n_jobs
        self._gpus = list(gpus)
        self._config = DictConfig({})
        self._context: HydraContext | None = None
        self._task: Any = None
        self._pid = os.getpid()

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what jobs are made from."""
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run jobs, and return what became of them in their order.

        Raises:
            ConfigError: If a setting of the launcher is wrong.
            KeyboardInterrupt: After a signal, when all jobs have ended.
        """
        check_at_least("hydra.launcher.n_jobs", self._n_jobs, 0)
        setup_globals()
        Path(str(self._config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        free = deque(range(self._n_jobs or available_cores()))
        waiting = deque(enumerate(job_overrides, initial_job_idx))
        running: dict[Connection, _Running] = {}
        ended: dict[int, JobReturn] = {}
        try:
            while waiting or running:
                while waiting and free:
                    with _signals_later():
                        job = self._start(*waiting.popleft(), free.popleft())
                        running[job.conn] = job
                for job in self._collect(running, ended):
                    free.append(job.slot)
        except BaseException as error:
            is_signal = isinstance(error, KeyboardInterrupt)
            self._end(running, getattr(error, "number", signal.SIGINT if is_signal else STOP))
            raise
        return [ended[number] for number in sorted(ended)]

    # -- jobs ------------------------------------------------------------------------------------

    def _start(self, number: int, overrides: Sequence[str], slot: int) -> _Running:
        """Start the process of a job."""
        assert self._context is not None
        config = self._context.config_loader.load_sweep_config(self._config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        HydraConfig.instance().set_config(config)  # The name of its directory refers to the job.
        settings = " ".join(word.lstrip("+") for word in filter_overrides(overrides))
        directory = Path(str(config.hydra.sweep.dir), str(config.hydra.sweep.subdir)).absolute()
        log = directory / LOG_FILE
        sweep_dir = os.path.abspath(str(config.hydra.sweep.dir))
        record = JobRecord(number, settings, str(directory), sweep_dir, code=FAILURE)
        print(f"{PROGRAM}: {record.title}", flush=True)
        sys.stderr.flush()  # What is in a buffer now, the child would write once more.
        receiver, sender = multiprocessing.Pipe(duplex=False)
        # Forked before it has threads or CUDA: this process composes configurations and waits.
        process = multiprocessing.get_context("fork").Process(
            target=self._run, args=(config, log, slot, sender), name=f"{PROGRAM} job {number}"
        )
        process.start()
        sender.close()
        return _Running(record, slot, log, process, receiver, time.monotonic())

    def _run(self, config: DictConfig, log: Path, slot: int, sender: Connection) -> None:
        """Run a job in its process, and send its record."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.setsid()  # Ctrl-C of the terminal reaches the sweep, which hands it on once.
        threading.Thread(target=_follow, args=(self._pid,), daemon=True).start()
        log.parent.mkdir(parents=True, exist_ok=True)
        # Line by line, so that it can be followed.
        sys.stdout = sys.stderr = log.open("w", encoding="utf-8", buffering=1)
        for descriptor in (1, 2):
            os.dup2(sys.stdout.fileno(), descriptor)
        if self._gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = str(self._gpus[slot % len(self._gpus)])
        assert self._context is not None
        before = len(self._task.records)
        try:
            run_job(
                hydra_context=self._context,
                task_function=self._task,
                config=config,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )
        except KeyboardInterrupt as stop:
            sys.exit(128 + getattr(stop, "number", signal.SIGINT))
        finally:
            if len(self._task.records) > before:
                sender.send(self._task.records[-1])

    def _collect(
        self, running: dict[Connection, _Running], ended: dict[int, JobReturn]
    ) -> list[_Running]:
        """Wait for the end of a job, for a while, and take in what became of those that ended.

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
                record = job.result or _lost(job.record, job.process.exitcode or 0)
                job.conn.close()
                del running[job.conn]
                self._task.note(record)
                _tell_end(record, job)
                ended[record.number] = self._returned(record)
        return jobs

    def _returned(self, record: JobRecord) -> JobReturn:
        """A job as Hydra's sweepers know it; Hydra's own would stop at a failure."""
        is_failure = bool(record.error) and stops_at_failures(self._config.hydra)
        return JobReturn(
            overrides=record.settings.split(),
            status=JobStatus.FAILED if is_failure else JobStatus.COMPLETED,
            _return_value=TrainingError(record.error) if is_failure else record.objective,
        )

    def _end(self, running: dict[Connection, _Running], number: int) -> None:
        """Hand a signal on each time it comes, kill the third time; wait for the jobs."""
        for times in count():
            try:
                with _signals_later():  # Each job hears of it before the next one is handed on.
                    for job in running.values():
                        _signal(job, number if times < 2 else signal.SIGKILL)
                while running:
                    self._collect(running, {})
                return
            except KeyboardInterrupt:
                continue


@contextmanager
def _signals_later() -> Iterator[None]:
    """Within this block no signal comes between a job and its place in the books."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _follow(parent: int) -> None:
    """End this process when that of the sweep is gone; a run saves a checkpoint."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os.kill(os.getpid(), STOP)


def _signal(job: _Running, number: int) -> None:
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


def _tell_end(record: JobRecord, job: _Running) -> None:
    took = duration(time.monotonic() - job.started_at)
    if record.error:
        tell(f"{PROGRAM}: error: {record.label}: {record.error}\n  its output: {job.log}")
    else:
        best = f", best {readable(record.objective)}" if math.isfinite(record.objective) else ""
        print(f"{PROGRAM}: job {record.number}: done in {took}{best}", flush=True)
