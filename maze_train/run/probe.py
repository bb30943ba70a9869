"""Runs a function once in a disposable background process."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Generic, TypeVar

from maze_train.core.names import SIGNALS
from maze_train.workers.backends import PROCESS_NAME, limit_threads, signals_later

if TYPE_CHECKING:
    from typing import Self

T = TypeVar("T")


class Probe(Generic[T]):
    """Calls a function in a background process that can be abandoned at any time.

    The process is forked, so modules are not imported again and only the result is pickled. The
    output of the process is discarded. If the function raises an exception or exceeds the time
    limit, or the process dies, the result is None. Child processes of the function are killed at
    its end.

    Args:
        function: The function to call.
        limit_s: Time in seconds (> 0) after which the process is killed.
    """

    def __init__(self, function: Callable[[], T], limit_s: float) -> None:
        self._deadline = time.monotonic() + limit_s
        self._result: T | None = None
        self._conn, sender = multiprocessing.Pipe(duplex=False)
        self._process = multiprocessing.get_context("fork").Process(
            target=_work,
            args=(function, sender, self._conn, math.ceil(limit_s)),
            name=f"{PROCESS_NAME}-probe",
        )
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        with signals_later(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # A fork with threads may hang until its timeout.
            self._process.start()
        sender.close()

    @property
    def is_over(self) -> bool:
        """Whether the process has ended, with or without a result."""
        return self._conn.closed

    def result(self, wait_s: float = 0.0) -> T | None:
        """Return the result of the function; None if the function failed or has not finished.

        Args:
            wait_s: Maximum time in seconds to wait for the result.
        """
        if self.is_over:
            return self._result
        left = self._deadline - time.monotonic()
        try:
            if self._conn.poll(max(0.0, min(wait_s, left))):
                self._result = self._conn.recv()
                self.close()
            elif left <= wait_s:
                self.close()
        except (EOFError, OSError):
            self.close()
        return self._result

    def close(self) -> None:
        """Kill the process and all its children. Closing again has no effect."""
        if self.is_over:
            return
        self._conn.close()
        if self._process.exitcode is None:  # The ID of a terminated process may have been reused.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid or 0, signal.SIGKILL)
            self._process.kill()  # The process might have no process group yet.
        self._process.join()
        self._process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _work(function: Callable[[], T], sender: Connection, other: Connection, limit_s: int) -> None:
    """Call the function in the background process, and send the result."""
    os.setsid()  # Ignores signals of the terminal; the group can be killed as a whole.
    other.close()
    gc.freeze()  # Deleting objects of the parent could close its connections.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(limit_s)  # Ends the process even if the parent is killed.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (never closed)
    limit_threads()
    os.nice(10)  # The parent has priority.
    with suppress(BaseException):
        sender.send(function())
    os.killpg(0, signal.SIGKILL)  # Exit without running finalizers of the parent's objects.
