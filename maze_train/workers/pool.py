"""Workers, pools of workers, and memory shared with workers."""

from __future__ import annotations

import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from maze_train.core.errors import MazeTrainError, SpaceError, WorkerError

if TYPE_CHECKING:
    from maze_train.core.types import Array

MakeWorker: TypeAlias = Callable[["WorkerContext"], "Worker"]


LOOPBACK = "127.0.0.1"
"""Loopback address."""

CLOSED = "the workers are closed: create a new pool"


class CallCancelledError(Exception):
    """Raised when the running call was cancelled. Workers must not catch this exception."""


class WorkerFailedError(Exception):
    """Error raised when a worker raises, dies or hangs; handled by the code that uses the pool.

    Args:
        index: Index of the worker.
        text: One-line description of the failure.
        trace: Traceback of an exception in third-party code, if any.
        error: Original exception, if the failure is a configuration error.
        final: Whether a restart of the worker would fail again.
        seed: Seed of the failed episode, if known.
        raised: Whether a method of the worker raised; otherwise the worker died or hung.
    """

    def __init__(
        self,
        index: int,
        text: str,
        trace: str = "",
        error: MazeTrainError | None = None,
        *,
        final: bool = False,
        seed: int | None = None,
        raised: bool = False,
    ) -> None:
        super().__init__(text)
        self.index, self.text, self.trace = index, text, trace
        self.error, self.final, self.seed, self.raised = error, final, seed, raised

    @property
    def appendix(self) -> str:
        """Traceback of the environment's exception, formatted for the end of a message."""
        return f"\n\nIn the worker process:\n{self.trace}" if self.trace else ""

    def as_error(self) -> MazeTrainError:
        """Return the error to raise if the worker is not restarted."""
        return self.error or WorkerError(self.text + self.appendix)


class WorkerContext:
    """Interface for reports of a worker to its pool.

    Args:
        index: Index of the worker.

    Attributes:
        steps: Number of environment steps reported.
        is_remote: Whether results are sent to another process, so that batching them saves time.
    """

    is_remote = False

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.steps = 0

    def count(self, steps: int = 0) -> None:
        """Report progress. Raise if the running call was cancelled.

        Worker methods that may run longer than the timeout of the pool must call `count` regularly.

        Args:
            steps: Number of new environment steps; 0 signals only that the worker is alive.

        Raises:
            CallCancelledError: If the running call was cancelled.
        """
        self.steps += steps

    def seed_generators(self, seed: int) -> None:
        """Seed the global random number generators; does nothing in the main process.

        Args:
            seed: Seed, >= 0; combined with the index of the worker.
        """


class Worker:
    """Base class of workers. A pool creates a worker with a `WorkerContext` and calls its methods.

    Workers must not depend on the backend.
    """

    def method(self, name: str) -> Callable[..., Any]:
        """Return the method called `name`."""
        found: Callable[..., Any] = getattr(self, name)
        return found

    def written(self) -> Iterable[Array]:
        """Return views of the memory written by the last call, for pools that copy memory."""
        return ()

    def close(self) -> None:
        """Release the resources of the worker."""


@dataclass(frozen=True)
class WorkerSpecs:
    """Factories and names of the workers of a pool."""

    make_workers: Sequence[MakeWorker]
    """One factory per worker, called in the process of the worker."""

    names: Sequence[str]
    """Name of each worker, for messages."""

    calls: Mapping[str, str] = field(default_factory=dict)
    """Description of each method, for messages."""


class PrivateMemory:
    """Memory of this process. Remote workers use copies, in contrast to `SharedMemory`.

    Args:
        nbytes: Size in bytes.
        on_close: Callback that `close` calls with this object.
    """

    def __init__(
        self, nbytes: int, on_close: Callable[[PrivateMemory], object] | None = None
    ) -> None:
        self.nbytes = nbytes
        self.buffer = np.zeros(nbytes, np.uint8)
        self._on_close = on_close

    def close(self) -> None:
        """Release the memory. Closing again has no effect."""
        if self._on_close is not None:
            self._on_close(self)


class WorkerPool(ABC):
    """Pool of workers 0, 1, ..., n - 1.

    Methods of workers are called by name. The calls of a worker run in order, and results are
    received in the same order. Calls of different workers run in parallel if the backend supports
    it.

    Attributes:
        restarts: Number of worker restarts.
        may_restart: Whether a failed worker may be restarted.
        workers: Workers that run in this process.
        host: Address of this machine for workers; `LOOPBACK` for local workers.
    """

    restarts: int = 0
    may_restart: bool = False
    workers: Sequence[Worker] = ()
    host: str = LOOPBACK

    @abstractmethod
    def __len__(self) -> int:
        """Number of workers; 0 after `close`."""

    @abstractmethod
    def call(self, index: int, method: str, *args: object) -> None:
        """Call a method of a worker without waiting for the result.

        Args:
            index: Index of the worker.
            method: Name of the method.
            *args: Arguments of the method.

        Raises:
            WorkerError: If the pool is closed.
        """

    @abstractmethod
    def pending(self, index: int) -> int:
        """Return the number of calls of a worker whose results have not been received."""

    @abstractmethod
    def ready(self, timeout_s: float) -> list[int]:
        """Return the workers whose oldest call has finished or failed.

        Args:
            timeout_s: Maximum time in seconds to wait for the first worker, >= 0.

        Raises:
            WorkerError: If the pool is closed.
        """

    @abstractmethod
    def receive(self, index: int) -> Any:
        """Wait for the result of the oldest call of a worker, and return it.

        Raises:
            WorkerFailedError: If the worker raised, died or hung. The worker must be restarted
                before the next call.
        """

    def ask(self, index: int, method: str, *args: object) -> Any:
        """Call a method of a worker without pending calls, and wait for the result.

        Raises:
            WorkerFailedError: See `receive`.
        """
        self.call(index, method, *args)
        return self.receive(index)

    @abstractmethod
    def cancel(self, index: int) -> None:
        """Cancel the pending calls of a worker; the results of cancelled calls are None."""

    @abstractmethod
    def steps(self, index: int) -> int:
        """Return the number of environment steps of a worker, including steps before restarts."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Memory:
        """Allocate zeroed memory that can be an argument of calls.

        If memory cannot be shared, each worker has a copy: calls transfer the arrays registered
        with `sends` and `publish`, and results transfer the arrays in `Worker.written`. The caller
        closes the memory.
        """

    def sends(self, index: int, memory: Memory, arrays: Iterable[Array]) -> None:  # noqa: B027
        """Send views of memory with each call of a worker; does nothing if memory is shared."""

    def publish(self, memory: Memory, arrays: Iterable[Array]) -> None:  # noqa: B027
        """Send the current content of views to all workers; does nothing if memory is shared.

        All workers, including restarted workers, receive the content before their next call. The
        new content replaces the content published before.
        """

    @abstractmethod
    def stop(self, index: int) -> None:
        """Stop a worker. Stopping again has no effect."""

    @abstractmethod
    def restart(self, failure: WorkerFailedError, description: str, outlook: str) -> None:
        """Restart a failed worker, or close the pool.

        Args:
            failure: The failure.
            description: Description of the failure.
            outlook: Consequence for the environments of the worker, for the warning.

        Raises:
            MazeTrainError: If the worker cannot be restarted.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop all workers. Closing again has no effect."""

    def call_all(self, method: str, *args: object) -> list[Any]:
        """Call a method of every worker, and return the results in order of the workers.

        Raises:
            MazeTrainError: If a worker fails. The pool is closed.
        """
        try:
            for index in range(len(self)):
                self.call(index, method, *args)
        except BaseException:
            self.close()
            raise
        return self.receive_all()

    def call_new(self, method: str) -> list[Any]:
        """Like `call_all`, for newly created workers. Some pools recreate workers that fail."""
        return self.call_all(method)

    def receive_all(self) -> list[Any]:
        """Return the result of the oldest call of every worker, in order of the workers.

        Raises:
            MazeTrainError: If a worker fails. The pool is closed.
        """
        try:
            return [self.receive(index) for index in range(len(self))]
        except WorkerFailedError as failure:
            self.close()
            raise failure.as_error() from None
        except BaseException:
            self.close()
            raise


class InlinePool(WorkerPool):
    """Pool of workers in this process. A call runs when its result is requested.

    Exceptions of a worker propagate unchanged.

    Args:
        make_workers: One factory per worker.
    """

    def __init__(self, make_workers: Sequence[MakeWorker]) -> None:
        self.workers: list[Worker] = []
        self._contexts = [WorkerContext(index) for index in range(len(make_workers))]
        self._calls = [deque[Callable[[], Any]]() for _ in make_workers]
        self._done: set[int] = set()  # Workers that have run their oldest call.
        self._turn = 0
        try:
            for make, context in zip(make_workers, self._contexts, strict=True):
                self.workers.append(make(context))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self.workers)

    def call(self, index: int, method: str, *args: object) -> None:
        """Queue the call."""
        if not self.workers:
            raise WorkerError(CLOSED)
        self._calls[index].append(partial(self.workers[index].method(method), *args))

    def pending(self, index: int) -> int:
        """Return the number of calls whose results have not been received."""
        return len(self._calls[index])

    def ready(self, timeout_s: float) -> list[int]:
        """If no result is available, run the oldest call of the next worker."""
        if not self.workers:
            raise WorkerError(CLOSED)
        turns = 0 if self._done else len(self)
        for _ in range(turns):
            index, self._turn = self._turn, (self._turn + 1) % len(self)
            if calls := self._calls[index]:
                calls[0] = outcome_of(calls[0])
                self._done.add(index)
                break
        return sorted(self._done)

    def receive(self, index: int) -> Any:
        """Return the result of the oldest call, running it if necessary."""
        if not self.workers:
            raise WorkerError(CLOSED)
        self._done.discard(index)
        return self._calls[index].popleft()()

    def cancel(self, index: int) -> None:
        """Cancel the calls that have not run."""
        calls = self._calls[index]
        for k in range(index in self._done, len(calls)):
            calls[k] = lambda: None

    def steps(self, index: int) -> int:
        """Return the number of environment steps reported by a worker."""
        return self._contexts[index].steps

    def allocate(self, nbytes: int) -> PrivateMemory:
        """Allocate zeroed memory of this process."""
        return PrivateMemory(nbytes)

    def stop(self, index: int) -> None:
        """Do nothing, because no worker runs between calls."""

    def restart(self, failure: WorkerFailedError, description: str, outlook: str) -> None:
        """Must not be called, because exceptions of workers propagate."""
        raise AssertionError("workers in this process cannot be restarted") from failure

    def close(self) -> None:
        """Close all workers, then raise the first error."""
        workers, self.workers = self.workers, []
        first_error: BaseException | None = None
        for worker in workers:
            try:
                worker.close()
            except Exception as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error


def outcome_of(call: Callable[[], Any]) -> Callable[[], Any]:
    """Run a call; return a function that returns its result or raises its exception."""
    try:
        result = call()
    except BaseException as error:  # Includes interrupts; raised when the result is received.
        caught = error

        def fail() -> None:
            raise caught

        return fail
    return lambda: result


def check_spaces(
    number: int, spaces: tuple[Any, Any], expected: tuple[Any, Any], first: int = 0
) -> None:
    """Check that environments have the same spaces as the first environment.

    Args:
        number: Index of the first environment to check.
        spaces: Observation and action space of the environment.
        expected: Observation and action space to compare with.
        first: Index of the first environment, which has the expected spaces.

    Raises:
        SpaceError: If the spaces differ.
    """
    if spaces != expected:
        raise SpaceError(
            f"the spaces of environment {number} are {spaces[0]} and {spaces[1]}, but in "
            f"environment {first} {expected[0]} and {expected[1]}: all environments must have "
            "equal spaces"
        )


def shares(n: int, count: int) -> list[range]:
    """Split the indices 0 to n - 1 into `count` contiguous ranges of nearly equal length."""
    return [range(*bounds) for bounds in pairwise(n * i // count for i in range(count + 1))]


def worker_names(kind: str, parts: Iterable[range]) -> list[str]:
    """Return names of workers for messages, such as `worker 0 (environments 0 to 3)`."""
    return [
        f"{kind} {i} (environments {part.start} to {part.stop - 1})" for i, part in enumerate(parts)
    ]


class SharedMemory:
    """Zeroed anonymous memory that can be an argument of calls; workers map the memory.

    The memory is released when the last process that uses it ends, even if the process is killed.
    Anonymous memory does not count against the size of /dev/shm, which is small in containers.

    Args:
        nbytes: Size in bytes.
        descriptor: File descriptor from another process, which the constructor closes; if None, new
            memory is allocated.

    Attributes:
        buffer: The mapped memory; arrays over the buffer keep it alive.
    """

    def __init__(self, nbytes: int, descriptor: int | None = None) -> None:
        self.nbytes = nbytes
        self.descriptor = -1
        if descriptor is None:
            self.descriptor = open_shared(nbytes)
            descriptor = os.dup(self.descriptor)
        self.buffer = map_shared(descriptor, nbytes)

    def close(self) -> None:
        """Close the file descriptor. The memory can no longer be sent to workers.

        Existing mappings remain valid. Closing again has no effect.
        """
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("shared memory can only be an argument of a worker call")


Memory: TypeAlias = SharedMemory | PrivateMemory


def open_shared(nbytes: int) -> int:
    """Return a file descriptor of `nbytes` bytes of zeroed anonymous memory."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("maze_train", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, nbytes)
    return descriptor


def map_shared(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map the memory of a file descriptor, and close the descriptor."""
    try:
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)
