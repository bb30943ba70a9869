"""Display of progress: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
from typing import Literal, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from maze_train.checks import check_one_of
from maze_train.errors import printable

ProgressMode: TypeAlias = Literal["auto", "bar", "lines", "quiet"]

# A refresh costs about half a millisecond, and there can be hundreds of updates in a second.
BAR_INTERVAL_S = 0.1
MIN_BAR_WIDTH = 8


class Display:
    """Progress of something long, in one line that is shown again and again.

    Args:
        mode: `bar`: one progress bar; `lines`: one line after the other; `quiet`: nothing; `auto`:
            a bar on a terminal, lines elsewhere.
        console: Where to print; None: standard output.
        line_interval_s: Least time between two lines in seconds, >= 0.

    Raises:
        ConfigError: If `mode` is none of the four.
    """

    def __init__(
        self, mode: ProgressMode, console: Console | None = None, line_interval_s: float = 1.0
    ) -> None:
        check_one_of("progress", mode, ("auto", "bar", "lines", "quiet"))
        self._console = Screen() if console is None else console
        if mode == "auto":
            is_screen = self._console.is_terminal and not self._console.is_dumb_terminal
            mode = "bar" if is_screen else "lines"
        self.mode = mode
        intervals = {"bar": BAR_INTERVAL_S, "lines": line_interval_s}
        self._interval_s = intervals.get(mode, math.inf)
        self._shown_at = -math.inf
        self._bar: Progress | None = None

    def open(self, shown_at: float = -math.inf) -> None:
        """Open the bar, if it is one; `shown_at` counts as the last time that it was shown."""
        self._shown_at = shown_at
        if self.mode == "bar":
            self._bar = make_bar(self._console)
            self._bar.add_task("", total=1.0, status="")
            self._bar.start()

    @property
    def has_bar(self) -> bool:
        """Whether there is an open bar."""
        return self._bar is not None

    def is_due(self, now: float) -> bool:
        """Whether enough time has passed for another line, or for the bar to move."""
        return now - self._shown_at >= self._interval_s

    def room(self, description: str) -> int | None:
        """Characters of status that a bar has room for; None: there is no limit."""
        if self.mode != "bar":
            return None
        return self._console.width - len(description) - MIN_BAR_WIDTH - 2

    def show(self, now: float, description: str, share: float | None, status: str) -> None:
        """Print a line, or move the bar.

        Args:
            now: Time in seconds.
            description: Text before the bar.
            share: Share that is done, in [0, 1]; None: not known.
            status: Text after the bar.
        """
        self._shown_at = now
        if self._bar is None:
            self.say(f"{description}  {status}")
            return
        self._bar.update(
            self._bar.task_ids[0],
            description=description,
            completed=0.0 if share is None else share,
            total=None if share is None else 1.0,
            status=status,
        )
        self._bar.refresh()

    def say(self, text: str, style: str = "") -> None:
        """Print a line, unless everything is quiet."""
        if self.mode != "quiet":
            # Lines are for files and pipes as well: no wrapping at 80 columns, no markup in names.
            encoding = self._console.encoding
            text = printable(text).encode(encoding, "replace").decode(encoding)
            self._console.print(Text(text, style=style), soft_wrap=True, highlight=False)

    def silence(self) -> None:
        """Show nothing from here on."""
        self.mode, self._interval_s = "quiet", math.inf

    def close(self) -> None:
        """Give the terminal back; calling it again does nothing."""
        if self._bar is not None:
            bar, self._bar = self._bar, None
            bar.stop()


class Screen(Console):
    """Standard output; a reader that goes away is an OSError, and not the end of training."""

    def on_broken_pipe(self) -> None:
        """Write to nowhere from here on, and let the tracker drop the console."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise BrokenPipeError("nobody reads standard output")


def make_bar(console: Console) -> Progress:
    """A bar with a description before it and a status after it; it is refreshed by its owner."""
    # No refresh thread: it would compete with the hot loops for the interpreter, and forking a
    # process while it holds a lock could block the child.
    return Progress(
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[status]}", markup=False),
        console=console,
        auto_refresh=False,
        expand=True,
    )
