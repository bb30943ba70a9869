"""Settings that change during training."""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from maze_train.checks import check_one_of
from maze_train.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Schedule", "check_schedule"]

PREFIX = "linear_"


@dataclass(kw_only=True)
class Schedule:
    """A setting that changes during training: linear between two values, or piecewise linear.

    `linear_0.001` falls from 0.001 to 0 over the run; `{start: 0.001, end: 0.0001}` goes from
    `start` to `end`; `{points: [[0, 0.001], [50000, 0.0001]], by: env_steps}` interpolates between
    points.
    """

    start: float | None = None
    """Value at the first update."""

    end: float | None = None
    """Value that is reached at the end of the run (after its last update)."""

    points: list[list[float]] | None = None
    """Pairs [x, value] with growing x, instead of `start` and `end`; constant before and after."""

    by: Literal["progress", "env_steps", "updates"] = "progress"
    """Unit of x: the share of the run in [0, 1], environment steps, or updates."""

    def __post_init__(self) -> None:
        check_one_of("by", self.by, ("progress", "env_steps", "updates"))
        if self.points is None:
            if self.start is None or self.end is None or self.by != "progress":
                raise ConfigError(
                    "",
                    "expected {start: 0.001, end: 0} or {points: [[0, 0.001], [50000, 0]], "
                    "by: env_steps}",
                )
            self.points = [[0.0, self.start], [1.0, self.end]]
        elif self.start is not None or self.end is not None:
            raise ConfigError("points", "can not be combined with start and end", self.points)
        if not self.points or any(len(point) != 2 for point in self.points):
            raise ConfigError("points", "expected a list of pairs [x, value]", self.points)
        xs = [x for x, _ in self.points]
        if any(a >= b for a, b in itertools.pairwise(xs)):
            raise ConfigError("points", "expected growing x", self.points)
        if not (xs[0] >= 0 and (self.by != "progress" or xs[-1] <= 1)):
            raise ConfigError(
                "points",
                "expected x in [0, 1]; with by: env_steps or by: updates, x >= 0",
                self.points,
            )

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """The schedule of a short form, `linear_<start>`.

        Raises:
            ConfigError: If the text is none.
        """
        if text.startswith(PREFIX):
            with suppress(ValueError):
                return cls(start=float(text.removeprefix(PREFIX)), end=0.0)
        raise ConfigError("", "expected a number, linear_<start>, or a schedule", text)

    def __str__(self) -> str:
        if self.start is not None and self.end == 0:
            return f"{PREFIX}{self.start!r}"
        return repr(self)

    @property
    def values(self) -> list[float]:
        """The values at the points, for range checks."""
        return [value for _, value in self.points or ()]


def check_schedule(
    key: str, value: float | Schedule, check: Callable[..., None], *bounds: float
) -> None:
    """Apply a range check to a number, or to each value of a schedule."""
    values = value.values if isinstance(value, Schedule) else [value]
    for number in values:
        check(key, number, *bounds)
