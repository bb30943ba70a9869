"""Interface for data-parallel gradient steps, and the implementation for a single learner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from maze_train.core.events import Statistics
from maze_train.core.types import Tensor
from maze_train.learner.optimizers import ModuleOptimizer

Batch = TypeVar("Batch")
Optimizers: TypeAlias = Mapping[tuple[str, str], ModuleOptimizer]


class SingleLearner:
    """Gradient steps of a single learner on whole minibatches; see `Shard` for several learners."""

    is_shared = False
    """Whether the learner is one of several."""

    def begin(self, statistics: Statistics) -> Statistics:
        """Begin an update; return the statistics for its losses."""
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
        """Return the values of all samples `[size, ...]`, given those of this learner's slice."""
        return values

    def whole_size(self, size: int) -> int:
        """Return the size of the whole minibatch, given the number of this learner's samples."""
        return size

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over the whole minibatch, given the mean over this learner's samples."""
        return value

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all samples, given the values of this learner's samples, `[n]`."""
        return values

    def join_gradients(self, active: Sequence[ModuleOptimizer], optimizers: Optimizers) -> None:
        """Average gradients over the samples of all learners, in place.

        Args:
            active: Optimizers that take part in the gradient step.
            optimizers: All optimizers, by module and name.
        """

    def end(self, statistics: Statistics) -> None:
        """End an update; `statistics` receives the recorded values."""
