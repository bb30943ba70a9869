from __future__ import annotations

import pytest
from cases import sweep

from maze_train.errors import ConfigError
from maze_train.learner.config import linear_schedule, piecewise_linear

POINTS = [(0.0, 1.0), (10.0, 3.0), (20.0, -1.0)]


def test_linear_schedule_is_clamped() -> None:
    """Half way between the ends at 0.5, the ends themselves outside of [0, 1], exact at both."""
    fractions = (-1.0, 0.0, 0.5, 1.0, 1.5)
    values = [linear_schedule(0.1, 0.3, fraction) for fraction in fractions]
    assert values == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.3], rel=1e-12)
    assert (values[1], values[3]) == (0.1, 0.3)
    for fraction in (0.0, 0.1, 1.0 / 3.0, 0.7, 1.0):
        assert linear_schedule(2.5e-4, 2.5e-4, fraction) == 2.5e-4


def test_piecewise_linear_interpolates() -> None:
    """Exact at the points, linear between them, constant outside; one point is a constant."""
    xs = (-5.0, 0.0, 2.5, 10.0, 15.0, 20.0, 99.0)
    values = [piecewise_linear(POINTS, x) for x in xs]
    assert values == pytest.approx([1.0, 1.0, 1.5, 3.0, 1.0, -1.0, -1.0], rel=1e-12)
    assert [piecewise_linear([(3.0, 7.0)], x) for x in (-1.0, 3.0, 9.0)] == [7.0, 7.0, 7.0]


@sweep("points", [[], [(1.0, 0.0), (1.0, 2.0)], [(2.0, 0.0), (1.0, 2.0)]])
def test_points_without_order_are_refused(points: list[tuple[float, float]]) -> None:
    """No points, a repeated x, and a decreasing x are errors."""
    with pytest.raises(ConfigError, match="points"):
        piecewise_linear(points, 0.0)
