"""Signals that end a run: the first one is handled when the run can be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import MethodType
from typing import Any

from maze_train.core.names import OF_SCHEDULER, SIGNALS
from maze_train.core.notices import notify


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
