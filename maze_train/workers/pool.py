"""Workers of one kind, the places they live in, the calls of their methods, and their memory."""

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
"""Address of this machine for itself."""

CLOSED = "these workers are closed: build new ones"


class CallCancelledError(Exception):
    """The result of the running call is not needed any more; a worker lets it pass."""


class WorkerFailedError(Exception):
    """A worker raised, died or hung; the owner of the pool catches it.

    Args:
        index: Number of the worker.
        text: Description of the failure, in one line.
        trace: Traceback of what the environment raised.
        error: The error of the configuration that it is.
        final: Whether starting the worker again is no remedy.
        seed: Seed of the episode that failed, where the error names one.
        raised: Whether a method of the worker raised; otherwise it died or hung.
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
        """The traceback of the environment, if it raised, to be appended to a message."""
        return f"\n\nIn the worker process:\n{self.trace}" if self.trace else ""

    def as_error(self) -> MazeTrainError:
        """The error for the user, where the worker is not started again."""
        return self.error or WorkerError(self.text + self.appendix)


class WorkerContext:
    """The place where a worker lives, as the worker sees it.

    Args:
        index: Number of the worker.

    Attributes:
        steps: Environment steps that it counted.
        is_remote: Whether results are sent between processes, so that returning several at once
            saves time.
    """

    is_remote = False

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.steps = 0

    def count(self, steps: int = 0) -> None:
        """Report that many environment steps of the worker; 0: only that it continues.

        A call that takes longer than the time-out of its pool has to call this meanwhile.

        Raises:
            CallCancelledError: If no one needs the result of the running call any more.
        """
        self.steps += steps

    def seed_generators(self, seed: int) -> None:
        """Seed the global random generators of a process that belongs to the worker alone.

        Args:
            seed: Integer >= 0; workers with different numbers get different streams.
        """


class Worker:
    """Base of workers: objects made from a `WorkerContext`, whose methods a pool calls by name.

    A worker does not know where it lives.
    """

    def method(self, name: str) -> Callable[..., Any]:
        """Return the method of this name."""
        found: Callable[..., Any] = getattr(self, name)
        return found

    def written(self) -> Iterable[Array]:
        """Return the views of memory that the last call wrote; used where memory is copied."""
        return ()

    def close(self) -> None:
        """Release what the worker holds."""


@dataclass(frozen=True)
class Crew:
    """What a pool needs to make its workers, and to name them in messages."""

    make_workers: Sequence[MakeWorker]
    """Makes the workers, one function each; sent to where they live."""

    names: Sequence[str]
    """Names of the workers."""

    calls: Mapping[str, str] = field(default_factory=dict)
    """Names of calls by method."""


class PrivateMemory:
    """Memory of this process; workers that live elsewhere have copies. See `SharedMemory`.

    Args:
        nbytes: Its size.
        on_close: Called with the memory when it is closed.
    """

    def __init__(
        self, nbytes: int, on_close: Callable[[PrivateMemory], object] | None = None
    ) -> None:
        self.nbytes = nbytes
        self.buffer = np.zeros(nbytes, np.uint8)
        self._on_close = on_close

    def close(self) -> None:
        """Give the memory back; calling it again does nothing."""
        if self._on_close is not None:
            self._on_close(self)


class WorkerPool(ABC):
    """Workers 0, 1, ..., n - 1, whose methods are called by name.

    The calls of one worker are done one after the other in the order in which they were made, those
    of several at the same time if the place supports it. The results of a worker are received in
    the order of its calls.

    Attributes:
        restarts: How many times workers were started again.
        may_restart: Whether a worker that fails may be started again.
        workers: The workers that live in this process.
        host: Address of this machine, as workers reach it; `LOOPBACK` where they live on it.
    """

    restarts: int = 0
    may_restart: bool = False
    workers: Sequence[Worker] = ()
    host: str = LOOPBACK

    @abstractmethod
    def __len__(self) -> int:
        """Number of workers; 0 after `close`."""

    @abstractmethod
    def call(self, index: int, method: str, *args: Any) -> None:
        """Start a call of a worker's method; does not wait for the result.

        Args:
            index: Number of the worker.
            method: Name of the method.
            *args: Its arguments.

        Raises:
            WorkerError: If the pool is closed.
        """

    @abstractmethod
    def pending(self, index: int) -> int:
        """Number of calls of a worker whose results were not received."""

    @abstractmethod
    def ready(self, timeout_s: float) -> list[int]:
        """Workers whose oldest call is done, or failed.

        Args:
            timeout_s: How long to wait for the first of them, >= 0.

        Raises:
            WorkerError: If the pool is closed.
        """

    @abstractmethod
    def receive(self, index: int) -> Any:
        """The result of the oldest call of a worker; waits for it.

        Raises:
            WorkerFailedError: If the worker raised, died or hung; it then has to be started again.
        """

    def ask(self, index: int, method: str, *args: Any) -> Any:
        """Call a method of a worker that has no other calls, and wait for the result.

        Raises:
            WorkerFailedError: As for `receive`.
        """
        self.call(index, method, *args)
        return self.receive(index)

    @abstractmethod
    def cancel(self, index: int) -> None:
        """Make the calls of a worker end early, or do nothing at all; their results become None."""

    @abstractmethod
    def steps(self, index: int) -> int:
        """Environment steps that a worker, and those before it with its number, counted."""

    @abstractmethod
    def allocate(self, nbytes: int) -> SharedMemory | PrivateMemory:
        """Return zeroed memory that the workers see when it is an argument of a call.

        If it cannot be shared, each worker has a copy. Calls then carry what `sends` and `publish`
        name, and results what `Worker.written` names. The caller closes the memory.
        """

    def sends(self, index: int, memory: Any, arrays: Iterable[Array]) -> None:  # noqa: B027
        """Let views of memory go to a worker with each of its calls, where it is not shared."""

    def publish(self, memory: Any, arrays: Iterable[Array]) -> None:  # noqa: B027
        """Let all workers, new ones too, have views of memory as they are now, where not shared.

        They get them before they begin another call; what was published before is forgotten.
        """

    @abstractmethod
    def stop(self, index: int) -> None:
        """End a worker, which makes no further step then; calling it again does nothing."""

    @abstractmethod
    def restart(self, failure: WorkerFailedError, description: str, outlook: str) -> None:
        """Start a worker that failed again, or close the pool.

        Args:
            failure: The failure.
            description: Description of the failure.
            outlook: Fate of its work, for the warning.

        Raises:
            MazeTrainError: If it is not to be started again.
        """

    @abstractmethod
    def close(self) -> None:
        """End the workers; calling it again does nothing."""

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker; returns the results in the order of the workers.

        Raises:
            MazeTrainError: If a worker fails; the pool is closed then.
        """
        try:
            for index in range(len(self)):
                self.call(index, method, *args)
        except BaseException:
            self.close()
            raise
        return self.receive_all()

    def call_new(self, method: str) -> list[Any]:
        """`call_all` of workers that were just made, which may be made once more."""
        return self.call_all(method)

    def receive_all(self) -> list[Any]:
        """The result of the oldest call of every worker, in the order of the workers.

        Raises:
            MazeTrainError: If a worker fails; the pool is closed then.
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
    """Workers in this process; each call is done when its result is asked for.

    Exceptions of a worker are passed on unchanged.

    Args:
        make_workers: Makes the workers, one function each.
    """

    def __init__(self, make_workers: Sequence[MakeWorker]) -> None:
        self.workers: list[Worker] = []
        self._contexts = [WorkerContext(index) for index in range(len(make_workers))]
        self._calls = [deque[Callable[[], Any]]() for _ in make_workers]
        self._done: set[int] = set()  # workers whose oldest call only has to be received
        self._turn = 0
        try:
            for make, context in zip(make_workers, self._contexts, strict=True):
                self.workers.append(make(context))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self.workers)

    def call(self, index: int, method: str, *args: Any) -> None:
        """Note the call."""
        if not self.workers:
            raise WorkerError(CLOSED)
        self._calls[index].append(partial(self.workers[index].method(method), *args))

    def pending(self, index: int) -> int:
        """Number of calls without a received result."""
        return len(self._calls[index])

    def ready(self, timeout_s: float) -> list[int]:
        """Do one call of the worker whose turn it is, unless results wait."""
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
        """The result of the oldest call, which is done now if it was not before."""
        if not self.workers:
            raise WorkerError(CLOSED)
        self._done.discard(index)
        return self._calls[index].popleft()()

    def cancel(self, index: int) -> None:
        """Drop the calls that were not begun."""
        calls = self._calls[index]
        for k in range(index in self._done, len(calls)):
            calls[k] = lambda: None

    def steps(self, index: int) -> int:
        """Environment steps that a worker counted."""
        return self._contexts[index].steps

    def allocate(self, nbytes: int) -> PrivateMemory:
        """Zeroed memory of this process."""
        return PrivateMemory(nbytes)

    def stop(self, index: int) -> None:
        """Do nothing: no step is made between two calls."""

    def restart(self, failure: WorkerFailedError, description: str, outlook: str) -> None:
        """Never called: what workers raise goes through."""
        raise AssertionError("a worker in this process is not started again") from failure

    def close(self) -> None:
        """Close the workers, all of them also when one raises."""
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
    """Do a call; returns a function that returns its result, or raises what it raised."""
    try:
        result = call()
    except BaseException as error:  # an interrupt too: it is raised where the result is received
        caught = error

        def fail() -> None:
            raise caught

        return fail
    return lambda: result


def check_spaces(
    number: int, spaces: tuple[Any, Any], expected: tuple[Any, Any], first: int = 0
) -> None:
    """Refuse environments whose spaces differ from those of the first one.

    Args:
        number: Number of the first of these environments.
        spaces: Their observation and action space.
        expected: Those of the first one.
        first: Its number.

    Raises:
        SpaceError: If they differ.
    """
    if spaces != expected:
        raise SpaceError(
            f"the spaces of environment {number} are {spaces[0]} and {spaces[1]}, those of "
            f"environment {first} are {expected[0]} and {expected[1]}: all environments must have "
            "equal spaces"
        )


def shares(n: int, count: int) -> list[range]:
    """Numbers 0 to n - 1, shared out to that many workers as evenly as possible."""
    return [range(*bounds) for bounds in pairwise(n * i // count for i in range(count + 1))]


def worker_names(kind: str, parts: Iterable[range]) -> list[str]:
    """Names of workers for messages, from the numbers of their environments."""
    return [
        f"{kind} {i} (environments {part.start} to {part.stop - 1})" for i, part in enumerate(parts)
    ]


class SharedMemory:
    """Zeroed memory that can be an argument of a call of a worker, which then maps it too.

    It has no name, and is given back when the last process that holds it ends, in whatever way it
    ends. It does not count against the size of /dev/shm, which containers keep small.

    Args:
        nbytes: Its size.
        descriptor: Descriptor of memory of another process, which is closed; None: new memory.

    Attributes:
        buffer: The memory; arrays over it keep it alive.
    """

    def __init__(self, nbytes: int, descriptor: int | None = None) -> None:
        self.nbytes = nbytes
        self.descriptor = -1
        if descriptor is None:
            self.descriptor = open_shared(nbytes)
            descriptor = os.dup(self.descriptor)
        self.buffer = map_shared(descriptor, nbytes)

    def close(self) -> None:
        """Close the descriptor, after which no worker can be given the memory; again does nothing.

        What was mapped stays.
        """
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("shared memory travels as an argument of a call of a worker only")


def open_shared(nbytes: int) -> int:
    """A file descriptor of `nbytes` bytes of zeroed memory that never has a name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("maze_train", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, nbytes)
    return descriptor


def map_shared(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map the memory behind `descriptor`, which is closed; arrays over it keep it alive."""
    try:
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)
