"""How a learner takes part in a gradient step: here alone, with the whole minibatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from maze_train.core.events import Statistics
from maze_train.core.types import Tensor
from maze_train.learner.optimizers import ModuleOptimizer

Batch = TypeVar("Batch")
Optimizers: TypeAlias = Mapping[tuple[str, str], ModuleOptimizer]


class SingleLearner:
    """The whole minibatch; used with a single learner. `Shard` is one of several learners."""

    is_shared = False
    """Whether there are other learners."""

    def begin(self, statistics: Statistics) -> Statistics:
        """Begin an update; return the statistics that its losses record in."""
        return statistics

    def take(
        self,
        shard: Callable[[Batch, int, int], tuple[Batch, int, int]],
        minibatch: Mapping[str, Batch],
    ) -> Mapping[str, Batch]:
        """Return the samples that this learner uses; `shard` is `Learner.shard`."""
        return minibatch

    def turn_to(self, module_id: str) -> None:
        """Select the module that the next calls are about."""

    def rows(self, size: int) -> slice:
        """Return the rows that this learner evaluates, of `size` rows outside of minibatches."""
        return slice(0, size)

    def join_rows(self, values: Tensor, size: int) -> Tensor:
        """Return the values of all rows, `[size, ...]`, given those of `rows`."""
        return values

    def whole_size(self, size: int) -> int:
        """Return the size of the whole minibatch; this learner has `size` of its samples."""
        return size

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over the whole minibatch, given that over the learner's samples, 0-d."""
        return value

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all samples, given those of the learner's samples, `[n]`."""
        return values

    def join_gradients(self, active: Sequence[ModuleOptimizer], optimizers: Optimizers) -> None:
        """Replace gradients of means over the learner's samples by those over all samples.

        Args:
            active: Optimizers that take part in the gradient step.
            optimizers: All optimizers, by module and name.
        """

    def end(self, statistics: Statistics) -> None:
        """End the minibatches of an update with these statistics."""
