"""Memory that several processes map; it is freed when the last of them ends."""

from __future__ import annotations

import mmap
import os
import tempfile
from math import prod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt


CACHE_LINE = 64

Key = TypeVar("Key")


def padded(nbytes: int, unit: int = CACHE_LINE) -> int:
    """`nbytes` rounded up to whole units."""
    return -(-nbytes // unit) * unit


class ArrayLayout(Generic[Key]):
    """Layout of arrays in one piece of memory.

    It follows from the arguments alone, so processes that know these agree on it. Every array
    begins on a cache line of its own, so that processes do not contend for the flags of others.

    Args:
        specs: Shape and data type of each array, in their order.

    Attributes:
        nbytes: Bytes that the arrays take.
    """

    def __init__(self, specs: Mapping[Key, tuple[tuple[int, ...], np.dtype[Any]]]) -> None:
        self._places: dict[Key, tuple[tuple[int, ...], np.dtype[Any], int]] = {}
        self.nbytes = 0
        for key, (shape, dtype) in specs.items():
            self._places[key] = (shape, dtype, self.nbytes)
            self.nbytes += padded(prod(shape) * dtype.itemsize)

    def arrays(self, memory: Any, offset: int = 0) -> dict[Key, npt.NDArray[Any]]:
        """Views of a buffer, the first of which begins at an offset."""
        return {
            key: np.ndarray(shape, dtype, memory, offset + start)
            for key, (shape, dtype, start) in self._places.items()
        }


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
