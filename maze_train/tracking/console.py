"""Progress of a run for people: a bar on a terminal, lines elsewhere, a summary at the end."""

from __future__ import annotations

import math
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from maze_train.checks import check_one_of
from maze_train.tracking.disagreement import DISAGREEMENT, Disagreement
from maze_train.tracking.formatting import compact, duration, readable
from maze_train.tracking.rows import (
    ENV_STEPS,
    EPOCH,
    EVAL_RETURN,
    EVAL_RETURN_STD,
    TRAIN_RETURN,
    RunInfo,
)
from maze_train.tracking.tracker import MetricsWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["ConsoleWriter", "ProgressMode", "Screen", "make_bar"]

ProgressMode: TypeAlias = Literal["auto", "bar", "lines", "quiet"]

# A refresh costs about half a millisecond, and there can be hundreds of updates in a second.
_REFRESH_INTERVAL_S = 0.1
_MIN_BAR_WIDTH = 8


class ConsoleWriter(MetricsWriter):
    """Shows progress while training runs, and the outcome when it ends.

    Args:
        mode: `bar`: one progress bar; `lines`: one line per epoch; `quiet`: nothing; `auto`: a bar
            on a terminal, lines elsewhere.
        console: Where to print; None: standard output.
        line_interval_s: Least time between two lines in seconds, >= 0; the last one always comes.
        clock: Time in seconds, any origin.

    Raises:
        ConfigError: If `mode` is none of the four.
    """

    is_kept = False

    def __init__(
        self,
        mode: ProgressMode = "auto",
        console: Console | None = None,
        line_interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_one_of("progress", mode, ("auto", "bar", "lines", "quiet"))
        self._console = Screen() if console is None else console
        if mode == "auto":
            is_screen = self._console.is_terminal and not self._console.is_dumb_terminal
            mode = "bar" if is_screen else "lines"
        self._mode = mode
        self._line_interval_s = line_interval_s
        self._clock = clock
        self._status = _Status(RunInfo(), clock())
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._shown_at = -math.inf
        self._has_unprinted_line = False

    def start(self, run: RunInfo) -> None:
        """Print the title and open the bar."""
        self._status = _Status(run, self._clock())
        self._shown_at = -math.inf
        if self._mode == "quiet":
            return
        if run.title:
            self._print(run.title, style="bold")
        if self._mode == "bar":
            self._bar = make_bar(self._console)
            self._task = self._bar.add_task("", total=1.0, status="")
            self._bar.start()
            self._refresh_bar(self._clock())

    def write(self, row: Mapping[str, float]) -> None:
        """Show the numbers of an epoch."""
        disagrees = self._status.take(row)
        now = self._clock()
        if self._mode == "bar":
            self._refresh_bar(now)
        elif self._mode == "lines":
            self._has_unprinted_line = True
            if disagrees or now - self._shown_at >= self._line_interval_s:
                self._print_line(now)
        if disagrees and self._mode != "quiet":
            self._print(DISAGREEMENT)

    def advance(self, progress_fraction: float, env_steps: int) -> None:
        """Move the bar within an epoch."""
        if self._bar is None:
            return
        self._status.fraction = progress_fraction
        self._status.env_steps = env_steps
        self._refresh_bar(self._clock())

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the bar and print the outcome."""
        self.close()
        if self._mode == "quiet":
            return
        lines = self._status.outcome(summary, self._clock())
        width = max(len(name) for name, _ in lines)
        self._print("")
        for name, text in lines:
            self._print(f"  {name:<{width}}  {text}")

    def close(self) -> None:
        """Print a line that is still held back, and give the terminal back."""
        if self._bar is not None:
            bar, self._bar = self._bar, None
            try:
                self._fill(bar, self._clock())
            finally:
                bar.stop()
        if self._has_unprinted_line:
            self._print_line(self._clock())

    def _refresh_bar(self, now: float) -> None:
        if self._bar is not None and now - self._shown_at >= _REFRESH_INTERVAL_S:
            self._shown_at = now
            self._fill(self._bar, now)
            self._bar.refresh()

    def _fill(self, bar: Progress, now: float) -> None:
        epoch = self._status.epoch_text()
        share = self._status.share()
        room = self._console.width - len(epoch) - _MIN_BAR_WIDTH - 2
        bar.update(
            self._task,
            description=epoch,
            completed=0.0 if share is None else share,
            total=None if share is None else 1.0,
            status=self._status.text(now, room),
        )

    def _print_line(self, now: float) -> None:
        self._shown_at = now
        self._has_unprinted_line = False
        self._print(f"{self._status.epoch_text()}  {self._status.text(now)}")

    def _print(self, text: str, style: str = "") -> None:
        # Lines are for files and pipes as well: no wrapping at 80 columns, no markup in names.
        self._console.print(Text(text, style=style), soft_wrap=True, highlight=False)


class Screen(Console):
    """Standard output; a reader that goes away is an OSError, and not the end of training."""

    def on_broken_pipe(self) -> None:
        """Write to nowhere from here on, and let the tracker drop the console."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise BrokenPipeError("nobody reads standard output")


class _Status:
    """Status line of a run."""

    def __init__(self, run: RunInfo, now: float) -> None:
        self.run = run
        self.epoch = 0
        self.env_steps = 0
        self.fraction = 0.0
        self.latest: dict[str, float] = {}
        self.best: tuple[float, int] | None = None
        self._disagreement = Disagreement(run.config)
        for row in run.past_rows:
            self.take(row)
        self.started_at = now
        self.started_with = self.env_steps
        self.started_share = self.share() or 0.0

    def take(self, row: Mapping[str, float]) -> bool:
        """Note the numbers of an epoch that ended; returns whether to report a disagreement."""
        self.epoch = int(row[EPOCH])
        self.env_steps = int(row[ENV_STEPS])
        self.fraction = 0.0
        names = (TRAIN_RETURN, EVAL_RETURN, EVAL_RETURN_STD)
        self.latest.update({n: row[n] for n in names if math.isfinite(row.get(n, math.nan))})
        score = row.get(self.run.metric, math.nan)
        if math.isfinite(score) and (self.best is None or self.run.is_better(score, self.best[0])):
            self.best = (score, self.epoch)
        return self._disagreement.take(row)

    def share(self) -> float | None:
        """Share of the run that is done, in [0, 1]; None if nothing is known to end it."""
        shares = []
        if self.run.total_env_steps:
            shares.append(self.env_steps / self.run.total_env_steps)
        if self.run.n_epochs:
            shares.append((self.epoch + self.fraction) / self.run.n_epochs)
        return min(max(shares), 1.0) if shares else None

    def speed(self, now: float) -> float:
        """Environment steps per second since the start of this process; NaN before the first."""
        elapsed = now - self.started_at
        return (self.env_steps - self.started_with) / elapsed if elapsed > 0 else math.nan

    def remaining_s(self, now: float) -> float:
        """Expected seconds to the end of the run; NaN if unknown."""
        share = self.share()
        if share is None or share <= self.started_share:
            return math.nan
        return (now - self.started_at) * (1 - share) / (share - self.started_share)

    def epoch_text(self) -> str:
        """The number of the epoch, padded so that lines align."""
        if not self.run.n_epochs:
            return f"epoch {self.epoch:>3}"
        return f"epoch {self.epoch:>{len(str(self.run.n_epochs))}}/{self.run.n_epochs}"

    def text(self, now: float, room: int | None = None) -> str:
        """The numbers of the moment in one line.

        Args:
            now: Time in seconds.
            room: Characters that there are; the least important parts are left out. None: all fit.
        """
        total = self.run.total_env_steps
        steps = f"{compact(self.env_steps):>5}" + (f"/{compact(total)}" if total else "")
        speed, remaining = self.speed(now), self.remaining_s(now)
        rate = f"{compact(speed) if math.isfinite(speed) else '-':>5}/s"
        parts = {"steps": f"{steps} steps" if room is None else steps, "rate": rate}
        if self.share() is not None:
            parts["eta"] = f"eta {duration(remaining)}"
        for label, name in (("train", TRAIN_RETURN), ("eval", EVAL_RETURN)):
            if name in self.latest:
                parts[label] = f"{label} {readable(self.latest[name])}"
        if self.best is not None:
            parts["best"] = f"best {readable(self.best[0])}"
        for expendable in ("rate", "best", "train", "eta"):
            if room is not None and len("  ".join(parts.values())) > room:
                parts.pop(expendable, None)
        return "  ".join(parts.values())

    def outcome(self, summary: Mapping[str, Any], now: float) -> list[tuple[str, str]]:
        """Name and text of each line of the closing summary."""
        found = dict(summary)
        elapsed = found.get("wall_time_s", now - self.started_at)
        speed = found.get("steps_per_second", self.speed(now))
        final = self.latest.get(EVAL_RETURN)
        final_std = self.latest.get(EVAL_RETURN_STD)
        lines = [
            ("stopped", str(found.get("stop_reason", "training ended"))),
            ("epochs", f"{int(found.get('epochs', self.epoch)):,}"),
            (self.run.step_label, f"{int(found.get('env_steps', self.env_steps)):,}"),
            ("wall time", duration(elapsed)),
            ("speed", f"{compact(speed) if math.isfinite(speed) else '-'} steps/s"),
        ]
        if self.best is not None:
            name = "best return" if self.run.metric == EVAL_RETURN else f"best {self.run.metric}"
            lines.append((name, f"{readable(self.best[0])} at epoch {self.best[1]:,}"))
        if final is not None:
            spread = "" if final_std is None else f" ± {readable(final_std)}"
            lines.append(("final evaluation", readable(final) + spread))
        if self.run.run_dir is not None:
            lines.append(("run directory", str(self.run.run_dir)))
        return lines


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
