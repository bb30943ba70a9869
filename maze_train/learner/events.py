"""Metrics of every learner, and per-module statistics."""

from __future__ import annotations

from maze_train.core.events import Event, EventInterface, Statistics
from maze_train.core.types import Tensor
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.learner.ranks import Share


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
    """Wrapper for statistics that adds the owner's name to each metric, and weights by samples.

    Args:
        statistics: Statistics that receive the values.
        owner: Name of the owner, such as a policy; nothing is added for the default module.
        share: Samples of this rank; values are means over these samples.
    """

    __slots__ = ("_base", "_events", "_owner", "_share")

    def __init__(self, statistics: Statistics, owner: str, share: Share | None = None) -> None:
        super().__init__()
        self._base, self._owner, self._share = statistics, owner, share
        self._events: dict[str, Event] = {}

    def record(self, event: Event, value: float | Tensor, weight: float | None = None) -> None:
        """Add one value, see `Statistics.record`, unless this rank has no samples.

        If `weight` is None, it is the fraction of the samples of this rank.
        """
        own = self._events.get(event.tag)
        if own is None:
            is_default = self._owner == DEFAULT_MODULE
            own = self._events[event.tag] = event if is_default else event.of_owner(self._owner)
        if self._share is None:
            self._base.record(own, value, 1.0 if weight is None else weight)
        elif self._share.size:
            self._base.record(own, value, self._share.fraction if weight is None else weight)

    def keep(self, name: str, value: Tensor, owner: str | None = None) -> None:
        """Hand a tensor of a loss to the learner; by default, as the owner's tensor."""
        self._base.keep(name, value, owner or self._owner)


def statistics_of(module_id: str, statistics: Statistics, share: Share | None = None) -> Statistics:
    """Return statistics that record under the ID of a module, except for the default module.

    Args:
        module_id: The module.
        statistics: Statistics that receive the values.
        share: Share of this rank in the minibatch; None: the whole minibatch.
    """
    if module_id == DEFAULT_MODULE and share is None:
        return statistics
    return OwnerStatistics(statistics, module_id, share)
