"""Main function of a worker process, and messages between process and pool.

Calls without arguments and replies without a result are single bytes, which avoids the framing of
`Connection` on the hot path. Both ends of the private pipe run the same code on the same machine,
so unpickling is safe.
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

from maze_train.core.errors import ConfigError, EnvError, MissingExtraError, user_cause
from maze_train.core.files import process_runs
from maze_train.core.names import SIGNALS
from maze_train.core.notices import warn
from maze_train.core.seeding import seed_generators
from maze_train.workers.backends import limit_threads
from maze_train.workers.pool import (
    CallCancelledError,
    Memory,
    PrivateMemory,
    SharedMemory,
    WorkerContext,
    open_shared,
)

QUIT, DEFINE, CALL = b"\x00", b"\x01", b"\x02"
"""Commands from the pool. `QUIT`: close the worker and exit. `DEFINE`: a method name follows and
gets the next index. `CALL`: a message with a method index and arguments follows."""

FIRST_METHOD = 16
"""Byte 16 + n calls method n without arguments."""

MAX_METHODS = 256 - FIRST_METHOD

DONE, RESULT, FAILED = b"d", b"r", b"f"
"""Replies of a worker. `DONE`: the call returned None. `RESULT`: a pickled result follows.
`FAILED`: a pickled description of the failure follows."""

PIPE_NBYTES = 1 << 15
"""Larger messages are sent in an anonymous file, so that sending never blocks on a hung worker."""


class _Pickler(pickle.Pickler):
    """Pickles memory objects as references; the memory is sent separately."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.memories: list[Any] = []

    def persistent_id(self, obj: object) -> tuple[int, int] | None:
        if not isinstance(obj, (SharedMemory, PrivateMemory)):
            return None
        self.memories.append(obj)
        return len(self.memories) - 1, obj.nbytes


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory_of: Callable[[int, int], Memory]) -> None:
        super().__init__(file)
        self._memory_of = memory_of

    def persistent_load(self, pid: tuple[int, int]) -> Memory:
        return self._memory_of(*pid)


def pack(value: object) -> tuple[bytes, list[Any]]:
    """Pickle a value; return the bytes and the referenced memory objects."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.memories


def unpack(content: bytes, memory_of: Callable[[int, int], Memory]) -> Any:
    """Restore a value from `pack`; `memory_of(k, nbytes)` returns memory object k."""
    return _Unpickler(io.BytesIO(content), memory_of).load()


def send_message(conn: Connection, process: int, value: object) -> None:
    """Send a value that may contain shared memory.

    Args:
        conn: The pipe.
        process: Process id of the receiver.
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
    """Receive a value from `send_message`."""
    content = conn.recv_bytes()
    in_file, num_memories, content = content[0], content[1], content[2:]
    if in_file:
        with open(recv_handle(conn), "rb") as shared:
            os.lseek(shared.fileno(), 0, os.SEEK_SET)  # Both processes share the file position.
            content = shared.read()
    descriptors = [recv_handle(conn) for _ in range(num_memories)]
    return unpack(content, lambda number, nbytes: SharedMemory(nbytes, descriptors[number]))


def dumps(value: object) -> bytes:
    """Pickle a value, falling back to the slower cloudpickle for objects of local classes.

    Raises:
        Exception: If pickle cannot serialise the value; the type depends on the value.
    """
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        import cloudpickle

        content: bytes = cloudpickle.dumps(value)
        return content


BEATS, STEPS, CANCELLED, BUILT = range(4)
"""int64 values in memory shared by pool and process: progress counter, environment steps, number of
cancelled calls (counted from the first call), whether the worker has been created."""

PAGE_NBYTES = 4096
"""Size of the memory with these values, in bytes."""

ORPHAN_CHECK_S = 2.0
"""Interval in seconds at which a worker checks that its parent is alive."""


def process_main(
    conn: Connection, inherited: Sequence[Connection], index: int, parent: int, entropy: int
) -> None:
    """Create a worker, and run its methods until the parent quits or dies.

    Args:
        conn: End of the pipe to the parent.
        inherited: Pipe ends inherited from the parent by `fork`; this function closes them.
        index: Index of the worker.
        parent: Process id of the caller.
        entropy: Seed of the global random number generators, combined with the index of the worker.
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
    """Context of a worker in a separate process.

    Args:
        index: Index of the worker.
        page: Memory shared with the pool; see `BEATS`.
        parent_is_gone: Returns whether the parent has died.
    """

    is_remote = True

    def __init__(self, index: int, page: Any, parent_is_gone: Callable[[], bool]) -> None:
        super().__init__(index)
        self.numbers = memoryview(page.buffer).cast("q")
        self._parent_is_gone = parent_is_gone
        self._next_look = time.monotonic() + ORPHAN_CHECK_S
        self._number_of_call = 0

    def run(self, method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a method; return None if the call was cancelled."""
        self._number_of_call += 1
        if self.numbers[CANCELLED] >= self._number_of_call:
            return None
        try:
            return method(*args)
        except CallCancelledError:
            return None

    def seed_generators(self, seed: int) -> None:
        """Seed the global random number generators with `seed` and the index of the worker."""
        seed_generators(seed, self.index)

    def count(self, steps: int = 0) -> None:
        """Report progress and the number of new environment steps."""
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
    """Return a function that checks whether the parent process is gone.

    The function checks that the other end of the pipe is open and that the process runs. Both
    checks are required, because unrelated forks of the parent may keep a copy of the pipe end open.
    """
    poller = select.poll()
    poller.register(conn.fileno(), 0)  # Hang-ups only.
    return lambda: bool(poller.poll(0)) or not process_runs(parent)


def _commands(conn: Connection, parent_is_gone: Callable[[], bool]) -> Iterator[bytes]:
    """Yield the commands of the parent until it quits or dies."""
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


def encoded(result: object) -> bytes:
    """Pickle a result.

    Raises:
        EnvError: If the result cannot be pickled.
    """
    try:
        return dumps(result)
    except Exception as error:
        raise EnvError(
            f"infos cannot be sent to the main process ({error}): remove objects that cannot be "
            "pickled from the info dict of the environment, or use runner=dev"
        ) from error


def survive_signals() -> None:
    """Install handlers that ignore `SIGNALS` in a worker process."""
    for number in SIGNALS:
        # Programs started by an environment would inherit SIG_IGN.
        signal.signal(number, _survive)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _survive(number: int, frame: object) -> None:
    """Ignore the signal."""


IMPORTING, MAKING, CALLING = range(3)
"""Phases of a worker. The setup is repeated after each phase, which may have imported PyTorch."""


def set_up_packages(entropy: int, index: int, phase: int) -> None:
    """Limit the threads of a worker, and seed the global random number generators.

    Without seeding, all forked workers would sample the same random numbers as their parent.

    Args:
        entropy: See `process_main`.
        index: Index of the worker.
        phase: `IMPORTING`, `MAKING` or `CALLING`.
    """
    limit_threads()
    seed_generators(entropy, index, phase)


def describe_failure(error: BaseException) -> dict[str, Any]:
    """Return the arguments of `WorkerFailedError` for an exception, except the index."""
    message = str(error) if isinstance(error, EnvError) else f"{type(error).__name__}: {error}"
    cause = error.__cause__ or error
    trace = traceback.format_exception(cause) if user_cause(error) else []
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
