"""Places where workers can live, and what new processes need before anything else."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from maze_train.core.checks import check_at_least, check_one_of, check_positive
from maze_train.core.errors import ConfigError
from maze_train.workers.pool import Crew, InlinePool, WorkerPool

if TYPE_CHECKING:
    from typing import Self


PROCESS_NAME = "maze-env"
"""Prefix of the names of processes."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that reach all processes of a job: Ctrl+C, a closed terminal, and those of a cluster that
wants it to end. The parent decides what to do about them; it may want to save first."""

GUARD = 'A script that starts processes needs the guard `if __name__ == "__main__":`'


def refuse_import() -> None:
    """End a new process that runs a script which should only be imported; its parent reports it.

    Raises:
        SystemExit: In a process that is about to begin, and imports the script of its parent.
    """
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):  # as multiprocessing itself finds out
        raise SystemExit(1 if process.name.startswith(PROCESS_NAME) else GUARD)


def limit_threads() -> None:
    """Use one thread of PyTorch and OpenCV per process: the processes use the cores.

    After a fork it also keeps the process from hanging: a fork copies the thread pool of PyTorch
    but not its threads, and the first large operation would wait for them forever.
    """
    torch, cv2 = sys.modules.get("torch"), sys.modules.get("cv2")
    if torch is not None:
        torch.set_num_threads(1)
    if cv2 is not None:
        cv2.setNumThreads(1)


class Place(ABC):
    """Somewhere workers can live."""

    @property
    def may_restart(self) -> bool:
        """Whether a worker that fails may be started again."""
        return False

    def num_workers(self, at_most: int) -> int:
        """Return the number of workers for a task of `at_most` equal parts, in [1, at_most]."""
        return 1

    @abstractmethod
    def pool(self, crew: Crew) -> WorkerPool:
        """Return a pool of workers, which the caller closes."""

    def for_learners(self) -> RemotePlace | None:
        """Return the place for learners after the first one; None: processes of this machine."""
        return None


class ThisProcess(Place):
    """The calling process, with a single worker."""

    def pool(self, crew: Crew) -> WorkerPool:
        """Return a pool of workers in this process."""
        return InlinePool(crew.make_workers)


@dataclass(frozen=True)
class RemotePlace(Place):
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

    @property
    def may_restart(self) -> bool:
        """Whether a worker that fails may be started again."""
        return self.on_worker_failure == "restart"

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


T = TypeVar("T", covariant=True)


class Portable(Generic[T]):
    """Something that may have to go to another process; lambdas and local classes are fine.

    Args:
        value: The value.
        key: Name of the setting that it comes from, for the message if it cannot be sent.
    """

    def __init__(self, value: T, key: str) -> None:
        self.value, self.key = value, key

    def __reduce__(self) -> tuple[Any, ...]:
        import cloudpickle  # Imported here, since only worker processes and their parents need it.

        try:
            content = cloudpickle.dumps(self.value)
        except Exception as error:
            raise ConfigError(
                self.key,
                f"cannot be sent to a worker process ({error}): create what cannot be sent "
                "within the function, or use runner=dev",
            ) from error
        return _unpacked, (content, self.key)


def _unpacked(content: bytes, key: str) -> Portable[Any]:
    return Portable(pickle.loads(content), key)
