"""Worker processes as their parent sees them: start, send, receive, end."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import select
import signal
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import resource_tracker
from multiprocessing.reduction import send_handle
from typing import TYPE_CHECKING, Any

from maze_train.envs.buffers import open_shared
from maze_train.envs.building import pickled
from maze_train.envs.worker import (
    ALIVE,
    DONE,
    FAILED,
    GUARD,
    PROCESS_NAME,
    SIGNALS,
    WorkerTask,
    refuse_import,
    worker_main,
)
from maze_train.errors import SpaceError, WorkerError
from maze_train.files import claim_temporary, process_runs

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from maze_train.errors import MazeTrainError

__all__ = [
    "Worker",
    "WorkerFailedError",
    "WorkerStarter",
    "available_cores",
    "check_spaces",
    "close_at_exit",
    "failure_error",
    "start_worker",
    "stop_workers",
]

LOST_EXIT_CODE = 255
"""What multiprocessing takes for the exit code of a process whose fork server is gone."""

CLOSE_GRACE_S = 5.0
"""How long workers may take to close their environments before they are killed."""


class WorkerFailedError(Exception):
    """A worker raised, died or hung; never leaves what it works for.

    Args:
        worker: Which one.
        text: What happened, in one line.
        trace: Traceback of what the environment raised.
        error: The error of the configuration that it is.
        final: Whether starting the worker again is no remedy.
        names_seed: Whether the text names the seed of the episode.
    """

    def __init__(
        self,
        worker: Worker,
        text: str,
        trace: str = "",
        error: MazeTrainError | None = None,
        *,
        final: bool = False,
        names_seed: bool = False,
    ) -> None:
        super().__init__(text)
        self.worker, self.text, self.trace = worker, text, trace
        self.error, self.final, self.names_seed = error, final, names_seed

    @property
    def appendix(self) -> str:
        """What to append to a message: the traceback of the environment, if it raised."""
        return f"\n\nIn the worker process:\n{self.trace}" if self.trace else ""


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker process, seen from its parent."""

    index: int
    first: int
    stop: int
    process: BaseProcess
    conn: Connection
    descriptor: int
    poller: select.poll
    kind: str = "worker"

    def __str__(self) -> str:
        return f"{self.kind} {self.index} (environments {self.first} to {self.stop - 1})"

    @property
    def envs(self) -> range:
        """Its environments."""
        return range(self.first, self.stop)

    def send(self, command: bytes, content: bytes = b"") -> None:
        """Send a command, and what belongs to it."""
        # A broken pipe is no news here: the reader finds it, after what the worker had to say
        # before it ended.
        with suppress(BrokenPipeError, ConnectionResetError):
            os.write(self.descriptor, command)
            if content:
                self.conn.send_bytes(content)

    def hand_over(self, command: bytes, content: bytes) -> None:
        """Send a command, and in a file without a name what belongs to it.

        However much it is, this does not wait for a worker that hangs.
        """
        self.send(command)
        descriptor = open_shared(0)
        with open(descriptor, "wb") as file, suppress(BrokenPipeError, ConnectionResetError):
            file.write(content)
            file.flush()
            send_handle(self.conn, descriptor, self.process.pid)

    def receive(self, what: str, timeout_s: float, deadline: float | None = None) -> Any:
        """Wait for the reply; returns its content, None without.

        Args:
            what: What the worker does, for messages.
            timeout_s: Seconds without a sign of life after which it counts as hung.
            deadline: When the first of these seconds end; None: from now on.

        Raises:
            WorkerFailedError: If the worker raised, died or hangs; in the latter case it is killed.
        """
        if deadline is None:
            deadline = time.monotonic() + timeout_s
        try:
            while True:
                if not self.poller.poll(max(0.0, deadline - time.monotonic()) * 1000.0):
                    raise self.hung(what, timeout_s)
                kind = os.read(self.descriptor, 1)
                if kind == DONE:
                    return None
                if kind != ALIVE:
                    break
                deadline = time.monotonic() + timeout_s
            content = pickle.loads(self.conn.recv_bytes())
        except (EOFError, OSError):
            kind = b""
        if not kind:
            raise self._died(what)
        if kind == FAILED:
            text, trace, error, final = content
            raise WorkerFailedError(
                self, f"{self}: {text}", trace, error, final=final, names_seed=True
            )
        return content

    def wait(self, deadline: float) -> None:
        """Wait until the process ended, at most until `deadline`."""
        self.process.join(max(0.0, deadline - time.monotonic()))
        while self._lost_sight() and time.monotonic() < deadline:
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        if self._lost_sight():
            with suppress(ProcessLookupError):
                os.kill(self.process.pid or 0, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process and give back what belongs to it."""
        self.conn.close()
        self.kill()
        self.process.join()
        self.process.close()

    def _lost_sight(self) -> bool:
        """Whether the process runs, although multiprocessing holds that it ended.

        That is so when the fork server is gone from which it comes, and which tells of its end.
        """
        lost = self.process.exitcode == LOST_EXIT_CODE
        return lost and self.process.pid is not None and process_runs(self.process.pid)

    def _died(self, what: str) -> WorkerFailedError:
        self.wait(time.monotonic() + CLOSE_GRACE_S)
        code = self.process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                how += "; was memory exhausted?"
        hint = f". {GUARD}" if what.startswith("building") and code == 1 else ""
        self.kill()
        return WorkerFailedError(self, f"{self} died in {what} ({how}){hint}")

    def hung(self, what: str, timeout_s: float) -> WorkerFailedError:
        """Kill the process, which did not finish something in time; returns what happened."""
        self.kill()
        return WorkerFailedError(
            self,
            f"{self} hangs: it did not finish {what} within timeout_s = {timeout_s:g} "
            "seconds, and was killed",
        )


class WorkerStarter:
    """Starts the workers of a vector environment, each one as often as it is asked to.

    Args:
        factories: Functions that build the environments.
        count: Number of workers, at most one per environment.
        start_method: `forkserver`, `spawn` or `fork`.
        step_infos: Whether workers report the infos of every step.
        on_non_finite: What they do about numbers that are not finite.
    """

    def __init__(
        self,
        factories: Sequence[Callable[[], Any]],
        count: int,
        start_method: str,
        step_infos: bool,
        on_non_finite: str,
    ) -> None:
        self._start_method = start_method
        n = len(factories)
        bounds = [n * i // count for i in range(count + 1)]
        self._tasks = [
            WorkerTask(
                pickled(list(factories[first:stop]), "env"),
                first,
                n,
                step_infos,
                on_non_finite,
                os.getpid(),
            )
            for first, stop in pairwise(bounds)
        ]
        self._stops = bounds[1:]

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, index: int, others: Sequence[Worker]) -> Worker:
        """Start a worker; its first reply describes its environments.

        Args:
            index: Which worker.
            others: Those that run.
        """
        task, stop = self._tasks[index], self._stops[index]
        return start_worker(
            worker_main,
            task,
            index,
            range(task.first, stop),
            others=others,
            start_method=self._start_method,
        )


def start_worker(
    target: Callable[[Connection, Sequence[Connection], Any], None],
    task: object,
    index: int,
    envs: range,
    *,
    others: Sequence[Worker],
    start_method: str,
    kind: str = "worker",
) -> Worker:
    """Start a process with a pipe to it.

    Args:
        target: What it runs: called with its end of the pipe, with ends that a fork copied and that
            it has to close, and with the task.
        task: What it is to do.
        index: Its number.
        envs: Its environments.
        others: Workers that run.
        start_method: `forkserver`, `spawn` or `fork`.
        kind: What it is called in messages.
    """
    refuse_import()
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        claim_temporary()
    ours, theirs = context.Pipe()
    inherited = [worker.conn for worker in others] + [ours] if start_method == "fork" else []
    process = context.Process(  # type: ignore[attr-defined]  # BaseContext lacks it
        target=target,
        args=(theirs, inherited, task),
        name=f"{PROCESS_NAME}-{kind}-{index}",
        daemon=True,
    )
    with signals_held_back(start_method):
        process.start()
    theirs.close()
    poller = select.poll()
    poller.register(ours.fileno(), select.POLLIN)
    return Worker(index, envs.start, envs.stop, process, ours, ours.fileno(), poller, kind)


@contextmanager
def signals_held_back(start_method: str) -> Iterator[None]:
    """Hold back the signals that workers survive, while one is started that is not ready for them.

    A new process inherits the mask, and a worker lifts it. The resource tracker, which other start
    methods than `fork` need, keeps it. Not so a fork server: every process that anybody starts from
    it would keep the mask as well.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        if start_method != "fork":
            resource_tracker.ensure_running()  # It lifts the mask on the way.
        mask = before if start_method == "forkserver" else before | set(SIGNALS)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop_workers(workers: list[Worker], quit_command: bytes) -> None:
    """Let workers close their environments and end; kill those that take too long."""
    for worker in workers:
        worker.send(quit_command)
        # Frees a worker that is blocked on sending us something.
        worker.conn.close()
    deadline = time.monotonic() + CLOSE_GRACE_S
    for worker in workers:
        worker.wait(deadline)
    for worker in workers:
        worker.end()
    workers.clear()


def failure_error(
    failure: WorkerFailedError,
    told: str,
    *,
    restarts: int,
    max_worker_restarts: int,
    on_worker_failure: str,
) -> MazeTrainError:
    """The error that a failure is, when no worker is started again for it.

    Args:
        failure: The failure.
        told: What happened.
        restarts: How many times workers were started again.
        max_worker_restarts: How many times they may be.
        on_worker_failure: `fail` or `restart`.
    """
    if failure.error is not None:
        return failure.error
    limit = f"max_worker_restarts = {max_worker_restarts}"
    reason = limit if on_worker_failure == "restart" else "on_worker_failure = fail"
    return WorkerError(
        f"{told} (workers were restarted {restarts} times; {reason}){failure.appendix}"
    )


def check_spaces(worker: Worker, spaces: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    """Refuse environments whose spaces differ from those of environment 0."""
    if spaces != expected:
        raise SpaceError(
            f"the spaces of environment {worker.first} are {spaces[0]} and {spaces[1]}, those of "
            f"environment 0 are {expected[0]} and {expected[1]}: all environments must have equal "
            "spaces"
        )


def close_at_exit(reference: weakref.ref[Any], pid: int) -> None:
    """Close a vector environment that is still there when its process ends."""
    vector = reference()
    if vector is not None and os.getpid() == pid:
        vector.close()


def available_cores() -> int:
    """Number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
