"""Metrics of every learner, and per-module statistics."""

from __future__ import annotations

from maze_train.core.events import Event, EventInterface, Statistics
from maze_train.core.types import Tensor
from maze_train.learner.modules import DEFAULT_MODULE


class LearnerEvents(EventInterface, prefix="train"):
    """Metrics of every learner."""

    grad_norm = Event("L2 norm of the gradient before clipping, mean over minibatches.")
    grad_norm_clipped = Event("L2 norm of the gradient after clipping; empty without clipping.")
    gradient_steps = Event("Gradient steps taken.", reduce="sum")
    learning_rate = Event("Learning rate of the first optimizer in the last update.", reduce="last")
    skipped_steps = Event("Gradient steps skipped because of non-finite gradients.", reduce="sum")
    zeroed_gradients = Event("Non-finite gradient entries replaced by 0.", reduce="sum")
    compile_s = Event("Compilation time (`algorithm.compile`) in seconds.", reduce="sum")
    loss = Event("Terms of a loss with several terms, as `train/loss/<term>`.")


class OwnerStatistics(Statistics):
    """Wrapper for statistics that adds the owner's name to each metric.

    Args:
        statistics: Statistics that receive the values.
        owner: Name of the owner, such as a policy.
    """

    __slots__ = ("_base", "_events", "_owner")

    def __init__(self, statistics: Statistics, owner: str) -> None:
        super().__init__()
        self._base = statistics
        self._owner = owner
        self._events: dict[str, Event] = {}

    def record(self, event: Event, value: float | Tensor, weight: float | None = None) -> None:
        """Add one value, see `Statistics.record`; if `weight` is None, the default is used."""
        own = self._events.get(event.tag)
        if own is None:
            own = self._events[event.tag] = event.of_owner(self._owner)
        self._base.record(own, value, *(() if weight is None else (weight,)))

    def keep(self, name: str, value: Tensor, owner: str | None = None) -> None:
        """Hand a tensor of a loss to the learner; by default, as the owner's tensor."""
        self._base.keep(name, value, owner or self._owner)


def statistics_of(module_id: str, statistics: Statistics) -> Statistics:
    """Return statistics that record under the ID of a module, except for the default module."""
    return statistics if module_id == DEFAULT_MODULE else OwnerStatistics(statistics, module_id)
