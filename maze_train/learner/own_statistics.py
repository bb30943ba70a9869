"""Statistics of one of several modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maze_train.events import Statistics

if TYPE_CHECKING:
    from maze_train.events import Event
    from maze_train.types import Tensor


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
