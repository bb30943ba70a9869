"""Processes that work for this one, and are started again where they fail."""

from __future__ import annotations

import atexit
import os
import select
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from maze_train.envs.worker import QUIT
from maze_train.envs.workers import (
    WorkerFailedError,
    close_at_exit,
    failure_error,
    start_worker,
    stop_workers,
    warn,
)
from maze_train.errors import WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from maze_train.envs.workers import Worker

__all__ = ["Crew"]


class Crew:
    """Worker processes, each with a pipe to it, that end with this process.

    A process that raises, dies or hangs ends what it works for with an error. With
    `on_worker_failure="restart"` it is told on stderr and started again.

    Args:
        target: What the processes run, see `start_worker`.
        task: What each of them is to do first.
        envs: The environments of each process.
        kind: What a process is called in messages.
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
        task: object,
        envs: Sequence[range],
        *,
        kind: str,
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
        self._target, self._task, self._envs = target, task, list(envs)
        self._kind, self._start_method = kind, start_method
        self._poller = select.poll()
        # Before multiprocessing waits for its children, which do not end by its SIGTERM.
        self._at_exit = partial(close_at_exit, weakref.ref(self), os.getpid())
        atexit.register(self._at_exit)
        try:
            for i in range(len(self._envs)):
                self.workers.append(self._start(i))
        except BaseException:
            self.close()
            raise

    def _start(self, index: int) -> Worker:
        worker = start_worker(
            self._target,
            self._task,
            index,
            self._envs[index],
            others=[other for other in self.workers if other.index != index],
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
        """
        by_descriptor = {worker.descriptor: i for i, worker in enumerate(self.workers)}
        return [by_descriptor[descriptor] for descriptor, _ in self._poller.poll(timeout_ms)]

    def replace(self, index: int, failure: WorkerFailedError, told: str, outlook: str) -> None:
        """End a process that failed and start it again, or close the crew.

        Args:
            index: Which process.
            failure: The failure.
            told: What happened.
            outlook: What becomes of its work, for the warning.

        Raises:
            MazeTrainError: If it is not to be started again.
        """
        spent = self.restarts >= self.max_worker_restarts
        if self.on_worker_failure == "fail" or failure.final or spent:
            self.close()
            raise failure_error(
                failure,
                told,
                restarts=self.restarts,
                max_worker_restarts=self.max_worker_restarts,
                on_worker_failure=self.on_worker_failure,
            )
        self.restarts += 1
        warn(
            f"{told}; it is started again (restart {self.restarts} of at most "
            f"{self.max_worker_restarts}), {outlook}{failure.appendix}"
        )
        self._poller.unregister(self.workers[index].descriptor)
        stop_workers([self.workers[index]], QUIT)
        self.workers[index] = self._start(index)

    def close(self) -> None:
        """End the processes; calling it again does nothing."""
        atexit.unregister(self._at_exit)
        workers, self.workers = self.workers, []
        stop_workers(workers, QUIT)
