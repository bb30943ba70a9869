"""Data-parallel gradient steps, and transfer of values through shared memory."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from maze_train.core.events import Event, Statistics
from maze_train.core.types import Array, Tensor
from maze_train.learner.optimizers import ModuleOptimizer
from maze_train.learner.parallel import Batch, Optimizers, SingleLearner
from maze_train.spaces.columns import padded
from maze_train.workers.pool import Memory, SharedMemory, WorkerPool

Mapped: TypeAlias = SharedMemory | None


class PeersLostError(Exception):
    """Raised if a collective operation fails because another learner died or hung."""


class Shard(SingleLearner):
    """Data-parallel gradient steps on every `count`-th sample, starting at sample `rank`.

    Losses must be means over samples. One all-reduce per gradient step sums the gradients of all
    ranks, weighted by their fractions of the samples. A rank without samples computes rank 0's loss
    with weight 0, so that every rank joins each all-reduce.

    Args:
        rank: Rank of the learner.
        count: Number of learners.
        beat: Heartbeat, called once per minibatch.
    """

    is_shared = True

    def __init__(self, rank: int, count: int, beat: Callable[[], None] = lambda: None) -> None:
        self.rank, self.count, self._beat = rank, count, beat
        self.statistics = ShardStatistics()
        self._size, self._share = 0, 1.0
        # Size of the minibatch and fraction of its samples in this shard, by module.
        self._sizes: dict[str, tuple[int, float]] = {}

    def begin(self, statistics: Statistics) -> Statistics:
        """Begin an update with empty statistics of this shard."""
        self.statistics = ShardStatistics()
        return self.statistics

    def take(
        self,
        shard: Callable[[Batch, int, int], tuple[Batch, int, int]],
        minibatch: Mapping[str, Batch],
    ) -> Mapping[str, Batch]:
        """Return the shard of the minibatch of each module."""
        self._beat()
        self._sizes, shards = {}, {}
        for module_id, batch in minibatch.items():
            shards[module_id], size, whole = shard(batch, self.rank, self.count)
            self._sizes[module_id] = whole, size / whole
            self.turn_to(module_id)
        return shards

    def turn_to(self, module_id: str) -> None:
        """Select the module for the next calls."""
        self._size, self._share = self._sizes[module_id]
        self.statistics.share = self._share

    def rows(self, size: int) -> slice:
        """Return this learner's slice of at least one sample; slices have similar sizes."""
        start, stop = self._own_rows(size)
        return slice(start, max(stop, start + 1))

    def join_rows(self, values: Tensor, size: int) -> Tensor:
        """Return the values of the slices of all learners."""
        start, stop = self._own_rows(size)
        whole = values.new_zeros(size, *values.shape[1:])
        whole[start:stop] = values[: stop - start]
        return self._sum(whole)

    def _own_rows(self, size: int) -> tuple[int, int]:
        return size * self.rank // self.count, size * (self.rank + 1) // self.count

    def whole_size(self, size: int) -> int:
        """Return the size of the whole minibatch."""
        return self._size

    def whole(self, kept: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of `Statistics.keep` for the whole minibatch."""
        return {
            name: {module_id: self._whole(module_id, value) for module_id, value in own.items()}
            for name, own in kept.items()
        }

    def _whole(self, module_id: str, value: Tensor) -> Tensor:
        size, share = self._sizes[module_id]
        if not value.ndim:
            return self._sum(value * share)
        joined = value.new_zeros(size, *value.shape[1:])
        if share:
            joined[self.rank :: self.count] = value
        return self._sum(joined)

    def join_gradients(self, active: Sequence[ModuleOptimizer], optimizers: Optimizers) -> None:
        """Sum the gradients of all learners in place, with one all-reduce of a flat vector."""
        module_of = {id(optimizer): module_id for (module_id, _), optimizer in optimizers.items()}
        gradients = []
        for optimizer in active:
            _, share = self._sizes[module_of[id(optimizer)]]
            gradients += [gradient.mul_(share) for gradient in optimizer.gradients()]
        if not gradients:
            return
        if len(gradients) == 1 and gradients[0].is_contiguous():
            self._sum(gradients[0])
            return
        vector = self._sum(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        pieces = torch.split(vector, [gradient.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))

    def end(self, statistics: Statistics) -> None:
        """Merge the statistics of this shard into `statistics`; the group merges other shards."""
        statistics.merge(self.statistics)

    def _sum(self, values: Tensor) -> Tensor:
        try:
            dist.all_reduce(values)
        except RuntimeError as error:
            raise PeersLostError(str(error)) from error
        return values


class ShardStatistics(Statistics):
    """Statistics of a shard; by default, weighted by the fraction of samples in the shard."""

    __slots__ = ("share",)

    def __init__(self) -> None:
        super().__init__()
        self.share = 1.0

    def record(self, event: Event, value: float | Tensor, weight: float | None = None) -> None:
        """Add one value, unless the shard is empty; see `Statistics.record`.

        Args:
            event: Event of the value.
            value: The value, a mean over the samples of the shard.
            weight: Number of samples over which the value is averaged; None: one value per
                minibatch.
        """
        if self.share:
            super().record(event, value, self.share if weight is None else weight)


class SharedMessages:
    """Sends a value to all workers, with tensors and arrays in shared memory.

    The called method receives the memory (None if unchanged) and the two other arguments of
    `unpack`. Tensors of the value are views of the memory, which the next message overwrites.

    Args:
        pool: The workers.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self._memory: Memory | None = None
        self._have_memory: set[int] = set()

    def send(self, method: str, value: object) -> None:
        """Call a method of all idle workers, without waiting for results.

        Args:
            method: Name of the method.
            value: Argument of the method; may contain arbitrary functions (pickled by cloudpickle).
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

    def _with_room_for(self, nbytes: int) -> Memory:
        """Return shared memory of at least `nbytes`."""
        if self._memory is None or self._memory.nbytes < nbytes:
            self.close()
            self._memory = self.pool.allocate(max(nbytes, 1))
            self._have_memory.clear()
        return self._memory

    def forget(self, index: int) -> None:
        """Mark a worker as restarted; its next message includes the memory."""
        self._have_memory.discard(index)

    def close(self) -> None:
        """Close the file descriptor of the memory; a second call does nothing."""
        if self._memory is not None:
            self._memory.close()


def unpack(memory: Mapped, content: bytes, sizes: Sequence[int]) -> object:
    """Return the value of a message.

    Args:
        memory: Shared memory of the message.
        content: Pickled value without its arrays.
        sizes: Sizes of the arrays in bytes.
    """
    assert memory is not None
    view = memoryview(memory.buffer)
    places = zip(_starts(sizes), sizes, strict=True)
    return pickle.loads(content, buffers=[view[start : start + size] for start, size in places])


def _starts(sizes: Sequence[int]) -> list[int]:
    """Return the offset of each array, given the sizes of the arrays in bytes."""
    return [0, *accumulate(map(padded, sizes))][: len(sizes)]


def _packed(value: object) -> tuple[bytes, list[memoryview]]:
    """Pickle a value; return the bytes, and the buffers of tensors and arrays separately."""
    import cloudpickle  # Imported lazily: only groups of several learners need cloudpickle.

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # untyped
        def reducer_override(self, obj: object) -> object:
            is_plain = type(obj) is torch.Tensor and not obj.requires_grad
            # NumPy has no bfloat16, so such tensors are pickled.
            if type(obj) is torch.Tensor and is_plain and obj.dtype is not torch.bfloat16:
                return _tensor, (obj.detach().cpu().contiguous().numpy(),)
            return super().reducer_override(obj)

    file, buffers = io.BytesIO(), []
    Pickler(file, 5, buffer_callback=lambda buffer: buffers.append(buffer.raw())).dump(value)
    return file.getvalue(), buffers


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(array)
