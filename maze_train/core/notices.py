"""Lines for people: apart from the display of progress, the only way of text to the terminal."""

from __future__ import annotations

import sys
import traceback
from contextlib import suppress

from maze_train.core.errors import printable


def say(text: str) -> None:
    """Print a result on standard output."""
    print(printable(text), flush=True)


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
