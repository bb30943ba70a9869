"""The process of a worker, and the messages between it and its pool.

A call without arguments, and the reply without a result, are one byte, which the hot path reads and
writes without the framing of `Connection`. Both ends run the same code on the same machine, and the
pipe is private to them, so pickle is safe here.
"""

from __future__ import annotations

import io
import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from maze_train.core.errors import ConfigError, EnvError, MissingExtraError, foreign_cause
from maze_train.core.files import process_runs
from maze_train.core.notices import warn
from maze_train.core.seeding import seed_generators
from maze_train.workers.places import SIGNALS, limit_threads
from maze_train.workers.pool import (
    CallCancelledError,
    PrivateMemory,
    SharedMemory,
    WorkerContext,
    open_shared,
)

QUIT, DEFINE, CALL = b"\x00", b"\x01", b"\x02"
"""From the pool: close and end; the name of a method follows, which gets the next number; a message
with the number of a method and its arguments follows."""

FIRST_METHOD = 16
"""The byte 16 + n calls method n without arguments."""

MOST_METHODS = 256 - FIRST_METHOD

DONE, RESULT, FAILED = b"d", b"r", b"f"
"""From a worker: the call is done and returned None; its pickled result follows; it failed, and a
pickled description follows."""

PIPE_NBYTES = 1 << 15
"""Messages above this size travel in a file without a name: writing one never waits for a worker
that hangs."""


class _Pickler(pickle.Pickler):
    """Leaves memory out, which gets to workers in other ways."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.memories: list[Any] = []

    def persistent_id(self, obj: Any) -> tuple[int, int] | None:
        if not isinstance(obj, (SharedMemory, PrivateMemory)):
            return None
        self.memories.append(obj)
        return len(self.memories) - 1, obj.nbytes


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory_of: Callable[[int, int], Any]) -> None:
        super().__init__(file)
        self._memory_of = memory_of

    def persistent_load(self, pid: tuple[int, int]) -> Any:
        return self._memory_of(*pid)


def pack(value: Any) -> tuple[bytes, list[Any]]:
    """A value as bytes, and the memory in it, which they do not hold."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.memories


def unpack(content: bytes, memory_of: Callable[[int, int], Any]) -> Any:
    """The value of `pack`; `memory_of(k, nbytes)` gives the k-th memory in it."""
    return _Unpickler(io.BytesIO(content), memory_of).load()


def send_message(conn: Connection, process: int, value: Any) -> None:
    """Send a value that may hold shared memory.

    Args:
        conn: The pipe.
        process: The process at its other end.
        value: The value to send.
    """
    content, memories = pack(value)
    in_file = len(content) > PIPE_NBYTES
    head = bytes([in_file, len(memories)])
    conn.send_bytes(head if in_file else head + content)
    if in_file:
        with open(open_shared(0), "wb") as shared:
            shared.write(content)
            shared.flush()
            send_handle(conn, shared.fileno(), process)
    for memory in memories:
        send_handle(conn, memory.descriptor, process)


def receive_message(conn: Connection) -> Any:
    """Receive what `send_message` sent."""
    content = conn.recv_bytes()
    in_file, num_memories, content = content[0], content[1], content[2:]
    if in_file:
        with open(recv_handle(conn), "rb") as shared:
            os.lseek(shared.fileno(), 0, os.SEEK_SET)  # Both sides share the position.
            content = shared.read()
    descriptors = [recv_handle(conn) for _ in range(num_memories)]
    return unpack(content, lambda number, nbytes: SharedMemory(nbytes, descriptors[number]))


def dumps(value: Any) -> bytes:
    """A value as bytes; objects of local classes need a slower way.

    Raises:
        Exception: Whatever pickle raises if it cannot be sent.
    """
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        import cloudpickle

        content: bytes = cloudpickle.dumps(value)
        return content


BEATS, STEPS, CANCELLED, BUILT = range(4)
"""Numbers (int64) that pool and process see at once: signs of life, environment steps, calls that
were cancelled (all up to this number), whether the worker is made."""

PAGE_NBYTES = 4096
"""Memory of these numbers."""

ORPHAN_CHECK_S = 2.0
"""Seconds between two checks of a worker that its parent lives."""


def process_main(
    conn: Connection, inherited: Sequence[Connection], index: int, parent: int, entropy: int
) -> None:
    """Make a worker, then call its methods until the parent asks it to quit or is gone.

    Args:
        conn: This end of the pipe to the parent.
        inherited: Ends that belong to the parent and were copied by a fork; they are closed here.
        index: Number of the worker.
        parent: Process that makes the calls.
        entropy: Seeds the global generators, together with the number of the worker.
    """
    survive_signals()
    for other in inherited:
        other.close()
    closing = ExitStack()
    with suppress(BrokenPipeError, ConnectionResetError, EOFError):
        try:
            _serve(conn, closing, index, _watch(parent, conn), entropy)
        except BaseException as error:
            _send(conn, FAILED, pickle.dumps(describe_failure(error)))
    try:
        closing.close()
    except BaseException as error:
        warn(str(error))
    conn.close()


def _serve(
    conn: Connection,
    closing: ExitStack,
    index: int,
    parent_is_gone: Callable[[], bool],
    entropy: int,
) -> None:
    set_up_packages(entropy, index, IMPORTING)
    make_worker, page = receive_message(conn)
    set_up_packages(entropy, index, MAKING)
    context = ProcessContext(index, page, parent_is_gone)
    worker = make_worker(context)
    closing.callback(worker.close)
    set_up_packages(entropy, index, CALLING)
    context.numbers[BUILT] = 1
    methods: list[Callable[..., Any]] = []
    for command in _commands(conn, parent_is_gone):
        if command == DEFINE:
            methods.append(worker.method(conn.recv_bytes().decode()))
            continue
        number, args = command[0] - FIRST_METHOD, ()
        if command == CALL:
            number, args = receive_message(conn)
        result = context.run(methods[number], args)
        if result is None:
            os.write(conn.fileno(), DONE)
        else:
            _send(conn, RESULT, encoded(result))


class ProcessContext(WorkerContext):
    """The process of a worker.

    Args:
        index: Number of the worker.
        page: Memory of the numbers that pool and process see.
        parent_is_gone: Returns whether the parent is gone.
    """

    is_remote = True

    def __init__(self, index: int, page: Any, parent_is_gone: Callable[[], bool]) -> None:
        super().__init__(index)
        self.numbers = memoryview(page.buffer).cast("q")
        self._parent_is_gone = parent_is_gone
        self._next_look = time.monotonic() + ORPHAN_CHECK_S
        self._number_of_call = 0

    def run(self, method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a method; None if the call was cancelled."""
        self._number_of_call += 1
        if self.numbers[CANCELLED] >= self._number_of_call:
            return None
        try:
            return method(*args)
        except CallCancelledError:
            return None

    def seed_generators(self, seed: int) -> None:
        """Seed the global generators with `seed` and the number of the worker."""
        seed_generators(seed, self.index)

    def count(self, steps: int = 0) -> None:
        """Report that the worker lives, and how many steps it made."""
        numbers = self.numbers
        numbers[BEATS] += 1
        numbers[STEPS] += steps
        if numbers[CANCELLED] >= self._number_of_call > 0:
            raise CallCancelledError
        now = time.monotonic()
        if now > self._next_look:
            self._next_look = now + ORPHAN_CHECK_S
            if self._parent_is_gone():
                raise CallCancelledError


def _watch(parent: int, conn: Connection) -> Callable[[], bool]:
    """Return a function that says whether the process that makes the calls is gone.

    No one holds the other end of the pipe then, or the process ended: processes that were forked by
    it for other purposes may hold a copy of its end.
    """
    poller = select.poll()
    poller.register(conn.fileno(), 0)  # hang-ups only
    return lambda: bool(poller.poll(0)) or not process_runs(parent)


def _commands(conn: Connection, parent_is_gone: Callable[[], bool]) -> Iterator[bytes]:
    """The commands of the parent, until it wants this process to end, or is gone."""
    poller = select.poll()
    descriptor = conn.fileno()
    poller.register(descriptor, select.POLLIN)
    while True:
        while not poller.poll(ORPHAN_CHECK_S * 1000.0):
            if parent_is_gone():
                return
        command = os.read(descriptor, 1)
        if not command or command == QUIT:
            return
        yield command


def _send(conn: Connection, kind: bytes, content: bytes) -> None:
    os.write(conn.fileno(), kind)
    conn.send_bytes(content)


def encoded(result: Any) -> bytes:
    """A result as bytes.

    Raises:
        EnvError: If it holds something that cannot be sent to another process.
    """
    try:
        return dumps(result)
    except Exception as error:
        raise EnvError(
            f"infos cannot be sent to the main process ({error}): remove what cannot be pickled "
            "from the info dict of the environment, or use runner=dev"
        ) from error


def survive_signals() -> None:
    """Set the signal handlers of a worker process."""
    for number in SIGNALS:
        # Not SIG_IGN, which programs that an environment starts would inherit.
        signal.signal(number, _survive)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _survive(number: int, frame: object) -> None:
    """Do nothing about a signal."""


IMPORTING, MAKING, CALLING = range(3)
"""Phases of a worker. The later ones repeat the set-up, since a phase may import PyTorch."""


def set_up_packages(entropy: int, index: int, phase: int) -> None:
    """Limit the threads of a worker, and seed the global generators.

    Without seeds, forked workers would all draw what their parent would have drawn next.

    Args:
        entropy: See `process_main`.
        index: Number of the worker.
        phase: One of `IMPORTING`, `MAKING` and `CALLING`.
    """
    limit_threads()
    seed_generators(entropy, index, phase)


def describe_failure(error: BaseException) -> dict[str, Any]:
    """The arguments of `WorkerFailedError` that an exception gives, without the number."""
    message = str(error) if isinstance(error, EnvError) else f"{type(error).__name__}: {error}"
    cause = error.__cause__ or error
    trace = traceback.format_exception(cause) if foreign_cause(error) else []
    known = error if isinstance(error, (ConfigError, MissingExtraError)) else None
    is_final = known is not None or (isinstance(cause, EnvError) and cause.is_final)
    return {
        "text": message,
        "trace": "".join(trace),
        "error": known,
        "final": is_final,
        "seed": error.seed if isinstance(error, EnvError) else None,
        "raised": True,
    }
