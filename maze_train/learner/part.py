"""The minibatches of a single learner, the interfaces of modules, and statistics by module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import nn

from maze_train.core.errors import ConfigError
from maze_train.core.events import Event, Statistics
from maze_train.core.types import Tensor
from maze_train.learner.optimizers import ModuleOptimizer

Optimizers: TypeAlias = Mapping[tuple[str, str], ModuleOptimizer]
ShardBatch: TypeAlias = Callable[[Any, int, int], tuple[Any, int, int]]


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
        """The rows that the learner computes, of that many that have no part in a minibatch."""
        return slice(0, size)

    def join_rows(self, values: Tensor, size: int) -> Tensor:
        """Values of all rows, `[size, ...]`, of those of `rows`."""
        return values

    def whole_size(self, size: int) -> int:
        """Return the size of the whole minibatch; `size` of its samples are the learner's."""
        return size

    def draw(self, draw: Callable[[int], Tensor], size: int) -> Tensor:
        """Random numbers of the learner's samples, out of those for the whole minibatch.

        Args:
            draw: Draws numbers for that many samples, `[n, ...]`.
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


@runtime_checkable
class HasPolicy(Protocol):
    """A module with a policy and the distribution of its actions."""

    policy: Any
    distribution: Any


@runtime_checkable
class HasStateValues(Protocol):
    """A module with a critic of states."""

    critic: Any
    value_head: Any


@runtime_checkable
class HasActionValues(Protocol):
    """A module with critics of actions."""

    critics: Any
    target_critics: Any


@runtime_checkable
class HasTargets(Protocol):
    """A module with target networks."""

    def update_targets(self, tau: float) -> None:
        """Move the targets towards the networks that are trained, by a share of tau."""


@runtime_checkable
class HasOwnLoss(Protocol):
    """A module that brings its own loss, whatever the algorithm is."""

    def compute_self_supervised_loss(
        self, batch: Any, statistics: Statistics
    ) -> Tensor | Mapping[str, Tensor]:
        """Loss of a minibatch, 0-d, or its named terms."""


def check_apis(learner: str, required: Sequence[type], module_id: str, module: nn.Module) -> None:
    """Refuse a module that lacks what a learner needs, see `Learner.check_module`.

    Args:
        learner: Name of the learner.
        required: Protocols above that the module has to satisfy.
        module_id: Its id.
        module: The module.
    """
    for api in required:
        names = [*getattr(api, "__annotations__", {}), *vars(api)]
        missing = [n for n in names if not n.startswith("_") and not hasattr(module, n)]
        if missing:
            problem = (
                f"{learner} needs {api.__name__} of a module that learns, but "
                f"{type(module).__name__} has no {' and no '.join(missing)}; "
                "add_module(..., frozen=True), or policies.<id>.frozen=true, takes any"
            )
            raise ConfigError("module", problem, module_id)


class OwnStatistics(Statistics):
    """Records into other statistics what belongs to one of several owners, under its name.

    Args:
        statistics: Take the values.
        owner: Name of the owner, such as a policy.
    """

    __slots__ = ("_base", "_events", "_owner")

    def __init__(self, statistics: Statistics, owner: str) -> None:
        super().__init__()
        self._base = statistics
        self._owner = owner
        self._events: dict[str, Event] = {}

    def record(self, event: Event, value: float | Tensor, weight: float | None = None) -> None:
        """Add one value, see `Statistics.record`; without a weight it has the usual one."""
        own = self._events.get(event.tag)
        if own is None:
            own = self._events[event.tag] = event.of_owner(self._owner)
        self._base.record(own, value, *(() if weight is None else (weight,)))
