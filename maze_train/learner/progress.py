"""Progress of training, and settings that depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from maze_train.errors import ConfigError
from maze_train.learner.config import Schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Progress", "linear_schedule", "piecewise_linear", "scheduled_value"]


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


def linear_schedule(start: float, end: float, fraction: float) -> float:
    """Interpolate between two values, and stay at the ends outside of them.

    start + f * (end - start),  f clamped to [0, 1]

    Both ends are exact, and equal ends give a constant bit for bit.

    Args:
        start: Value at fraction 0.
        end: Value at fraction 1.
        fraction: Progress; 0 is the begin and 1 the end.

    Returns:
        Value between start and end.
    """
    if fraction <= 0.0:
        return start
    if fraction >= 1.0:
        return end
    return start + fraction * (end - start)


def piecewise_linear(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate between given points; constant before the first and after the last.

    y_i + (x - x_i) / (x_{i+1} - x_i) * (y_{i+1} - y_i) for x in [x_i, x_{i+1}]

    Args:
        points: Pairs (x_i, y_i), at least one, x strictly increasing.
        x: Where to evaluate.

    Returns:
        The interpolated y.

    Raises:
        ConfigError: If there is no point, or x is not strictly increasing.
    """
    if not points:
        raise ConfigError("points", "expected at least one pair (x, y)", points)
    if any(left[0] >= right[0] for left, right in pairwise(points)):
        raise ConfigError("points", "expected strictly increasing x", points)
    for (left_x, left_y), (right_x, right_y) in pairwise(points):
        if x < right_x:
            return linear_schedule(left_y, right_y, (x - left_x) / (right_x - left_x))
    return points[-1][1]
