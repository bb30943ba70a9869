"""Signals, evaluators and checkpoints of a run with several processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from maze_train.core.errors import CallbackError
from maze_train.core.signals import Interrupted, Interruption
from maze_train.learner.ranks import Ranks
from maze_train.training.evaluators import Evaluator


class CommonInterruption(Interruption):
    """Signal handler that interrupts all processes if any process receives a signal.

    Args:
        processes: The processes.
    """

    def __init__(self, processes: Ranks) -> None:
        super().__init__()
        self._processes, self._is_ending = processes, False

    def check(self) -> None:
        """Raise `Interrupted` if any process received a signal; called by every process."""
        if number := self._processes.largest(self._noted):
            self._is_ending = True
            raise Interrupted(number)

    @contextmanager
    def immediate(self) -> Iterator[None]:
        """Check for a signal; later signals only interrupt `in_first`."""
        self.check()
        yield

    @contextmanager
    def in_first(self) -> Iterator[None]:
        """Context manager of the first process in which signals raise immediately."""
        with self._switched(False):
            super().check()
            yield

    def _take(self, number: int, frame: object) -> None:
        # torchrun sends a signal to all processes, so the run may be ending because of this signal.
        if self._is_ending and not self._noted:
            self._noted = number
        else:
            super()._take(number, frame)


class FirstEvaluator(Evaluator):
    """Evaluator that runs in the first process and returns the metrics in all processes.

    Args:
        processes: The processes.
        own: Evaluator of the first process.
        interruption: Handler of signals that end an evaluation.
    """

    def __init__(self, processes: Ranks, own: Evaluator, interruption: CommonInterruption) -> None:
        self._processes, self._own, self._interruption = processes, own, interruption

    def evaluate(self, policy: object) -> dict[str, float]:
        """Return the metrics of the first process."""
        own: Interrupted | CallbackError | None = None

        def evaluate() -> dict[str, Any]:
            nonlocal own
            try:
                with self._interruption.in_first():
                    return {"metrics": self._own.evaluate(policy)}
            except Interrupted as error:
                own = error
                return {"signal": error.number, "at_once": error.at_once}
            except CallbackError as error:
                own = error
                return {"error": str(error)}

        outcome = self._processes.first(evaluate)
        if "metrics" in outcome:
            metrics: dict[str, float] = outcome["metrics"]
            return metrics
        if "signal" in outcome:
            error = own or Interrupted(outcome["signal"], outcome["at_once"])
        else:
            error = own or CallbackError(outcome["error"])
        error.is_common = True
        raise error

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the evaluator."""
        return self._own.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the evaluator."""
        self._own.load_state_dict(state)

    def close(self) -> None:
        """Close the evaluator."""
        self._own.close()
