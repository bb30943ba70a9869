"""The log file of a run."""

from __future__ import annotations

import logging
import os
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from maze_train.core.errors import printable
from maze_train.core.files import open_own
from maze_train.core.notices import CONSOLE, warn

LINE = logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")


class RunLog(logging.Handler):
    """Appends all console output of a run to a file, with the time of each message.

    Used as a context manager, the log also receives the traceback of an exception that leaves the
    block. If the file is not open yet or the disk is full, the text is written with the next
    message.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(LINE)
        self._pending = b""
        self._path: Path | None = None
        self._descriptor: int | None = None
        self._has_warned = False

    def __enter__(self) -> RunLog:
        CONSOLE.addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None:
            CONSOLE.info(printable("".join(traceback.format_exception(error)).rstrip()))
        CONSOLE.removeHandler(self)
        self.close()

    @property
    def is_complete(self) -> bool:
        """Whether all messages so far are in the file."""
        return not self._pending

    def open(self, path: Path) -> None:
        """Open the file for appending and write the messages so far."""
        self._path = path
        self._write()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message."""
        self._pending += f"{self.format(record)}\n".encode()
        if self._path is not None:
            self._write()

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None
        super().close()

    def _write(self) -> None:
        assert self._path is not None
        try:
            if self._descriptor is None:
                self._descriptor = open_own(self._path, os.O_WRONLY | os.O_APPEND)
            while self._pending:
                self._pending = self._pending[os.write(self._descriptor, self._pending) :]
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                warn(f"{self._path} cannot be written: {error}; training continues")
