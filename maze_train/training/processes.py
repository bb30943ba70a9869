"""Signals, evaluators and checkpoints of a run with several processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from maze_train.core.errors import CallbackError
from maze_train.core.signals import Interrupted, Interruption
from maze_train.learner.ranks import Ranks
from maze_train.training.checkpoints import CheckpointStore
from maze_train.training.evaluators import Evaluator
from maze_train.training.outcome import Position


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


class CommonCheckpoints(CheckpointStore):
    """Checkpoints of a run with several processes; only the first process writes.

    Args:
        processes: The processes.
        *args: See `CheckpointStore`.
        **settings: See `CheckpointStore`.
    """

    def __init__(self, processes: Ranks, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._processes = processes

    def is_overdue(self, steps_before: int = 0, steps: int = 0) -> bool:
        """Return the result of the first process, since clocks may differ."""
        return self._processes.first(partial(super().is_overdue, steps_before, steps))

    def save(self, state: dict[str, Any], position: Position) -> Path | None:
        """Write a checkpoint in the first process; return its path in all processes."""
        save = super().save
        found = self._processes.first(lambda: str(save(state, position) or ""))
        path = Path(found) if found else None
        if path is not None:
            self.latest, self._position = path, position
        return path

    def clean(self) -> None:
        """Remove files left by killed processes; only the first process removes files."""
        if self._processes.is_first:
            super().clean()

    def _point_to(self, name: str) -> None:
        if self._processes.is_first:
            super()._point_to(name)
