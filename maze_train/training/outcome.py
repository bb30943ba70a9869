"""Limits, signals and the summary of training."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MethodType
from typing import Any

from maze_train.core.names import OF_SCHEDULER, SIGNALS
from maze_train.core.notices import notify


def crosses(interval: int, before: int, after: int) -> bool:
    """Return whether a multiple of `interval` is in (before, after]; False if `interval` is 0."""
    return interval > 0 and after // interval > before // interval


@dataclass(frozen=True)
class Limits:
    """Limits at which training stops; 0 means no limit."""

    n_epochs: int = 0
    total_steps: int = 0
    patience: int = 0
    max_wall_time_s: float = 0.0

    def reached(self, env_steps: int, wall_time_s: float, last_epoch: int, epochs: int) -> str:
        """Return the name of the limit that was reached, excluding patience, or an empty string.

        Args:
            env_steps: Environment steps so far.
            wall_time_s: Wall-clock time so far in seconds.
            last_epoch: Epoch after which training ends; 0: none.
            epochs: Number of finished epochs; -1: within an epoch.
        """
        if 0 < self.total_steps <= env_steps:
            return "total_steps"
        if 0 < last_epoch <= epochs:
            return "n_epochs"
        return "max_wall_time_s" if 0 < self.max_wall_time_s <= wall_time_s else ""

    def share(self, env_steps: int, wall_time_s: float, updates: int, last_update: int) -> float:
        """Return the completed fraction of training, in [0, 1].

        Args:
            env_steps: Environment steps so far.
            wall_time_s: Wall-clock time so far in seconds.
            updates: Updates so far.
            last_update: Update after which training ends; 0: none.
        """
        shares = [0.0]
        if self.total_steps:
            shares.append(env_steps / self.total_steps)
        if last_update:
            shares.append(updates / last_update)
        if self.max_wall_time_s and len(shares) == 1:
            # Used only without other limits: results that depend on time are not reproducible.
            shares.append(wall_time_s / self.max_wall_time_s)
        return min(max(shares), 1.0)


LIMITS = tuple(limit.name for limit in fields(Limits))
"""Stop reasons that correspond to configured limits."""


@dataclass(frozen=True)
class Position:
    """Training progress at a checkpoint."""

    epoch: int
    """Number of finished epochs."""

    updates: int
    """Updates so far."""

    env_steps: int
    """Environment steps so far."""

    score: float | None = None
    """Score of the policy; None if missing or not finite."""

    within_epoch: bool = False
    """Whether the next epoch has started."""

    @property
    def name(self) -> str:
        """Name of the directory of a checkpoint."""
        return f"epoch_{self.epoch:06d}" + (
            f"_update_{self.updates:06d}" if self.within_epoch else ""
        )


@dataclass(frozen=True)
class TrainingSummary:
    """Outcome of training, as written to `summary.json`."""

    stop_reason: str
    """total_steps, n_epochs, patience, max_wall_time_s, interrupted or error."""

    epochs: int
    updates: int
    env_steps: int
    wall_time_s: float
    steps_per_second: float
    """Environment steps of training per second of wall time; the time includes evaluation."""

    best_metric: float
    """Best value of the selection metric; NaN if the metric was never reported."""

    best_epoch: int
    final_eval_return_mean: float
    """Mean return of the last evaluation; NaN without evaluations."""

    exact: bool = True
    """Whether the results are identical to the results of an uninterrupted run. False if the run
    was resumed and the state of an environment could not be restored."""

    final_test: dict[str, dict[str, float]] = field(default_factory=dict)
    """Metrics (and `epoch`) of the policies `last` and `best` in the test after training; empty
    without a test."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, keyed by name."""
        return asdict(self)


class Interrupted(KeyboardInterrupt):
    """Raised if a signal ends the run.

    Args:
        number: Number of the signal.
        at_once: Whether to stop immediately because the signal was sent twice.

    Attributes:
        checkpoint: Checkpoint to resume from, once the checkpoint is saved.
        is_common: Whether every process of the run raised the exception.
    """

    def __init__(self, number: int, at_once: bool = False) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.at_once = at_once
        self.checkpoint: Path | None = None
        self.is_common = False

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.number, self.at_once)


def signal_of(error: BaseException) -> int:
    """Return the signal that caused an error, or SIGTERM if no signal caused the error."""
    if isinstance(error, Interrupted):
        return error.number
    return signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM


class Preempted(SystemExit):
    """Raised if the handler of a job scheduler, such as submitit, ends the process.

    The scheduler restarts the job. A checkpoint was saved before.
    """


class Interruption:
    """Handles signals during a run.

    A signal raises `Interrupted`. Within `deferred`, the first signal is only recorded, and `check`
    raises the exception when the run can be saved. A second signal raises immediately. The context
    manager restores the previous handlers on exit. It then calls the previous handler of a signal
    in `OF_SCHEDULER` that ended the run, which may put the job back into the queue. Outside the
    main thread, the context manager has no effect.
    """

    def __init__(self) -> None:
        self._noted = 0
        self._deferred = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # Keep ignoring signals that a shell ignores for background jobs.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)
        if isinstance(error, Interrupted) and error.number in OF_SCHEDULER:
            handler = before.get(error.number)
            owner = handler.__self__ if isinstance(handler, MethodType) else None
            if callable(handler) and not isinstance(owner, Interruption):
                try:
                    handler(error.number, None)
                except SystemExit as stop:
                    raise Preempted(stop.code) from error

    def check(self) -> None:
        """Raise `Interrupted` if a signal was received."""
        if self._noted:
            raise Interrupted(self._noted)

    def deferred(self) -> AbstractContextManager[None]:
        """Context manager in which the first signal is only recorded."""
        return self._switched(True)

    @contextmanager
    def immediate(self) -> Iterator[None]:
        """Context manager, used within `deferred`, in which signals raise immediately."""
        with self._switched(False):
            self.check()
            yield

    @contextmanager
    def _switched(self, deferred: bool) -> Iterator[None]:
        before, self._deferred = self._deferred, deferred
        try:
            yield
        finally:
            self._deferred = before

    def _take(self, number: int, frame: object) -> None:
        at_once = bool(self._noted)
        if not at_once:
            self._noted = number
            if self._deferred:
                # The output stream may be in use or closed.
                with suppress(RuntimeError):
                    name = signal.Signals(number).name
                    notify(f"\n{name}: finishing the update (send it again to stop immediately)")
                return
        raise Interrupted(number, at_once)
