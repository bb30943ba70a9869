"""Values with large tensors for all workers of a pool, through memory that is written once."""

from __future__ import annotations

import io
import pickle
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from maze_train.workers.memory import padded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maze_train.types import Array, Tensor
    from maze_train.workers.memory import SharedMemory
    from maze_train.workers.pool import WorkerPool


class Parcels:
    """Calls methods of all workers with one value, whose tensors and arrays they share.

    A method gets the memory, or None if it is that of the parcel before, and two arguments of which
    `unpack` makes the value. Its tensors are views of the memory: they change with the next parcel.

    Args:
        pool: The workers.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self._memory: SharedMemory | None = None
        self._have_memory: set[int] = set()

    def send(self, method: str, value: Any) -> None:
        """Call a method of all workers, which have no other calls; does not wait for results.

        Args:
            method: Name of the method.
            value: What it gets; functions that were defined anywhere are fine.
        """
        content, buffers = _packed(value)
        sizes = [buffer.nbytes for buffer in buffers]
        nbytes = sum(map(padded, sizes))
        memory = self._with_room_for(nbytes)
        for buffer, start in zip(buffers, _starts(sizes), strict=True):
            memory.buffer[start : start + buffer.nbytes] = buffer
        self.pool.publish(memory, [np.frombuffer(memory.buffer, np.uint8, nbytes)])
        for index in range(len(self.pool)):
            new = None if index in self._have_memory else memory
            self.pool.call(index, method, new, content, sizes)
            self._have_memory.add(index)

    def _with_room_for(self, nbytes: int) -> Any:
        """The memory; a larger one if it is too small."""
        if self._memory is None or self._memory.nbytes < nbytes:
            self.close()
            self._memory = self.pool.allocate(max(nbytes, 1))  # type: ignore[assignment]  # the workers live in processes
            self._have_memory.clear()
        return self._memory

    def forget(self, index: int) -> None:
        """Note that a worker was started again, and has no memory."""
        self._have_memory.discard(index)

    def close(self) -> None:
        """Close the descriptor of the memory; calling it again does nothing."""
        if self._memory is not None:
            self._memory.close()


def unpack(memory: SharedMemory, content: bytes, sizes: Sequence[int]) -> Any:
    """The value of a parcel.

    Args:
        memory: What the worker took last.
        content: The value without its arrays.
        sizes: Bytes of these.
    """
    view = memoryview(memory.buffer)
    places = zip(_starts(sizes), sizes, strict=True)
    return pickle.loads(content, buffers=[view[start : start + size] for start, size in places])


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where arrays of these sizes begin."""
    return [0, *accumulate(map(padded, sizes))][: len(sizes)]


def _packed(value: Any) -> tuple[bytes, list[memoryview]]:
    """A value as bytes, without its tensors and arrays, and these."""
    import cloudpickle  # Imported here, since only learners in processes need it.

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # untyped
        def reducer_override(self, obj: Any) -> Any:
            is_plain = type(obj) is torch.Tensor and not obj.requires_grad
            if is_plain and obj.dtype is not torch.bfloat16:  # NumPy has no such numbers
                return _tensor, (obj.detach().cpu().contiguous().numpy(),)
            return super().reducer_override(obj)

    file, buffers = io.BytesIO(), []
    Pickler(file, 5, buffer_callback=lambda buffer: buffers.append(buffer.raw())).dump(value)
    return file.getvalue(), buffers


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(array)
