"""Console output of a run: progress as a bar or as lines, and a closing summary."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from maze_train.core.checks import check_one_of
from maze_train.core.errors import printable
from maze_train.core.names import CURVE, PLOTS
from maze_train.core.notices import CONSOLE, HEARTBEAT_S, abandon_output
from maze_train.core.report import field_lines
from maze_train.core.run_directory import EPOCH, FAILURES, final_tests
from maze_train.core.text import compact, duration, readable
from maze_train.tracking.tracker import (
    ENV_STEPS,
    EVAL_RETURN,
    EVAL_RETURN_STD,
    STAGE,
    TOTAL_S,
    TRAIN_LENGTH,
    TRAIN_RETURN,
    MetricsWriter,
    RunInfo,
)

ProgressMode: TypeAlias = Literal["auto", "bar", "lines", "quiet"]

# A refresh takes about half a millisecond, and there can be hundreds of updates per second.
BAR_INTERVAL_S = 0.1
LINE_INTERVAL_S = 1.0
BAR_WIDTH = 12


class Display:
    """Displays the progress of a long operation as a bar or as lines.

    Args:
        mode: `bar`: a progress bar; `lines`: one line per report; `quiet`: no output; `auto`: a bar
            on a terminal, lines otherwise.
        console: Console to print to; None: standard output.
        line_interval_s: Minimum time between two lines in seconds, >= 0.

    Raises:
        ConfigError: If `mode` is invalid.
    """

    def __init__(
        self,
        mode: ProgressMode,
        console: Console | None = None,
        line_interval_s: float = LINE_INTERVAL_S,
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
        """Start the bar in bar mode; `shown_at` is the time of the last update."""
        self._shown_at = shown_at
        if self.mode == "bar":
            # No refresh thread: the thread would compete with training for the GIL, and a fork
            # while the thread holds a lock could deadlock the child.
            self._bar = Progress(
                BarColumn(table_column=Column(width=BAR_WIDTH)),
                TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
                console=self._console,
                auto_refresh=False,
            )
            self._bar.add_task("", total=1.0)
            self._bar.start()

    @property
    def has_bar(self) -> bool:
        """Whether a bar is active."""
        return self._bar is not None

    def is_due(self, now: float) -> bool:
        """Return whether enough time has passed for another line or an update of the bar."""
        return now - self._shown_at >= self._interval_s

    def is_silent(self, now: float, started_at: float) -> bool:
        """Return whether no line was printed for `HEARTBEAT_S` since the last one or the start."""
        return self.mode == "lines" and now - max(self._shown_at, started_at) >= HEARTBEAT_S

    def show(self, now: float, description: str, share: float | None, status: str) -> None:
        """Print a line, or update the bar.

        Args:
            now: Time in seconds.
            description: Text before the bar.
            share: Completed fraction in [0, 1]; None: unknown.
            status: Text after the bar.
        """
        self._shown_at = now
        if self._bar is None:
            self.say(f"{description}  {status}")
            return
        self._bar.update(
            self._bar.task_ids[0],
            description=f"{description}  {status}",
            completed=0.0 if share is None else share,
            total=None if share is None else 1.0,
        )
        self._bar.refresh()

    def say(self, text: str, style: str = "") -> None:
        """Print a line; does nothing in quiet mode."""
        text = printable(text)
        if text:
            CONSOLE.info(text)
        if self.mode != "quiet":
            # Lines may be written to files and pipes: no wrapping at 80 columns, no markup.
            encoding = self._console.encoding
            text = text.encode(encoding, "replace").decode(encoding)
            self._console.print(Text(text, style=style), soft_wrap=True, highlight=False)

    def silence(self) -> None:
        """Stop all output."""
        self.mode, self._interval_s = "quiet", math.inf

    def close(self) -> None:
        """Remove the bar and restore the terminal; may be called more than once."""
        if self._bar is not None:
            bar, self._bar = self._bar, None
            bar.stop()


class Screen(Console):
    """Standard output that raises OSError on a closed pipe instead of exiting the process."""

    def on_broken_pipe(self) -> None:
        """Send output to the null device and raise OSError, so the tracker drops the console."""
        abandon_output()
        raise BrokenPipeError("standard output was closed")


TIMES = tuple(
    f"time/{name}_s" for name in ("env", "collect", "update", "evaluate", "checkpoint", "epoch")
)
"""Time metrics of the parts of a run; the last metric is the total."""


class ConsoleWriter(MetricsWriter):
    """Shows progress during training and a summary at the end.

    Args:
        mode: See `Display`.
        console: Console to print to; None: standard output.
        line_interval_s: Minimum time between two lines in seconds, >= 0; the final line is always
            printed.
        clock: Returns the time in seconds, with an arbitrary origin.

    Raises:
        ConfigError: If `mode` is invalid.
    """

    is_kept = False

    def __init__(
        self,
        mode: ProgressMode = "auto",
        console: Console | None = None,
        line_interval_s: float = LINE_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._display = Display(mode, console, line_interval_s)
        self._clock = clock
        self._status = _Status(RunInfo(), clock())
        self._has_more = False
        """Whether the last epoch has not been displayed yet."""
        self._said_at = -math.inf
        """Time when an evaluation was last printed above the bar."""

    def start(self, run: RunInfo) -> None:
        """Print the title and start the bar."""
        self._status = _Status(run, self._clock())
        if run.title:
            self._display.say(run.title, style="bold")
        self._display.open()
        if self._display.has_bar:
            self._show(self._clock())

    def write(self, row: Mapping[str, float]) -> None:
        """Show the metrics of an epoch."""
        self._status.take(row)
        now = self._clock()
        self._has_more = self._display.mode != "quiet"
        if self._display.has_bar and EVAL_RETURN in row and now >= self._said_at + LINE_INTERVAL_S:
            self._said_at = now
            self._display.say(f"{self._status.epoch_text()}  {self._status.text(now)}")
        if self._display.is_due(now):
            self._show(now)

    def advance(self, progress_fraction: float, env_steps: int) -> None:
        """Update the bar within an epoch; without a bar, print a line every `HEARTBEAT_S`."""
        now = self._clock()
        self._status.fraction, self._status.env_steps = progress_fraction, env_steps
        if self._display.has_bar:
            is_due = self._display.is_due(now)
        else:
            is_due = self._display.is_silent(now, self._status.started_at)
        if is_due:
            self._show(now)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the bar and print the summary; no summary if the run failed in its first epoch."""
        self.close()
        if self._status.epoch == 0 and summary.get("stop_reason") in FAILURES:
            return
        for line in ["", *field_lines(self._status.outcome(summary, self._clock()))]:
            self._display.say(line)

    def close(self) -> None:
        """Show pending output and restore the terminal."""
        try:
            if self._display.has_bar or self._has_more:
                self._show(self._clock())
        finally:
            self._display.close()

    def _show(self, now: float) -> None:
        self._has_more = False
        status = self._status
        self._display.show(now, status.epoch_text(), status.share(now), status.text(now))


class _Status:
    """State and text of the status line of a run."""

    def __init__(self, run: RunInfo, now: float) -> None:
        self.run = run
        self.epoch = 0
        self.env_steps = 0
        self.fraction = 0.0
        self.latest: dict[str, float] = {}
        self.best: tuple[float, int] | None = None
        self._shown = {"train": TRAIN_RETURN, "eval": EVAL_RETURN}
        if run.opponent:
            self._shown = {"train length": TRAIN_LENGTH, f"vs {run.opponent}": run.metric}
        self._seconds: Counter[str] = Counter()
        for row in run.past_rows:
            self.take(row)
        self.started_at = now
        self.started_with = self.env_steps
        self.seconds_before = run.past_rows[-1].get(TOTAL_S, 0.0) if run.past_rows else 0.0
        self.started_share = self.share(now) or 0.0

    def take(self, row: Mapping[str, float]) -> None:
        """Update the status from the row of a finished epoch."""
        self.epoch = int(row[EPOCH])
        self.env_steps = int(row[ENV_STEPS])
        self.fraction = 0.0
        self._seconds.update({n: row[n] for n in TIMES if n in row})
        names = (*self._shown.values(), EVAL_RETURN_STD, STAGE)
        self.latest.update({n: row[n] for n in names if math.isfinite(row.get(n, math.nan))})
        score = row.get(self.run.metric, math.nan)
        if math.isfinite(score) and (self.best is None or self.run.is_better(score, self.best[0])):
            self.best = (score, self.epoch)

    def share(self, now: float) -> float | None:
        """Return the completed fraction of the run in [0, 1]; None if the run has no limit."""
        shares = []
        if self.run.total_env_steps:
            shares.append(self.env_steps / self.run.total_env_steps)
        if self.run.n_epochs:
            shares.append((self.epoch + self.fraction) / self.run.n_epochs)
        if self.run.max_wall_time_s:
            elapsed = self.seconds_before + now - self.started_at
            shares.append(elapsed / self.run.max_wall_time_s)
        return min(max(shares), 1.0) if shares else None

    def speed(self, now: float) -> float:
        """Return environment steps per second since the start of this process; NaN if unknown."""
        elapsed = now - self.started_at
        return (self.env_steps - self.started_with) / elapsed if elapsed > 0 else math.nan

    def remaining_s(self, now: float) -> float:
        """Return the estimated time to the end of the run in seconds; NaN if unknown."""
        share = self.share(now)
        if share is None or share <= self.started_share:
            return math.nan
        return (now - self.started_at) * (1 - share) / (share - self.started_share)

    def epoch_text(self) -> str:
        """Format the number of the epoch with a fixed width."""
        if not self.run.n_epochs:
            return f"epoch {self.epoch:>3}"
        return f"epoch {self.epoch:>{len(str(self.run.n_epochs))}}/{self.run.n_epochs}"

    def text(self, now: float) -> str:
        """Format the current metrics in one line, the most important ones first."""
        speed, total = self.speed(now), self.run.total_env_steps
        steps = compact(self.env_steps)
        limit = f"/{compact(total)} steps" if total else " steps"
        if total and self.env_steps > total and steps != compact(total):
            limit = f" steps (past {compact(total)})"  # The last update may exceed the limit.
        parts = [f"{steps:>5}{limit}", f"{compact(speed) if math.isfinite(speed) else '-':>5}/s"]
        if self.share(now) is not None:
            parts.append(f"eta {duration(self.remaining_s(now))}")
        for label, name in self._shown.items():
            if name in self.latest:
                parts.append(f"{label} {readable(self.latest[name])}")
        if STAGE in self.latest:
            parts.append(f"stage {int(self.latest[STAGE])}")
        if self.best is not None:
            parts.append(f"best {readable(self.best[0])}")
        return "  ".join(parts)

    def outcome(self, summary: Mapping[str, Any], now: float) -> list[tuple[str, str]]:
        """Return the name and the text of each line of the summary."""
        found = dict(summary)
        elapsed = found.get("wall_time_s", now - self.started_at)
        speed = found.get("steps_per_second", self.speed(now))
        final = self.latest.get(self._shown.get("eval", self.run.metric))
        final_std = None if self.run.opponent else self.latest.get(EVAL_RETURN_STD)
        steps, total = int(found.get("env_steps", self.env_steps)), self.run.total_env_steps
        exceeded = f" (the last update exceeded {total:,})" if total and steps > total else ""
        lines = [
            ("stopped", str(found.get("stop_reason", "training ended"))),
            ("epochs", f"{int(found.get('epochs', self.epoch)):,}"),
            (self.run.step_label, f"{steps:,}{exceeded}"),
            ("wall time", duration(elapsed)),
            ("speed", f"{compact(speed) if math.isfinite(speed) else '-'} steps/s"),
        ]
        shares = time_shares(self._seconds)
        if shares:
            lines.append(("time", shares))
        if self.best is not None:
            name = "best return" if self.run.metric == EVAL_RETURN else f"best {self.run.metric}"
            epoch = int(found.get("best_epoch") or self.best[1])
            lines.append((name, f"{readable(self.best[0])} at epoch {epoch:,}"))
        if final is not None:
            spread = "" if final_std is None else f" ± {readable(final_std)}"
            spread = f" against {self.run.opponent}" if self.run.opponent else spread
            lines.append(("final evaluation", readable(final) + spread))
        for name, test in final_tests(summary).items():
            mean, std = (readable(test[f"episode_return_{key}"]) for key in ("mean", "std"))
            text = f"{mean} ± {std} ({int(test['episodes']):,} episodes)"
            lines.append((f"test, {name} policy", text))
        if self.run.run_dir is not None:
            lines.append(("run directory", str(self.run.run_dir)))
            plot = self.run.run_dir / PLOTS / CURVE
            if plot.exists():
                lines.append(("learning curve", str(plot)))
        return lines


def time_shares(seconds: Mapping[str, float]) -> str:
    """Format the fractions of the time spent in the parts of a run in percent; empty if unknown.

    Args:
        seconds: Sums of `TIMES` over the run.
    """
    env, collect, update, evaluate, checkpoint, whole = (seconds.get(name, 0.0) for name in TIMES)
    if not whole:
        return ""
    first = {"environment": env, "policy": collect - env} if env else {"experience": collect}
    parts = {**first, "update": update, "evaluation": evaluate, "writing": checkpoint}
    parts["other"] = whole - sum(parts.values())
    shares = {name: round(100 * part / whole) for name, part in parts.items()}
    return ", ".join(f"{name} {share} %" for name, share in shares.items() if share > 0)
