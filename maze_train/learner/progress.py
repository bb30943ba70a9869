"""Progress of training, and settings that depend on it."""

from __future__ import annotations

from dataclasses import dataclass

from maze_train.functional.schedules import piecewise_linear
from maze_train.learner.config import Schedule

__all__ = ["Progress", "scheduled_value"]


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of training before an update.

    The first update of a run sees zeros, so a schedule starts at its first value; the last one sees
    a fraction below 1, so a learning rate that falls to 0 is never 0.
    """

    env_steps: int = 0
    """Environment steps that earlier updates learned from."""

    updates: int = 0
    """Updates made."""

    epoch: int = 0
    """Epochs finished."""

    fraction: float = 0.0
    """Share of the run that is done, in [0, 1); 0 when no limit is known."""


def scheduled_value(setting: float | Schedule, progress: Progress) -> float:
    """The value of a setting now; a number is its own schedule."""
    if not isinstance(setting, Schedule):
        return setting
    x = {
        "progress": progress.fraction,
        "env_steps": float(progress.env_steps),
        "updates": float(progress.updates),
    }[setting.by]
    return piecewise_linear([(point[0], point[1]) for point in setting.points or ()], x)
