"""Time that an update takes: known from the first minibatch on, and said where it is long."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from maze_train.tracking.formatting import duration
from maze_train.training.services import Contexts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from maze_train.learner.learner import Learner


LONG_UPDATE_S = 10.0
"""Seconds of an update from which on it is worth a line."""


class UpdateClock(Contexts):
    """Measures updates.

    In the first one the time of its first minibatch counts for each of the others; from then on an
    update is expected to take as long as the one before.

    Args:
        around: What else holds in the parts of a run.
        tell: Takes the line about updates that are long.
        clock: Time in seconds, any origin.
    """

    def __init__(
        self,
        around: Contexts,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.training, self.testing = around.training, around.testing  # type: ignore[method-assign]
        self._around = around
        self._tell = tell
        self._clock = clock
        self._began: float | None = None
        self._expected_s = 0.0
        """Seconds of the running update; 0: not known yet."""
        self._is_told = False

    def watch(self, learner: Learner[Any, Any, Any]) -> None:
        """Measure the first minibatch that the learner asks for."""
        original = learner.minibatches

        def minibatches(prepared: Any, statistics: Any) -> Iterator[Any]:
            del learner.minibatches  # from here on it is that of the class
            found = original(prepared, statistics)
            for first in found:
                began = self._clock()
                yield first
                others = learner.num_minibatches(prepared) - 1
                self._expect(self._clock() - began, others)
                break
            yield from found

        learner.minibatches = minibatches  # type: ignore[method-assign]

    @contextmanager
    def update(self, number: int) -> Iterator[None]:
        """Measure an update."""
        self._began = began = self._clock()
        try:
            with self._around.update(number):
                yield
        finally:
            self._began = None
        self._expected_s = self._clock() - began
        self._tell_if_long()

    def remaining(self) -> str:
        """How long the running update still takes, as a part of a line; empty: not known."""
        if self._began is None:
            return ""
        left = self._expected_s - (self._clock() - self._began)
        return f", at most about {duration(left)} more" if left >= 1.0 else ""

    def _expect(self, first_s: float, others: int) -> None:
        if self._began is not None and others > 0:
            self._expected_s = self._clock() - self._began + others * first_s
            self._tell_if_long()

    def _tell_if_long(self) -> None:
        if self._expected_s >= LONG_UPDATE_S and not self._is_told:
            self._is_told = True
            self._tell(f"an update takes about {duration(self._expected_s)}")
