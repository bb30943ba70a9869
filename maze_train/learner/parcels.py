"""Values with large tensors for all workers of a pool, through memory that is written once."""

from __future__ import annotations

import io
import pickle
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from maze_train.workers.memory import padded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maze_train.types import Array, Tensor
    from maze_train.workers.memory import SharedMemory
    from maze_train.workers.pool import WorkerPool


class Parcels:
    """Calls methods of all workers with one value, whose tensors and arrays they share.

    A worker has the method `take_memory(memory)`, and makes the value of the two arguments of any
    other call by `unpack`. The tensors are views of the memory: they change with the next parcel.

    Args:
        pool: The workers.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._memory: SharedMemory | None = None

    def send(self, method: str, value: Any) -> None:
        """Call a method of all workers, which have no other calls; does not wait for results.

        Args:
            method: Name of the method.
            value: What it gets; functions that were defined anywhere are fine.
        """
        content, buffers = _packed(value)
        sizes = [buffer.nbytes for buffer in buffers]
        memory = self._with_room_for(sum(map(padded, sizes)))
        for buffer, start in zip(buffers, _starts(sizes), strict=True):
            memory.buffer[start : start + buffer.nbytes] = buffer
        for index in range(len(self._pool)):
            self._pool.call(index, method, content, sizes)

    def _with_room_for(self, nbytes: int) -> Any:
        """The memory; a larger one if it is too small."""
        if self._memory is None or self._memory.nbytes < nbytes:
            self.close()
            self._memory = memory = self._pool.allocate(max(nbytes, 1))  # type: ignore[assignment]  # the workers live in processes
            self._pool.call_all("take_memory", memory)
        return self._memory

    def give_memory(self, index: int) -> None:
        """Let a worker that was started again take the memory."""
        if self._memory is not None:
            self._pool.ask(index, "take_memory", self._memory)

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
