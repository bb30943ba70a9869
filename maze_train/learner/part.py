"""What each minibatch is to a learner that is alone: all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

    from maze_train.events import Statistics
    from maze_train.learner.optimizers import ModuleOptimizer
    from maze_train.types import Tensor

    Optimizers = Mapping[tuple[str, str], ModuleOptimizer]
    ShardBatch = Callable[[Any, int, int], tuple[Any, int, int]]


class MadeFrom:
    """Notes the arguments of its constructor, of which another process makes a copy."""

    made_from: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Note the arguments."""
        made = super().__new__(cls)
        made.made_from = (args, kwargs)
        return made


class Part:
    """Everything: the part of a learner that is alone."""

    is_shared = False
    """Whether there are other learners."""

    def begin(self, statistics: Statistics) -> Statistics:
        """Begin an update; returns the statistics that its losses are recorded in."""
        return statistics

    def take(self, shard: ShardBatch, minibatch: Mapping[str, Any]) -> Mapping[str, Any]:
        """The samples of a minibatch that the learner computes; `shard` is `Learner.shard`."""
        return minibatch

    def turn_to(self, module_id: str) -> None:
        """Say which module has the loss that is computed next."""

    def rows(self, size: int) -> slice:
        """The rows that the learner computes, of so many that have no part in a minibatch."""
        return slice(0, size)

    def join_rows(self, values: Tensor, size: int) -> Tensor:
        """Values of all rows, `[size, ...]`, of those of `rows`."""
        return values

    def whole_size(self, size: int) -> int:
        """Samples of the whole minibatch, of which `size` are the learner's."""
        return size

    def draw(self, draw: Callable[[int], Tensor], size: int) -> Tensor:
        """Random numbers of the learner's samples, out of those for the whole minibatch.

        Args:
            draw: Draws numbers for so many samples, `[n, ...]`.
            size: Samples of the learner.
        """
        return draw(size)

    def mean(self, value: Tensor) -> Tensor:
        """The mean over the whole minibatch, of one over the learner's samples, 0-d."""
        return value

    def gather(self, values: Tensor) -> Tensor:
        """Values of all samples, of those of the learner, `[n]`."""
        return values

    def join_gradients(self, active: Sequence[ModuleOptimizer], optimizers: Optimizers) -> None:
        """Replace gradients of means over the learner's samples by those over all.

        Args:
            active: Optimizers that take part in the gradient step.
            optimizers: All, by module and name.
        """

    def end(self, statistics: Statistics) -> None:
        """End the minibatches of an update; `statistics` are those of the update."""
