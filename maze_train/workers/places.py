"""Places where workers can live: each gives pools of them."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from maze_train.checks import check_at_least, check_one_of, check_positive
from maze_train.errors import ConfigError
from maze_train.targets import locate
from maze_train.workers.pool import InlinePool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from maze_train.workers.pool import MakeWorker, WorkerPool


START_METHODS = ("forkserver", "spawn", "fork")

PROCESS_POOL = "maze_train.workers.process_pool.ProcessPool"
"""Found when it is asked for, since runs in one process need no processes."""


class Place(Protocol):
    """Somewhere workers can live."""

    def num_workers(self, at_most: int) -> int:
        """Number of workers that share a task of so many equal parts, in [1, at_most]."""
        ...

    def pool(
        self, make_workers: Sequence[MakeWorker], names: Sequence[str], calls: Mapping[str, str]
    ) -> WorkerPool:
        """A pool of workers; the caller closes it.

        Args:
            make_workers: Makes the workers, one function each.
            names: Names of the workers in messages.
            calls: Names of calls in messages, by method.
        """
        ...


class ThisProcess:
    """The calling process, with a single worker."""

    def num_workers(self, at_most: int) -> int:
        """One."""
        return 1

    def pool(
        self, make_workers: Sequence[MakeWorker], names: Sequence[str], calls: Mapping[str, str]
    ) -> WorkerPool:
        """A pool of workers in this process."""
        return InlinePool(make_workers)


@dataclass(frozen=True)
class LocalProcesses:
    """Processes of this machine; see `ProcessPool`.

    Raises:
        ConfigError: If a setting is out of its range.
    """

    n_workers: int = 0
    """Number of processes, >= 0; 0: one per core."""

    start_method: str = "forkserver"
    """`forkserver`, `spawn` or `fork`. With the first two, a script needs the guard
    `if __name__ == "__main__":` around what it runs."""

    timeout_s: float = 300.0
    """Seconds without a sign of life after which a worker that has something to do counts as hung,
    > 0."""

    on_worker_failure: str = "fail"
    """`fail` or `restart`."""

    max_worker_restarts: int = 10
    """Most times that workers are started again, >= 0."""

    def __post_init__(self) -> None:
        check_at_least("n_workers", self.n_workers, 0)
        check_one_of("start_method", self.start_method, START_METHODS)
        check_positive("timeout_s", self.timeout_s)
        check_one_of("on_worker_failure", self.on_worker_failure, ("fail", "restart"))
        check_at_least("max_worker_restarts", self.max_worker_restarts, 0)

    def num_workers(self, at_most: int) -> int:
        """One per core, or as many as there are to be."""
        return min(self.n_workers or available_cores(), at_most)

    def pool(
        self, make_workers: Sequence[MakeWorker], names: Sequence[str], calls: Mapping[str, str]
    ) -> WorkerPool:
        """A pool of workers in processes."""
        pool: WorkerPool = locate(PROCESS_POOL)(make_workers, names, calls, self)
        return pool


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
        key: Name of the setting that it comes from, for the message if it can not be sent.
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
                f"can not be sent to a worker process ({error}): create what can not be sent "
                "within the function, or use runner=dev",
            ) from error
        return _unpacked, (content, self.key)


def _unpacked(content: bytes, key: str) -> Portable[Any]:
    return Portable(pickle.loads(content), key)


def dumps(value: Any) -> bytes:
    """A value as bytes; objects of local classes need a slower way.

    Raises:
        Exception: Whatever pickle raises if it can not be sent.
    """
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        import cloudpickle

        content: bytes = cloudpickle.dumps(value)
        return content
