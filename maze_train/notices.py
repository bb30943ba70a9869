"""Lines for people on standard error."""

from __future__ import annotations

import sys
from contextlib import suppress


def tell(text: str) -> None:
    """Print a line; a stream that is gone, or a full disk, costs the line and not the run."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Print a warning."""
    tell(f"warning: {text}")
