"""Base of workers that live elsewhere: time-outs, and restarts within a budget."""

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
from maze_train.workers.places import RemotePlace
from maze_train.workers.pool import CLOSED, Crew, WorkerFailedError, WorkerPool

BUILDING = "building its environments"
"""Name of the start of a worker in messages, unless the names of calls have another one."""

CLOSE_GRACE_S = 5.0
"""Seconds that workers may take to close before they are killed."""


class RemoteWorker(ABC):
    """A worker that lives elsewhere, seen from its pool.

    Args:
        name: Name of the worker in messages.
        index: Its number.

    Attributes:
        pending: Calls whose results were not received.
        since: When it was last seen to move, or got something to do.
    """

    def __init__(self, name: str, index: int) -> None:
        self.name, self.index = name, index
        self.pending: deque[Any] = deque()
        self.since = time.monotonic()

    @abstractmethod
    def cancel(self) -> None:
        """Cancel the calls that were sent."""

    @abstractmethod
    def kill(self) -> None:
        """Kill it without waiting for its end."""

    def hung(self, what: str, timeout_s: float) -> WorkerFailedError:
        """Kill the worker, which did not finish something in time; returns what happened."""
        self.kill()
        return WorkerFailedError(
            self.index,
            f"{self.name} hangs: it did not finish {what} within timeout_s = {timeout_s:g} "
            "seconds, and was killed",
        )


Remote = TypeVar("Remote", bound=RemoteWorker)


class RemotePool(WorkerPool, Generic[Remote]):
    """Workers that live elsewhere, which may be started again within a budget.

    Args:
        crew: The workers.
        place: Settings.
    """

    def __init__(self, crew: Crew, place: RemotePlace) -> None:
        self.timeout_s = place.timeout_s
        self.may_restart = place.may_restart
        self.max_worker_restarts = place.max_worker_restarts
        self._crew = crew
        self._remote: list[Remote] = []
        self._entropy = global_entropy()
        # Before multiprocessing waits for its children, which do not end by its SIGTERM.
        self._at_exit = partial(_close_at_exit, weakref.ref(self), os.getpid())
        atexit.register(self._at_exit)

    def close(self) -> None:
        """Note that nothing is left to close."""
        atexit.unregister(self._at_exit)

    def __len__(self) -> int:
        return len(self._remote)

    def _start_all(self) -> None:
        """Start the workers, or none of them."""
        try:
            for index in range(len(self._crew.make_workers)):
                self._remote.append(self._started(index))
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _started(self, index: int) -> Remote:
        """A worker that was just started."""

    def _check_open(self) -> None:
        if not self._remote:
            raise WorkerError(CLOSED)

    def pending(self, index: int) -> int:
        """Number of calls without a received result."""
        return len(self._remote[index].pending)

    def cancel(self, index: int) -> None:
        """Make a worker end the calls that it was sent."""
        self._remote[index].cancel()

    def restart(self, failure: WorkerFailedError, description: str, outlook: str) -> None:
        """Start a worker again, or close the pool."""
        try:
            self._check_restart(failure, description)
            self.restarts += 1
            warn(
                f"{description}; it is started again (restart {self.restarts} of at most "
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
    """Close a pool that is still there when its process ends."""
    pool = reference()
    if pool is not None and os.getpid() == pid:
        pool.close()
