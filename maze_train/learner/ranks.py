"""Ranks: the processes that train one policy, and the values they exchange."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from maze_train.core.errors import ConfigError, TrainingError
from maze_train.core.state_files import dumps, loads
from maze_train.core.types import Tensor, tree_leaves, tree_map, trees_of, with_trees
from maze_train.learner.process_group import leave

T = TypeVar("T")
Batch = TypeVar("Batch")

RANKS = "ranks"
"""Key of states with one part per rank."""

SAME_COMMAND = (
    "start all processes with the same command, and share the run directory between machines"
)
"""Remedy for settings that differ between ranks."""

LOST = "another process of the run ended, or did not answer in time"


class RanksLostError(TrainingError):
    """Raised if another rank has ended or hangs."""


class Share(NamedTuple):
    """Samples of a minibatch that a rank uses."""

    size: int
    """Number of samples of this rank; 0 if it computes another rank's loss with weight 0."""

    whole: int
    """Number of samples of the minibatch."""

    @property
    def fraction(self) -> float:
        """Weight of this rank's mean in the mean over the minibatch."""
        return self.size / self.whole


class Ranks(ABC):
    """Processes that train one policy. Every rank must make the same calls in the same order.

    A run and its learners may have different ranks: torchrun starts ranks of the run, which are
    ranks of its learners too; a `LearnerGroup` starts ranks of the learners only. Ranks exchange
    tensors, JSON values (tuples become lists) and states of checkpoints, but no pickles, because
    other processes may reach their ports.

    Attributes:
        rank: Rank of this process; rank 0 writes all files and prints to the console.
        count: Number of ranks.
        local_count: Number of ranks on this machine, which share its main memory and disks.
        is_shared: Whether each rank has a part of the environments.
    """

    rank, count, local_count = 0, 1, 1
    is_shared = False

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks; may overwrite `tensor`."""

    @abstractmethod
    def gather_tensor(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which must have the same shape."""

    @abstractmethod
    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, which must be JSON values."""

    @abstractmethod
    def first(self, function: Callable[[], T]) -> T:
        """Call a function in rank 0 and return the result, a JSON value, in all ranks."""

    @abstractmethod
    def largest(self, number: int) -> int:
        """Return the largest number of all ranks."""

    @abstractmethod
    def state(self, own: T) -> T | dict[str, list[T]] | None:
        """Return the states of all ranks in rank 0, and None in other ranks.

        States may contain the types of `core.state_files.dumps`.
        """

    def own_state(self, state: Any) -> Any:
        """Return the state of this rank from a result of `state`.

        Raises:
            ConfigError: If the state was saved by a different number of ranks.
        """
        count = len(state[RANKS]) if isinstance(state, dict) and RANKS in state else 1
        if count != self.count:
            raise ConfigError(
                "resume",
                f"the number of processes was {count} and is now {self.count}, but each process "
                "has separate environments; use "
                + ("maze-run" if count == 1 else f"torchrun with {count} processes in total"),
            )
        return state if self.count == 1 else state[RANKS][self.rank]

    def check_same(self, key: str, value: object, remedy: str = SAME_COMMAND) -> None:
        """Check that a value has the same `repr` in all ranks.

        Args:
            key: Name of the value for the error message.
            value: Value of this rank.
            remedy: How to fix the difference.

        Raises:
            ConfigError: If the values differ.
        """
        values = self.gather(repr(value))
        if others := [rank for rank, other in enumerate(values) if other != values[0]]:
            raise ConfigError(key, f"differs between rank 0 and {others}; {remedy}")

    @property
    def is_first(self) -> bool:
        """Whether this process has rank 0."""
        return self.rank == 0

    def stream(self, name: str) -> str:
        """Return the name of a random stream that differs between ranks."""
        return name if self.is_first else f"rank {self.rank}/{name}"

    def device(self, name: str, key: str) -> str:
        """Return the device of this rank for a device name such as `cuda`.

        Args:
            name: Name of the device.
            key: Name of the setting for error messages.
        """
        return name

    def rows(self, size: int) -> slice:
        """Return this rank's slice of `size` rows, at least one; slices have similar sizes."""
        start, stop = self._own_rows(size)
        return slice(start, max(stop, start + 1))

    def join_rows(self, values: Tensor, size: int) -> Tensor:
        """Return the values of all rows `[size, ...]`, given the values of this rank's slice."""
        if self.count == 1:
            return values
        start, stop = self._own_rows(size)
        whole = values.new_zeros(size, *values.shape[1:])
        whole[start:stop] = values[: stop - start]
        return self.sum(whole)

    def _own_rows(self, size: int) -> tuple[int, int]:
        return size * self.rank // self.count, size * (self.rank + 1) // self.count

    def whole(self, kept: dict[str, dict[str, Tensor]], shares: dict[str, Share]) -> None:
        """Replace the tensors of `Statistics.keep` by those of the whole minibatch.

        Means (0-d) are averaged, weighted by numbers of samples; vectors are joined.

        Args:
            kept: Tensors by name and module.
            shares: Shares of this rank by module.
        """
        for own in kept.values() if self.count > 1 else ():
            for module_id, value in own.items():
                share = shares[module_id]
                if not value.ndim:
                    own[module_id] = self.sum(value * share.fraction)
                    continue
                joined = value.new_zeros(share.whole, *value.shape[1:])
                if share.size:
                    joined[self.rank :: self.count] = value
                own[module_id] = self.sum(joined)

    @abstractmethod
    def started(self, run_dir: str) -> None:
        """Store the directory of the run for a restart."""

    @abstractmethod
    def leave(self) -> None:
        """End the exchange with the other ranks; a second call does nothing."""


class OneRank(Ranks):
    """A single process."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor

    def gather_tensor(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensor."""
        return [tensor]

    def gather(self, value: T) -> list[T]:
        """Return the value."""
        return [value]

    def first(self, function: Callable[[], T]) -> T:
        """Call the function."""
        return function()

    def largest(self, number: int) -> int:
        """Return the number."""
        return number

    def state(self, own: T) -> T | dict[str, list[T]] | None:
        """Return the state."""
        return own

    def started(self, run_dir: str) -> None:
        """Nothing restarts the process."""

    def leave(self) -> None:
        """There are no other ranks."""


class GroupRanks(Ranks):
    """Ranks in a process group of `torch.distributed`, which must exist.

    Args:
        rank: Rank of this process.
        count: Number of ranks.
        beat: Heartbeat, called before each exchange.
    """

    def __init__(self, rank: int, count: int, beat: Callable[[], None] = lambda: None) -> None:
        self.rank, self.count, self._beat = rank, count, beat

    def sum(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by the sum of the tensors of all ranks."""
        self._exchange(dist.all_reduce, tensor)
        return tensor

    def gather_tensor(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which must have the same shape."""
        if not tensor.numel():
            return [tensor] * self.count
        # Collective operations do not support all dtypes, so the tensor is sent as bytes.
        own = tensor.contiguous().view(torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.count)]
        self._exchange(dist.all_gather, found, own)
        return [each.view(tensor.dtype) for each in found]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, which must be JSON values."""
        own, sizes = self._padded(json.dumps(value, default=float).encode())
        parts = zip(self.gather_tensor(own), sizes, strict=True)
        return [json.loads(part[:size].numpy().tobytes()) for part, size in parts]

    def first(self, function: Callable[[], T]) -> T:
        """Call a function in rank 0 and return the result, a JSON value, in all ranks."""
        text = json.dumps(function(), default=float).encode() if self.is_first else b""
        data, _ = self._padded(text)
        self._exchange(dist.broadcast, data, 0)
        result: T = json.loads(data.numpy().tobytes())
        return result

    def _padded(self, data: bytes) -> tuple[Tensor, list[int]]:
        """Return data padded to the largest size of all ranks, `[n]` uint8, and all sizes."""
        sizes = [int(size) for size in self.gather_tensor(torch.tensor([len(data)]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return padded, sizes

    def largest(self, number: int) -> int:
        """Return the largest number of all ranks."""
        found = torch.tensor([number])
        self._exchange(dist.all_reduce, found, dist.ReduceOp.MAX)
        return int(found)

    def state(self, own: T) -> T | dict[str, list[T]] | None:
        """Return the states of all ranks in rank 0, and None in other ranks."""
        if self.count == 1:
            return own
        data, sizes = self._padded(dumps({"state": own}))
        parts = [torch.empty_like(data) for _ in sizes] if self.is_first else None
        self._exchange(dist.gather, data, parts)
        if parts is None:
            return None
        contents = [part[:size].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]
        return {RANKS: [loads(content, "state of a rank")["state"] for content in contents]}

    def started(self, run_dir: str) -> None:
        """The ranks of a `LearnerGroup` have no run directory."""

    def leave(self) -> None:
        """Leave the process group, which the other ranks detect."""
        leave()

    def _exchange(self, call: Callable[..., object], *args: object) -> None:
        """Make a collective call.

        Raises:
            RanksLostError: If the exchange fails.
        """
        self._beat()
        try:
            call(*args)
        except RuntimeError as error:
            # Subclasses such as OutOfMemoryError are errors of this process.
            if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
                raise
            raise RanksLostError(f"{LOST}; the exchange failed with: {error}") from error


def own_rows(rows: Tensor, rank: int, count: int) -> Tensor:
    """Return every `count`-th row from row `rank` on; if there is none, return the first row."""
    return rows[rank::count] if len(rows) > rank else rows[:1]


def shard_rows(batch: Batch, rank: int, count: int) -> tuple[Batch, int, int]:
    """Return a shard of a dataclass of tensors `[n, ...]` or mappings of tensors.

    Args:
        batch: The minibatch.
        rank: Index of the shard.
        count: Number of shards.

    Returns:
        The shard (the first row of the batch if the shard is empty), the number of rows in the
        shard, and the number of rows in the batch.

    Raises:
        TrainingError: If the batch is not a dataclass of tensors, or row counts differ.
    """
    trees = {name: tree for name, tree in trees_of(batch).items() if tree_leaves(tree)}
    sizes = {len(leaf) for tree in trees.values() for leaf in tree_leaves(tree)}
    if len(sizes) != 1:
        raise TrainingError(
            f"a minibatch of the type {type(batch).__name__} cannot be sharded: expected a "
            "dataclass of tensors with one row per sample, a custom Learner.shard method, or "
            "learner_group.n_learners=1"
        )
    own = {name: tree_map(lambda x: own_rows(x, rank, count), t) for name, t in trees.items()}
    size = sizes.pop()
    return with_trees(batch, own), len(range(rank, size, count)), size
