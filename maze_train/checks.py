"""Range checks for settings, used by the `__post_init__` of every configuration dataclass."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from maze_train.errors import ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["check_at_least", "check_between", "check_one_of", "check_positive"]


def _check_finite(key: str, value: float) -> None:
    if not math.isfinite(value):
        raise ConfigError(key, "expected a finite number", value)


def check_positive(key: str, value: float) -> None:
    """Refuse a value that is not a finite number above 0."""
    _check_finite(key, value)
    if value <= 0:
        raise ConfigError(key, "expected a number > 0", value)


def check_at_least(key: str, value: float, minimum: float) -> None:
    """Refuse a value that is not a finite number of at least `minimum`."""
    _check_finite(key, value)
    if value < minimum:
        raise ConfigError(key, f"expected a number >= {minimum:g}", value)


def check_between(key: str, value: float, low: float, high: float) -> None:
    """Refuse a value outside the closed interval [low, high]."""
    _check_finite(key, value)
    if not low <= value <= high:
        raise ConfigError(key, f"expected a number in [{low:g}, {high:g}]", value)


def check_one_of(key: str, value: Any, allowed: Iterable[str]) -> None:
    """Refuse a value that is not among `allowed`, naming the closest one."""
    names = list(allowed)
    if value in names:
        return
    close = nearest(str(value), names, count=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(key, f"expected one of {', '.join(names)}{hint}", value)
