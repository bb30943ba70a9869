"""The rows of each minibatch that one of several learners computes, and what they exchange."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from maze_train.errors import TrainingError
from maze_train.events import Statistics
from maze_train.types import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

    from maze_train.events import Event
    from maze_train.learner.optimizers import ModuleOptimizer
    from maze_train.types import Tensor

    ShardBatch = Callable[[Any, int, int], tuple[Any, int, int]]


Batch = TypeVar("Batch")


class MadeFrom:
    """Notes the arguments of its constructor, of which another process makes a copy."""

    made_from: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Note the arguments."""
        made = super().__new__(cls)
        made.made_from = (args, kwargs)
        return made


class PeersLostError(Exception):
    """An exchange failed, as another learner ended or hangs."""


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

    def join_gradients(self, optimizers: Sequence[ModuleOptimizer]) -> None:
        """Replace gradients of means over the learner's samples by those over all."""

    def end(self, statistics: Statistics) -> None:
        """End the minibatches of an update; `statistics` are those of the update."""


class Shard(Part):
    """Every `count`-th sample, from the sample `rank` on, with losses that are means over samples.

    A gradient is the sum of those of the learners, weighted with their shares of the samples; one
    exchange takes it over the parameters of all optimizers. A learner without samples computes
    those of the first learner, with weight 0, so that all of them make the same exchanges.

    Args:
        rank: Number of the learner.
        count: Number of learners.
        beat: Called once per minibatch, as a sign of life.
    """

    is_shared = True

    def __init__(self, rank: int, count: int, beat: Callable[[], None] = lambda: None) -> None:
        self.rank, self.count, self._beat = rank, count, beat
        self.statistics = ShareStatistics()
        self._size, self._share = 0, 1.0

    def begin(self, statistics: Statistics) -> Statistics:
        """Begin with empty statistics of this part."""
        self.statistics = ShareStatistics()
        return self.statistics

    def take(self, shard: ShardBatch, minibatch: Mapping[str, Any]) -> Mapping[str, Any]:
        """This part of the minibatch of the only module.

        Raises:
            TrainingError: If there are several modules.
        """
        if len(minibatch) != 1:
            raise TrainingError(
                f"{len(minibatch)} modules in a minibatch: several learners train one module; "
                "expected learner_group.n_learners=1"
            )
        self._beat()
        (module_id, batch), *_ = minibatch.items()
        part, size, self._size = shard(batch, self.rank, self.count)
        self._share = self.statistics.share = size / self._size
        return {module_id: part}

    def whole_size(self, size: int) -> int:
        """Samples of the whole minibatch."""
        return self._size

    def draw(self, draw: Callable[[int], Tensor], size: int) -> Tensor:
        """This part of what is drawn for the whole minibatch."""
        return own_rows(draw(self._size), self.rank, self.count)

    def mean(self, value: Tensor) -> Tensor:
        """The mean of all learners, weighted with their shares."""
        return self._sum(value.detach() * self._share)

    def gather(self, values: Tensor) -> Tensor:
        """The values of all learners, each in its place."""
        whole = values.new_zeros(self._size)
        if self._share:
            whole[self.rank :: self.count] = values.detach()
        return self._sum(whole)

    def join_gradients(self, optimizers: Sequence[ModuleOptimizer]) -> None:
        """Sum the gradients of the learners, in place, as one vector."""
        gradients = [gradient for o in optimizers for gradient in o.gradients()]
        if not gradients:
            return
        if len(gradients) == 1 and gradients[0].is_contiguous():
            self._sum(gradients[0].mul_(self._share))
            return
        vector = self._sum(torch.cat([g.reshape(-1) for g in gradients]).mul_(self._share))
        pieces = torch.split(vector, [gradient.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))

    def end(self, statistics: Statistics) -> None:
        """Add the statistics of this part; those of the others come with their results."""
        statistics.merge(self.statistics)

    def _sum(self, values: Tensor) -> Tensor:
        try:
            dist.all_reduce(values)
        except RuntimeError as error:
            raise PeersLostError(str(error)) from error
        return values


class ShareStatistics(Statistics):
    """Statistics of a part: what has no weight counts by the part's share of the samples."""

    __slots__ = ("share",)

    def __init__(self) -> None:
        super().__init__()
        self.share = 1.0

    def record(self, event: Event, value: float | Tensor, weight: float | None = None) -> None:
        """Add one value, unless the part is empty; see `Statistics.record`.

        Args:
            event: Event of the value.
            value: The value, a mean over the samples of the part.
            weight: Samples behind the value; None: it is one per minibatch.
        """
        if self.share:
            super().record(event, value, self.share if weight is None else weight)


def own_rows(rows: Tensor, rank: int, count: int) -> Tensor:
    """Every `count`-th row from `rank` on; the first one, if there are too few."""
    return rows[rank::count] if len(rows) > rank else rows[:1]


def shard_rows(batch: Batch, rank: int, count: int) -> tuple[Batch, int, int]:
    """Rows of all tensors of a dataclass, `[n, ...]` each, alone or in mappings.

    Args:
        batch: The dataclass.
        rank: Number of the part.
        count: Number of parts.

    Returns:
        The part, with the first row if it has none; its number of rows; that of all.

    Raises:
        TrainingError: If the batch is none, or its tensors differ in their number of rows.
    """
    trees: dict[str, Any] = {}
    if is_dataclass(batch) and not isinstance(batch, type):
        trees = {f.name: getattr(batch, f.name) for f in fields(batch)}
    trees = {
        name: tree
        for name, tree in trees.items()
        if isinstance(tree, torch.Tensor) or (isinstance(tree, dict) and tree)
    }
    sizes = {len(leaf) for tree in trees.values() for leaf in tree_leaves(tree)}
    if len(sizes) != 1:
        raise TrainingError(
            f"a minibatch of the type {type(batch).__name__} can not be shared out: expected a "
            "dataclass of tensors with one row per sample, a method Learner.shard of your own, or "
            "learner_group.n_learners=1"
        )
    own = {name: tree_map(lambda x: own_rows(x, rank, count), t) for name, t in trees.items()}
    size = sizes.pop()
    part: Any = replace(batch, **own)  # type: ignore[type-var]  # checked above
    return part, len(range(rank, size, count)), size
