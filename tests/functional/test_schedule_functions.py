from __future__ import annotations

import pytest

from maze_train.errors import ConfigError
from maze_train.functional.schedules import linear_schedule, piecewise_linear

POINTS = [(0.0, 1.0), (10.0, 3.0), (20.0, -1.0)]


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [(-1.0, 0.1), (0.0, 0.1), (0.5, 0.2), (1.0, 0.3), (1.5, 0.3)],
)
def test_linear_schedule_is_clamped(fraction: float, expected: float) -> None:
    """Half way between the ends at 0.5, and the ends themselves outside of [0, 1]."""
    assert linear_schedule(0.1, 0.3, fraction) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 1.0 / 3.0, 0.7, 1.0])
def test_equal_ends_are_constant(fraction: float) -> None:
    """A constant schedule does not move by a single bit, and both ends are exact."""
    assert linear_schedule(2.5e-4, 2.5e-4, fraction) == 2.5e-4
    assert linear_schedule(0.1, 1e-3, 0.0) == 0.1
    assert linear_schedule(0.1, 1e-3, 1.0) == 1e-3


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (-5.0, 1.0),
        (0.0, 1.0),
        (2.5, 1.5),
        (10.0, 3.0),
        (15.0, 1.0),
        (20.0, -1.0),
        (99.0, -1.0),
    ],
)
def test_piecewise_linear_interpolates(x: float, expected: float) -> None:
    """Exact at the points, linear between them, constant outside."""
    assert piecewise_linear(POINTS, x) == pytest.approx(expected, rel=1e-12)


def test_one_point_is_a_constant() -> None:
    """A single pair gives its value everywhere."""
    assert [piecewise_linear([(3.0, 7.0)], x) for x in (-1.0, 3.0, 9.0)] == [7.0, 7.0, 7.0]


@pytest.mark.parametrize("points", [[], [(1.0, 0.0), (1.0, 2.0)], [(2.0, 0.0), (1.0, 2.0)]])
def test_points_without_order_are_refused(points: list[tuple[float, float]]) -> None:
    """No points, a repeated x, and a decreasing x are errors."""
    with pytest.raises(ConfigError, match="points"):
        piecewise_linear(points, 0.0)
