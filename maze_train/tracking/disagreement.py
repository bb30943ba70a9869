"""Check whether evaluations with the most likely action fall far behind training."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

from maze_train.tracking.tracker import EVAL_RETURN, TRAIN_RETURN

if TYPE_CHECKING:
    from collections.abc import Mapping


DISAGREEMENT = (
    "note: training has improved, but evaluation gets no more than training did at the beginning, "
    "again and again. Training samples its actions; evaluation takes the most likely one, which "
    "may repeat itself without end. Try evaluation.deterministic=false"
)
"""The line about it."""

SEVERAL, WINDOW = 3, 5
"""Evaluations that must fall behind before the line is shown, of the last so many."""

CLEAR_GAIN = 1 / 3
"""Gain of training that counts, as a share of the range of all mean returns so far."""


class Disagreement:
    """Follows mean returns of training and evaluation through the rows of a run.

    An evaluation falls behind if it gets no more than training did in its first epoch, while
    training has gained a good part of all that was ever seen since then. So neither the scale of
    rewards matters, nor what happens before training has learned something.

    Args:
        config: The configuration as plain values: who samples actions.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        samples = not config.get("algorithm", {}).get("deterministic", False)
        self._is_on = samples and config.get("evaluation", {}).get("deterministic", True)
        self._first = math.nan
        self._low, self._high = math.inf, -math.inf
        self._behind: deque[bool] = deque(maxlen=WINDOW)

    def take(self, row: Mapping[str, float]) -> bool:
        """Take in an epoch; returns whether to show the line now: once in all rows."""
        train, evaluated = (row.get(name, math.nan) for name in (TRAIN_RETURN, EVAL_RETURN))
        if not (self._is_on and math.isfinite(train)):
            return False
        if math.isnan(self._first):
            self._first = train
        if not math.isfinite(evaluated):
            return False
        self._low = min(self._low, train, evaluated)
        self._high = max(self._high, train, evaluated)
        has_gained = train - self._first > CLEAR_GAIN * (self._high - self._low)
        self._behind.append(has_gained and evaluated <= self._first)
        if sum(self._behind) < SEVERAL:
            return False
        self._is_on = False
        return True
