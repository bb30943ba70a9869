"""Terminal output for users, except the progress display."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from contextlib import suppress

from maze_train.core.errors import printable

CONSOLE = logging.getLogger(__name__)
"""Logger that receives all printed lines, for handlers of runs and users; the logger does not
print."""

HEARTBEAT_S = 30.0
"""Time in seconds after which a long operation outside a terminal reports that it is running."""

CONSOLE.addHandler(logging.NullHandler())
CONSOLE.setLevel(logging.INFO)
CONSOLE.propagate = False


def say(text: str) -> None:
    """Print a result on standard output; ignore a closed pipe (such as `| head`)."""
    text = printable(text)
    CONSOLE.info(text)
    try:
        print(text, flush=True)
    except BrokenPipeError:
        abandon_output()


def abandon_output() -> None:
    """Redirect standard output to the null device after the reader has closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def notify(text: str, level: int = logging.INFO) -> None:
    """Print a line on standard error unless `CONSOLE` ignores the level.

    Errors while writing to the stream are ignored.
    """
    if not CONSOLE.isEnabledFor(level):
        return
    text = printable(text)
    CONSOLE.log(level, text)
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Print a warning."""
    notify(f"warning: {text}")


def tell_traceback(error: BaseException) -> None:
    """Print the traceback of an exception on standard error."""
    notify("".join(traceback.format_exception(error)).rstrip(), logging.ERROR)
