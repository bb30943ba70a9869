"""Messages between a pool and its worker processes: calls, arguments and results.

A call without arguments, and the reply that there is nothing to tell, are one byte, which the hot
path reads and writes without the framing of `Connection`. Both ends run the same code on the same
machine, and the pipe is private to them, so pickle is safe here.
"""

from __future__ import annotations

import io
import os
import pickle
from multiprocessing.reduction import recv_handle, send_handle
from typing import TYPE_CHECKING, Any

from maze_train.workers.memory import SharedMemory, open_shared
from maze_train.workers.pool import PrivateMemory

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection


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
        Exception: Whatever pickle raises if it can not be sent.
    """
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        import cloudpickle

        content: bytes = cloudpickle.dumps(value)
        return content
