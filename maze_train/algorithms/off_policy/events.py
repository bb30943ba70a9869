"""Events of algorithms with a replay buffer."""

from __future__ import annotations

from maze_train.events import Event, EventInterface

__all__ = ["ReplayEvents", "ReplayTimeEvents"]


class ReplayEvents(EventInterface, prefix="replay"):
    """Statistics of the replay buffer."""

    size = Event("Transitions in the replay buffer.", reduce="last")
    picks_per_transition = Event(
        "How often a transition was drawn so far, mean over those that were collected.",
        reduce="last",
    )


class ReplayTimeEvents(EventInterface, prefix="time"):
    """Wall time of updates by what took it, in seconds."""

    sample_s = Event("Sampling from the replay buffer, a part of `time/update_s`.", reduce="sum")
