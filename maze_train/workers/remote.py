"""Base of workers that live elsewhere: time-outs, and restarts within a budget."""

from __future__ import annotations

import atexit
import os
import weakref
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from maze_train.core.checks import check_at_least, check_one_of, check_positive
from maze_train.core.errors import WorkerError
from maze_train.core.notices import warn
from maze_train.workers.pool import WorkerFailedError, WorkerPool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

    from maze_train.workers.pool import MakeWorker


@dataclass(frozen=True)
class RemotePlace:
    """Settings of workers that live elsewhere, and of a place for them.

    Raises:
        ConfigError: If a setting is out of its range.
    """

    n_workers: int = 0
    """Number of workers, >= 0; 0: one per core."""

    timeout_s: float = 300.0
    """Seconds without a sign of life after which a worker that has something to do counts as hung,
    > 0."""

    on_worker_failure: str = "fail"
    """`fail` or `restart`."""

    max_worker_restarts: int = 10
    """Most times that workers are started again, >= 0."""

    def __post_init__(self) -> None:
        check_at_least("n_workers", self.n_workers, 0)
        check_positive("timeout_s", self.timeout_s)
        check_one_of("on_worker_failure", self.on_worker_failure, ("fail", "restart"))
        check_at_least("max_worker_restarts", self.max_worker_restarts, 0)

    def num_workers(self, at_most: int) -> int:
        """Return one per core or the configured number, at most `at_most`."""
        return min(self.n_workers or self._num_cores(), at_most)

    def _num_cores(self) -> int:
        return available_cores()

    @abstractmethod
    def pool(
        self, make_workers: Sequence[MakeWorker], names: Sequence[str], calls: Mapping[str, str]
    ) -> WorkerPool:
        """A pool of workers, see `Place`."""

    @property
    def has_own_gpus(self) -> bool:
        """Whether each worker has a GPU that no one else has, on whatever machine."""
        return False

    def for_learners(self) -> Self:
        """This place."""
        return self


def available_cores() -> int:
    """Number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class RemotePool(WorkerPool):
    """Workers that live elsewhere, which may be started again within a budget.

    Args:
        make_workers: Makes the workers, one function each; sent to where they live.
        names: Names of the workers in messages.
        calls: Names of calls in messages, by method.
        place: Settings.
    """

    def __init__(
        self,
        make_workers: Sequence[MakeWorker],
        names: Sequence[str],
        calls: Mapping[str, str],
        place: RemotePlace,
    ) -> None:
        self.timeout_s = place.timeout_s
        self.may_restart = place.on_worker_failure == "restart"
        self.max_worker_restarts = place.max_worker_restarts
        self._make_workers, self._names, self._calls = list(make_workers), list(names), calls
        # Before multiprocessing waits for its children, which do not end by its SIGTERM.
        self._at_exit = partial(_close_at_exit, weakref.ref(self), os.getpid())
        atexit.register(self._at_exit)

    def close(self) -> None:
        """Note that nothing is left to close."""
        atexit.unregister(self._at_exit)

    @abstractmethod
    def _start(self, index: int) -> None:
        """Start a worker in the place of one that was stopped."""

    def restart(self, failure: WorkerFailedError, told: str, outlook: str) -> None:
        """Start a worker again, or close the pool."""
        try:
            self._check_restart(failure, told)
            self.restarts += 1
            warn(
                f"{told}; it is started again (restart {self.restarts} of at most "
                f"{self.max_worker_restarts}), {outlook}{failure.appendix}"
            )
            self.stop(failure.index)
            self._start(failure.index)
        except BaseException:
            self.close()
            raise

    def _check_restart(self, failure: WorkerFailedError, told: str) -> None:
        spent = self.restarts >= self.max_worker_restarts
        if self.may_restart and not failure.final and not spent:
            return
        if failure.error is not None:
            raise failure.error
        limit = f"max_worker_restarts = {self.max_worker_restarts}"
        reason = limit if self.may_restart else "on_worker_failure = fail"
        raise WorkerError(
            f"{told} (workers were restarted {self.restarts} times; {reason}){failure.appendix}"
        )


def _close_at_exit(reference: weakref.ref[RemotePool], pid: int) -> None:
    """Close a pool that is still there when its process ends."""
    pool = reference()
    if pool is not None and os.getpid() == pid:
        pool.close()
