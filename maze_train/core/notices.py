"""Lines for people: apart from the display of progress, the only way of text to the terminal."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress

from maze_train.core.errors import printable


def say(text: str) -> None:
    """Print a result on standard output; a reader that has gone, such as `head`, has had enough."""
    try:
        print(printable(text), flush=True)
    except BrokenPipeError:
        abandon_output()


def abandon_output() -> None:
    """Write to nowhere from here on, as no one reads standard output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def notify(text: str) -> None:
    """Print a line on standard error; a stream that is gone costs the line and not the run."""
    with suppress(OSError, ValueError):
        print(printable(text), file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Print a warning."""
    notify(f"warning: {text}")


def tell_traceback(error: BaseException) -> None:
    """Print an exception with the places where it was raised."""
    notify("".join(traceback.format_exception(error)).rstrip())
