"""Metrics of the training loop."""

from __future__ import annotations

from maze_train.core.events import Event, EventInterface


class TimeEvents(EventInterface, prefix="time"):
    """Wall-clock time in an epoch by activity, in seconds."""

    collect_s = Event("Collecting experience.", reduce="sum")
    env_s = Event(
        "Stepping the environments, or waiting for their workers; included in `time/collect_s`.",
        reduce="sum",
    )
    update_s = Event("Updating the weights.", reduce="sum")
    evaluate_s = Event("Evaluating the policy.", reduce="sum")
    checkpoint_s = Event("Writing checkpoints since the last row of metrics.", reduce="sum")
    epoch_s = Event("Duration of the epoch.", reduce="sum")
    total_s = Event("Time since training began.", reduce="last")
    steps_per_second = Event("Environment steps per second, excluding compilation.", reduce="last")
