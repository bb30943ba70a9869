"""Values that change with the progress of training, as pure functions of that progress."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from maze_train.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["linear_schedule", "piecewise_linear"]


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
