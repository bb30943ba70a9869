"""Interfaces for data-parallel training, and their implementations for a single process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from maze_train.core.errors import ConfigError
from maze_train.core.events import Statistics
from maze_train.core.types import Tensor
from maze_train.learner.optimizers import ModuleOptimizer

Batch = TypeVar("Batch")
T = TypeVar("T")
Optimizers: TypeAlias = Mapping[tuple[str, str], ModuleOptimizer]


class SingleLearner:
    """Strategy of a single learner, with whole minibatches; `Shard` is for several learners."""

    is_shared = False
    """Whether there are several learners."""

    def begin(self, statistics: Statistics) -> Statistics:
        """Begin an update, and return the statistics in which its losses are recorded."""
        return statistics

    def take(
        self,
        shard: Callable[[Batch, int, int], tuple[Batch, int, int]],
        minibatch: Mapping[str, Batch],
    ) -> Mapping[str, Batch]:
        """Return the samples of this learner; `shard` is `Learner.shard`."""
        return minibatch

    def turn_to(self, module_id: str) -> None:
        """Select the module for the next calls."""

    def rows(self, size: int) -> slice:
        """Return the slice of `size` samples that this learner evaluates in `preprocess`."""
        return slice(0, size)

    def join_rows(self, values: Tensor, size: int) -> Tensor:
        """Return the values of all samples `[size, ...]`, given the values of this slice."""
        return values

    def whole_size(self, size: int) -> int:
        """Return the size of the whole minibatch, given the number of this learner's samples."""
        return size

    def whole(self, kept: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of `Statistics.keep` for the whole minibatch.

        Means (0-d) are averaged over the learners, weighted by their numbers of samples; vectors
        are joined.
        """
        return kept

    def join_gradients(self, active: Sequence[ModuleOptimizer], optimizers: Optimizers) -> None:
        """Average gradients over the samples of all learners, in place.

        Args:
            active: Optimizers that take part in the gradient step.
            optimizers: All optimizers, by module and name.
        """

    def end(self, statistics: Statistics) -> None:
        """End an update; `statistics` receives the recorded values."""


RANKS = "ranks"
"""Key of states with one part per process."""


SAME_COMMAND = (
    "start all processes with the same command, and share the run directory between machines"
)
"""Remedy for settings that differ between processes."""


class SingleProcess:
    """Interface between the processes of a run, for a run with a single process.

    `TorchrunProcesses` implements this interface for several processes. Every process must make the
    same calls in the same order.
    """

    rank = 0
    """Rank of this process; the process with rank 0 writes all files and prints to the console."""

    count = 1
    """Number of processes."""

    local_count = 1
    """Number of processes on this machine, which share its main memory and disks."""

    is_shared = False
    """Whether the run may have several processes."""

    @property
    def is_first(self) -> bool:
        """Whether this process has rank 0."""
        return self.rank == 0

    def stream(self, name: str) -> str:
        """Return the name of a random stream that differs between processes."""
        return name if self.is_first else f"rank {self.rank}/{name}"

    def device(self, name: str, key: str) -> str:
        """Return the device of this process for a device name such as `cuda`.

        Args:
            name: Name of the device.
            key: Name of the setting for error messages.
        """
        return name

    def first(self, function: Callable[[], T]) -> T:
        """Call a function in the first process and return the result in all processes."""
        return function()

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes; every process must call this method."""
        return [value]

    def gather_tensor(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, which must have the same shape."""
        return [tensor]

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors of all processes; may overwrite `tensor`."""
        return tensor

    def largest(self, number: int) -> int:
        """Return the largest number of all processes; every process must call this method."""
        return number

    def state(self, own: T) -> T | dict[str, list[T]] | None:
        """Return the states of all processes in the first process, and None in other processes."""
        return own

    def own_state(self, state: Any) -> Any:
        """Return the state of this process from a result of `state`.

        Raises:
            ConfigError: If the state was saved by a different number of processes.
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
        """Check that a value is the same in all processes.

        Args:
            key: Name of the value for the error message.
            value: Value of this process.
            remedy: How to fix the difference.

        Raises:
            ConfigError: If the values differ.
        """

    def started(self, run_dir: str) -> None:
        """Store the directory of the run for a restart."""

    def leave(self) -> None:
        """End the exchange with the other processes; a second call does nothing."""
