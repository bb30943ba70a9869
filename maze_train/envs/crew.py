"""Processes that work for this one, and are started again where they fail."""

from __future__ import annotations

import atexit
import os
import select
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from maze_train.envs.faults import warn
from maze_train.envs.worker import QUIT
from maze_train.envs.workers import (
    WorkerFailedError,
    close_at_exit,
    failure_error,
    start_worker,
    stop_workers,
)
from maze_train.errors import WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from maze_train.envs.workers import Worker

__all__ = ["Crew", "Movement"]


class SupportsClose(Protocol):
    """What can be closed, more than once."""

    def close(self) -> None:
        """Close it."""


class Crew:
    """Worker processes, each with a pipe to it, that end with this process.

    A process that raises, dies or hangs ends what it works for with an error. With
    `on_worker_failure="restart"` it is told on stderr and started again.

    Args:
        target: What the processes run, see `start_worker`.
        make_task: Called with the number of the first environment of a process: what that is to do
            first.
        envs: The environments of each process.
        kind: What a process is called in messages.
        owner: What the crew works for: closed, so that it closes the crew, when this process ends
            or a process that failed is not started again. It is not kept alive. None: the crew.
        start_method: `forkserver`, `spawn` or `fork`.
        timeout_s: Seconds without a sign of life after which a process counts as hung, > 0.
        on_worker_failure: `fail` or `restart`.
        max_worker_restarts: How many times processes are started again at most, >= 0.

    Attributes:
        workers: The processes; empty after `close`.
        restarts: How many times processes were started again.

    Raises:
        OSError: If a process can not be started.
    """

    def __init__(
        self,
        target: Callable[..., None],
        make_task: Callable[[int], object],
        envs: Sequence[range],
        *,
        kind: str,
        owner: SupportsClose | None = None,
        start_method: str = "forkserver",
        timeout_s: float = 300.0,
        on_worker_failure: str = "fail",
        max_worker_restarts: int = 10,
    ) -> None:
        self.timeout_s = timeout_s
        self.on_worker_failure = on_worker_failure
        self.max_worker_restarts = max_worker_restarts
        self.restarts = 0
        self.workers: list[Worker] = []
        self._target, self._make_task, self._envs = target, make_task, list(envs)
        self._kind, self._start_method = kind, start_method
        self._poller = select.poll()
        self._owner: weakref.ref[SupportsClose] = weakref.ref(self if owner is None else owner)
        # Before multiprocessing waits for its children, which do not end by its SIGTERM.
        self._at_exit = partial(close_at_exit, self._owner, os.getpid())
        atexit.register(self._at_exit)
        try:
            for i in range(len(self._envs)):
                self.workers.append(self._start(i))
        except BaseException:
            self.close()
            raise

    @property
    def _running(self) -> list[Worker]:
        """Those that were not ended."""
        return [worker for worker in self.workers if not worker.conn.closed]

    def _start(self, index: int) -> Worker:
        worker = start_worker(
            self._target,
            self._make_task(self._envs[index].start),
            index,
            self._envs[index],
            others=self._running,
            start_method=self._start_method,
            kind=self._kind,
        )
        self._poller.register(worker.descriptor, select.POLLIN)
        return worker

    def first_replies(self, what: str) -> list[Any]:
        """What each process says first.

        Args:
            what: What it does before, for messages.

        Raises:
            MazeTrainError: If a process fails; none is started again that never worked.
        """
        try:
            return [worker.receive(what, self.timeout_s) for worker in self.workers]
        except WorkerFailedError as failure:
            raise failure.error or WorkerError(failure.text + failure.appendix) from None

    def ready(self, timeout_ms: int) -> list[int]:
        """The processes that have something to say, by number.

        Args:
            timeout_ms: How long to wait for the first of them.

        Raises:
            WorkerError: If the crew is closed.
        """
        if not self.workers:
            raise WorkerError(f"these {self._kind}s are closed: build new ones")
        by_descriptor = {worker.descriptor: worker.index for worker in self._running}
        return [by_descriptor[descriptor] for descriptor, _ in self._poller.poll(timeout_ms)]

    def stop(self, index: int) -> None:
        """End a process, which nobody listens to any more; calling it again does nothing."""
        worker = self.workers[index]
        if not worker.conn.closed:
            # Another file may get the number of the descriptor once it is closed.
            self._poller.unregister(worker.descriptor)
            stop_workers([worker], QUIT)

    def replace(self, index: int, failure: WorkerFailedError, told: str, outlook: str) -> Worker:
        """End a process that failed and start it again, or close the owner.

        Args:
            index: Which process; it may have been ended by `stop`.
            failure: The failure.
            told: What happened.
            outlook: What becomes of its work, for the warning.

        Returns:
            The new process.

        Raises:
            MazeTrainError: If it is not to be started again.
            OSError: If it can not be started.
        """
        try:
            self._check_restart(failure, told)
            self.restarts += 1
            warn(
                f"{told}; it is started again (restart {self.restarts} of at most "
                f"{self.max_worker_restarts}), {outlook}{failure.appendix}"
            )
            self.stop(index)
            self.workers[index] = self._start(index)
        except BaseException:
            (self._owner() or self).close()
            raise
        return self.workers[index]

    def _check_restart(self, failure: WorkerFailedError, told: str) -> None:
        spent = self.restarts >= self.max_worker_restarts
        if self.on_worker_failure == "fail" or failure.final or spent:
            raise failure_error(
                failure,
                told,
                restarts=self.restarts,
                max_worker_restarts=self.max_worker_restarts,
                on_worker_failure=self.on_worker_failure,
            )

    def close(self) -> None:
        """End the processes; calling it again does nothing."""
        atexit.unregister(self._at_exit)
        running, self.workers = self._running, []
        for worker in running:
            self._poller.unregister(worker.descriptor)
        stop_workers(running, QUIT)


class Movement:
    """How long a process has not been seen to move, by the steps that it counts."""

    def __init__(self) -> None:
        self._steps = 0
        self._since = time.monotonic()

    def expect(self) -> None:
        """Begin to wait: it was not expected to move before."""
        self._since = time.monotonic()

    def still_s(self, steps: int, *, has_work: bool) -> float:
        """Seconds since it moved; 0 while it has nothing to do.

        Args:
            steps: How many steps it made.
            has_work: Whether it is expected to move.
        """
        now = time.monotonic()
        if steps != self._steps or not has_work:
            self._steps, self._since = steps, now
        return now - self._since
