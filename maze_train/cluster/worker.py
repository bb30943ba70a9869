"""Ray actor that runs a worker and keeps local copies of shared buffers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import numpy as np

from maze_train.core.notices import warn
from maze_train.core.targets import import_extra
from maze_train.workers.pool import Memory, PrivateMemory, Worker
from maze_train.workers.process_pool import (
    BEATS,
    CALLING,
    CANCELLED,
    IMPORTING,
    MAKING,
    PAGE_NBYTES,
    STEPS,
    ProcessContext,
    describe_failure,
    encoded,
    set_up_packages,
    unpack,
)

if TYPE_CHECKING:
    from maze_train.core.types import Array


Span: TypeAlias = "tuple[int, int, Array]"
"""Tuple of memory id, offset in bytes, and content."""


class Reply(NamedTuple):
    """Reply to a call."""

    result: bytes | None
    """The pickled result; None if the call returned None."""

    failure: dict[str, Any] | None
    """Arguments of `WorkerFailedError` if the worker failed."""

    written: list[Span]
    """Memory written by the worker."""

    beats: int
    steps: int


class RayWorker:
    """Ray actor that runs a worker.

    Calls run one after the other. `write`, `cancel` and `pulse` are in a separate concurrency
    group, and run in parallel with a call.

    Args:
        index: Index of the worker.
    """

    def __init__(self, index: int) -> None:
        self._context = ProcessContext(index, PrivateMemory(PAGE_NBYTES), lambda: False)
        self._worker = Worker()
        self._failure: dict[str, Any] | None = None
        self._memories: dict[int, Memory] = {}
        self._arrival = threading.Condition()
        self._arrived = 0
        self._mail: dict[int, list[Span]] = {}

    def make(self, content: bytes, folders: list[str], entropy: int) -> Reply:
        """Create the worker; return the address of the machine.

        Args:
            content: Pickled factory of the worker.
            folders: Import folders of the caller, to be added to `sys.path`.
            entropy: Seed of the global generators of the process.
        """
        sys.path += [folder for folder in folders if folder not in sys.path]
        return self._reply(self._make, content, entropy)

    def _make(self, content: bytes, entropy: int) -> str:
        index = self._context.index
        set_up_packages(entropy, index, IMPORTING)
        make_worker = unpack(content, self._no_memory)
        set_up_packages(entropy, index, MAKING)
        self._worker = make_worker(self._context)
        set_up_packages(entropy, index, CALLING)
        ray = import_extra("ray", "ray", "runner=ray")
        return str(ray.util.get_node_ip_address())

    def call(
        self,
        method: str,
        content: bytes,
        numbers: list[int],
        sent: list[Span],
        mail: int,
        forgotten: list[int],
    ) -> Reply:
        """Call a method of the worker.

        Args:
            method: Name of the method.
            content: Pickled arguments.
            numbers: Ids of the memory in the arguments.
            sent: Data to write into memory before the call.
            mail: Number of calls of `write` that must arrive before this call.
            forgotten: Ids of memory to release.
        """
        with self._arrival:
            for number in forgotten:
                self._memories.pop(number, None)
                self._mail.pop(number, None)
        return self._reply(self._call, method, content, numbers, sent, mail)

    def _call(
        self, method: str, content: bytes, numbers: list[int], sent: list[Span], mail: int
    ) -> object:
        def memory_of(k: int, nbytes: int) -> Memory:
            return self._memories.setdefault(numbers[k], PrivateMemory(nbytes))

        args = unpack(content, memory_of)
        with self._arrival:
            self._arrival.wait_for(lambda: self._arrived >= mail)
            known = self._mail.keys() & self._memories.keys()
            letters = [self._mail.pop(number) for number in known]
        for spans in (*letters, sent):
            fill(spans, self._memories)
        return self._context.run(self._worker.method(method), args)

    def _reply(self, function: Callable[..., Any], *args: object) -> Reply:
        """Call a function and return the reply; after a failure, return only the failure."""
        result, written = None, list[Span]()
        if self._failure is None:
            try:
                value = function(*args)
                result = None if value is None else encoded(value)
                written = spans_of(self._worker.written(), self._memories)
            except BaseException as error:
                self._failure = describe_failure(error)
        numbers = self._context.numbers
        return Reply(result, self._failure, written, numbers[BEATS], numbers[STEPS])

    def close(self) -> Reply:
        """Close the worker."""
        try:
            self._worker.close()
        except BaseException as error:
            warn(str(error))
        self._worker = Worker()
        return self._reply(lambda: None)

    def _no_memory(self, k: int, nbytes: int) -> NoReturn:
        raise TypeError("memory can only be an argument of calls")

    def write(self, number: int, spans: list[tuple[int, Array]]) -> None:
        """Store published data, replacing all earlier data of this memory."""
        with self._arrival:
            self._mail[number] = [(number, *span) for span in spans]
            self._arrived += 1
            self._arrival.notify_all()

    def cancel(self, count: int) -> None:
        """Cancel the first `count` calls."""
        self._context.numbers[CANCELLED] = count

    def pulse(self) -> tuple[int, int]:
        """Return the progress counter and the number of environment steps."""
        return self._context.numbers[BEATS], self._context.numbers[STEPS]


def flat(memory: Memory) -> Array:
    """Return memory as a flat array of bytes."""
    return np.frombuffer(memory.buffer, np.uint8)


def address(array: Array) -> int:
    """Return the address of the first element."""
    return int(array.__array_interface__["data"][0])


def spans_of(arrays: Iterable[Array], memories: dict[int, Memory]) -> list[Span]:
    """Return the spans of contiguous arrays in their memory.

    Arrays over released memory are skipped.
    """
    found = []
    places = [(address(flat(memory)), memory.nbytes, k) for k, memory in memories.items()]
    for array in arrays:
        for start, nbytes, number in places:
            offset = address(array) - start
            if array.nbytes and 0 <= offset < nbytes:
                found.append((number, offset, array.reshape(-1).view(np.uint8)))
    return found


def fill(spans: Iterable[Span], memories: dict[int, Memory]) -> None:
    """Write spans into memory."""
    for number, start, content in spans:
        flat(memories[number])[start : start + len(content)] = content
