"""Statistics that every learner emits, and statistics by module."""

from __future__ import annotations

from maze_train.core.events import Event, EventInterface, Statistics
from maze_train.core.types import Tensor
from maze_train.learner.modules import DEFAULT_MODULE


class LearnerEvents(EventInterface, prefix="train"):
    """Statistics that every learner emits."""

    grad_norm = Event("L2 norm of the gradient before clipping, mean over minibatches.")
    grad_norm_clipped = Event("The same after clipping; empty without.")
    gradient_steps = Event("Gradient steps taken.", reduce="sum")
    learning_rate = Event(
        "Learning rate of the last update, of the first optimizer of a module.", reduce="last"
    )
    skipped_steps = Event("Gradient steps left out: not finite.", reduce="sum")
    zeroed_gradients = Event("Entries of gradients that counted 0: not finite.", reduce="sum")
    compile_s = Event("Seconds that `algorithm.compile` took.", reduce="sum")
    loss = Event("Terms of a loss that has several, each as `train/loss/<term>`.")


class OwnStatistics(Statistics):
    """Records values in other statistics, under the name of one of several owners.

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
        """Add one value, see `Statistics.record`; None selects the default weight."""
        own = self._events.get(event.tag)
        if own is None:
            own = self._events[event.tag] = event.of_owner(self._owner)
        self._base.record(own, value, *(() if weight is None else (weight,)))


def statistics_of(module_id: str, statistics: Statistics) -> Statistics:
    """Return statistics that record under the id of a module, if it is one of several."""
    return statistics if module_id == DEFAULT_MODULE else OwnStatistics(statistics, module_id)
