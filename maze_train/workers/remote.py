"""Base classes of remote workers and pools: timeouts and a limited number of restarts."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from functools import partial
from typing import Any, Generic, TypeVar

from maze_train.core.errors import WorkerError
from maze_train.core.notices import warn
from maze_train.core.seeding import global_entropy
from maze_train.workers.backends import RemoteBackend
from maze_train.workers.pool import CLOSED, WorkerFailedError, WorkerPool, WorkerSpecs

BUILDING = "building its environments"
"""Default description of the creation of a worker, for messages."""

CLOSE_GRACE_S = 5.0
"""Time in seconds for workers to close before they are killed."""


class RemoteWorker(ABC):
    """Handle of a worker that runs outside this process.

    Args:
        name: Name of the worker in messages.
        index: Index of the worker.

    Attributes:
        pending: Calls whose results have not been received.
        since: Time of the last progress or of the first pending call.
    """

    def __init__(self, name: str, index: int) -> None:
        self.name, self.index = name, index
        self.pending: deque[Any] = deque()
        self.since = time.monotonic()

    @abstractmethod
    def cancel(self) -> None:
        """Cancel all calls sent so far."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the worker without waiting for it to exit."""

    def hung(self, what: str, timeout_s: float) -> WorkerFailedError:
        """Kill the hung worker, and return the failure."""
        self.kill()
        return WorkerFailedError(
            self.index,
            f"{self.name} hangs: it did not finish {what} within timeout_s = {timeout_s:g} "
            "seconds, and was killed",
        )


Remote = TypeVar("Remote", bound=RemoteWorker)


class RemotePool(WorkerPool, Generic[Remote]):
    """Pool of remote workers with a limited number of restarts.

    Args:
        specs: Factories and names of the workers.
        backend: Settings of the workers.
    """

    def __init__(self, specs: WorkerSpecs, backend: RemoteBackend) -> None:
        self.timeout_s = backend.timeout_s
        self.may_restart = backend.may_restart
        self.max_worker_restarts = backend.max_worker_restarts
        self._specs = specs
        self._remote: list[Remote] = []
        self._entropy = global_entropy()
        # The handler runs before multiprocessing joins its children, because these ignore SIGTERM.
        self._at_exit = partial(_close_at_exit, weakref.ref(self), os.getpid())
        atexit.register(self._at_exit)

    def close(self) -> None:
        """Unregister the exit handler; subclasses stop the workers."""
        atexit.unregister(self._at_exit)

    def __len__(self) -> int:
        return len(self._remote)

    def _start_all(self) -> None:
        """Start all workers; if one fails, close the pool."""
        try:
            for index in range(len(self._specs.make_workers)):
                self._remote.append(self._started(index))
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _started(self, index: int) -> Remote:
        """Start a worker and return its handle."""

    def _check_open(self) -> None:
        if not self._remote:
            raise WorkerError(CLOSED)

    def pending(self, index: int) -> int:
        """Return the number of calls whose results have not been received."""
        return len(self._remote[index].pending)

    def cancel(self, index: int) -> None:
        """Cancel the pending calls of a worker."""
        self._remote[index].cancel()

    def restart(self, failure: WorkerFailedError, description: str, outlook: str) -> None:
        """Restart a worker, or close the pool."""
        try:
            self._check_restart(failure, description)
            self.restarts += 1
            warn(
                f"{description}; it is restarted (restart {self.restarts} of at most "
                f"{self.max_worker_restarts}), {outlook}{failure.appendix}"
            )
            self.stop(failure.index)
            self._remote[failure.index] = self._started(failure.index)
        except BaseException:
            self.close()
            raise

    def _check_restart(self, failure: WorkerFailedError, description: str) -> None:
        spent = self.restarts >= self.max_worker_restarts
        if self.may_restart and not failure.final and not spent:
            return
        if failure.error is not None:
            raise failure.error
        limit = f"max_worker_restarts = {self.max_worker_restarts}"
        reason = limit if self.may_restart else "on_worker_failure = fail"
        raise WorkerError(
            f"{description} (workers were restarted {self.restarts} times; {reason})"
            f"{failure.appendix}"
        )


def _close_at_exit(reference: weakref.ref[RemotePool[Any]], pid: int) -> None:
    """Close a pool that is still open when its process exits."""
    pool = reference()
    if pool is not None and os.getpid() == pid:
        pool.close()
