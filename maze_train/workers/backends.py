"""Backends of workers, and the setup of new worker processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from maze_train.core.checks import check_at_least, check_one_of, check_positive
from maze_train.core.errors import ConfigError
from maze_train.core.names import SIGNALS
from maze_train.workers.pool import InlinePool, WorkerPool, WorkerSpecs

if TYPE_CHECKING:
    from typing import Self


PROCESS_NAME = "maze-env"
"""Prefix of process names."""


@contextmanager
def signals_later() -> Iterator[None]:
    """Block `SIGNALS` in this thread until the block ends; new processes inherit the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


GUARD = 'A script that starts processes needs the guard `if __name__ == "__main__":`'


def refuse_import() -> None:
    """Exit if a new worker process re-runs a main script that has no `__main__` guard.

    Raises:
        SystemExit: In a process that is importing the script of its parent.
    """
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):  # Attribute set by multiprocessing.
        raise SystemExit(1 if process.name.startswith(PROCESS_NAME) else GUARD)


def limit_threads() -> None:
    """Limit PyTorch and OpenCV to one thread per process, because there is one process per core.

    After a fork, this also avoids a deadlock: a fork copies PyTorch's thread pool without the
    threads, and the first large operation would wait for these threads forever.
    """
    torch, cv2 = sys.modules.get("torch"), sys.modules.get("cv2")
    if torch is not None:
        torch.set_num_threads(1)
    if cv2 is not None:
        cv2.setNumThreads(1)


class WorkerBackend(ABC):
    """Backend that runs workers."""

    @property
    def may_restart(self) -> bool:
        """Whether a failed worker may be restarted."""
        return False

    @property
    def forks(self) -> bool:
        """Whether workers are forks of this process."""
        return False

    def num_workers(self, at_most: int) -> int:
        """Return the number of workers for `at_most` units of work, in [1, at_most]."""
        return 1

    @abstractmethod
    def pool(self, specs: WorkerSpecs) -> WorkerPool:
        """Create a pool of workers. The caller closes it."""

    def for_learners(self) -> RemoteBackend | None:
        """Return the backend for additional learners; None selects processes on this machine."""
        return None


class ThisProcess(WorkerBackend):
    """Backend with a single worker in the calling process."""

    def pool(self, specs: WorkerSpecs) -> WorkerPool:
        """Create a pool with a worker in this process."""
        return InlinePool(specs.make_workers)


@dataclass(frozen=True)
class RemoteBackend(WorkerBackend):
    """Settings of a backend with workers in other processes.

    Raises:
        ConfigError: If a setting is out of range.
    """

    n_workers: int = 0
    """Number of workers (>= 0); 0 selects one per core."""

    timeout_s: float = 300.0
    """Time in seconds without progress after which a busy worker is considered hung; > 0."""

    on_worker_failure: str = "fail"
    """Reaction to the failure of a worker: `fail` or `restart`."""

    max_worker_restarts: int = 10
    """Maximum number of worker restarts (>= 0)."""

    def __post_init__(self) -> None:
        check_at_least("n_workers", self.n_workers, 0)
        check_positive("timeout_s", self.timeout_s)
        check_one_of("on_worker_failure", self.on_worker_failure, ("fail", "restart"))
        check_at_least("max_worker_restarts", self.max_worker_restarts, 0)

    def num_workers(self, at_most: int) -> int:
        """Return the configured number of workers, or one per core, limited to `at_most`."""
        return min(self.n_workers or self._num_cores(), at_most)

    def _num_cores(self) -> int:
        return available_cores()

    @property
    def may_restart(self) -> bool:
        """Whether a failed worker may be restarted."""
        return self.on_worker_failure == "restart"

    @property
    def has_own_gpus(self) -> bool:
        """Whether each worker has exclusive use of a GPU."""
        return False

    def for_learners(self) -> Self:
        """Return this backend."""
        return self


def available_cores() -> int:
    """Return the number of CPU cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


T = TypeVar("T", covariant=True)


class Pickled(Generic[T]):
    """Wrapper that pickles a value with cloudpickle, which supports lambdas and local classes.

    Args:
        value: The value.
        key: Setting with the value, for the error message.
        remedy: Remedy for values that cannot be pickled, for the error message.
    """

    def __init__(self, value: T, key: str, remedy: str = "use runner=dev") -> None:
        self.value, self.key, self._remedy = value, key, remedy

    def __reduce__(self) -> tuple[Any, ...]:
        import cloudpickle  # Only worker processes and their parents need cloudpickle.

        try:
            content = cloudpickle.dumps(self.value)
        except Exception as error:
            raise ConfigError(
                self.key,
                f"cannot be sent to a worker process ({error}): create such objects within "
                f"the function, or {self._remedy}",
            ) from error
        return _unpacked, (content, self.key)


def _unpacked(content: bytes, key: str) -> Pickled[Any]:
    return Pickled(pickle.loads(content), key)
