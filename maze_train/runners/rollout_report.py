"""Report of a rollout: numbers over its episodes, files, and progress for people."""

from __future__ import annotations

import csv
import math
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from maze_train.errors import RunDirectoryError
from maze_train.files import atomic_write
from maze_train.tracking.console import Screen, make_bar
from maze_train.tracking.formatting import compact, duration, readable
from maze_train.tracking.rows import RunInfo
from maze_train.tracking.writers import JSONSummaryWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console
    from rich.progress import Progress

    from maze_train.rollout.player import PlayedEpisode
    from maze_train.tracking.console import ProgressMode

__all__ = [
    "EPISODES_FILE",
    "SUMMARY_FILE",
    "EpisodesFile",
    "RolloutProgress",
    "RolloutSummary",
    "summarise",
    "tell_stop",
    "write_episodes",
    "write_summary",
    "writing",
]

EPISODES_FILE, SUMMARY_FILE = "evaluation.csv", "summary.json"
COLUMNS = (
    "number", "seed", "return", "length", "success", "terminated", "truncated", "lost"
)  # fmt: skip
INTERVAL_S = {"bar": 0.1, "lines": 1.0}
"""Least time between two refreshes of the display, by its mode."""


@dataclass(frozen=True)
class RolloutSummary:
    """Numbers over the episodes of a rollout; NaN where there is none.

    Episodes that were lost count in `lost` and `env_steps` only. Deviations are those of the
    episodes themselves (divided by n).
    """

    episodes: int
    """Episodes that were played, lost ones included."""

    lost: int
    """Episodes that were lost: the environment returned numbers that are not finite."""

    env_steps: int
    """Steps of all episodes."""

    return_mean: float
    return_std: float
    return_min: float
    return_max: float
    length_mean: float
    length_std: float
    length_min: float
    length_max: float

    success_rate: float
    """Share of successes among the episodes that reported whether they were one."""

    def as_dict(self) -> dict[str, float]:
        """The numbers by name."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The numbers as a table for people."""
        rows = [("", "mean", "std", "min", "max")]
        for name in ("return", "length"):
            numbers = (getattr(self, f"{name}_{part}") for part in rows[0][1:])
            rows.append((name, *map(readable, numbers)))  # type: ignore[arg-type]
        if math.isfinite(self.success_rate):
            rows.append(("success", readable(self.success_rate), "", "", ""))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in rows
        ]


def summarise(episodes: Iterable[PlayedEpisode]) -> RolloutSummary:
    """The numbers over some episodes."""
    episodes = list(episodes)
    whole = [episode for episode in episodes if not episode.lost]
    told = [episode.success for episode in whole if not math.isnan(episode.success)]
    return RolloutSummary(
        len(episodes),
        len(episodes) - len(whole),
        sum(episode.length for episode in episodes),
        *spread([episode.episode_return for episode in whole]),
        *spread([float(episode.length) for episode in whole]),
        float(np.mean(told)) if told else math.nan,
    )


def spread(values: Sequence[float]) -> tuple[float, float, float, float]:
    """Mean, standard deviation, least and largest of some numbers; NaN of none."""
    if not values:
        return (math.nan,) * 4
    array = np.array(values, np.float64)
    return float(array.mean()), float(array.std()), float(array.min()), float(array.max())


class EpisodesFile:
    """A CSV file that has the row of an episode as soon as that is over; a context manager.

    A process that is killed leaves the rows up to there. `write_episodes` puts a complete file with
    the same bytes in its place.

    Args:
        path: The file.

    Raises:
        OSError: If it can not be written.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        try:
            self._write(_line(COLUMNS))
        except BaseException:
            self.__exit__()
            raise

    def add(self, episode: PlayedEpisode) -> None:
        """Write the row of an episode.

        Raises:
            OSError: If the disk does not take it.
        """
        self._write(_row(episode))

    def _write(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()

    def __enter__(self) -> EpisodesFile:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # a failed write was reported, and is tried once more
            self._file.close()


def write_episodes(path: Path, episodes: Iterable[PlayedEpisode]) -> None:
    """Write one row per episode as CSV; flags are 0 or 1, an unknown success is empty.

    Raises:
        OSError: If the file can not be written; what was there stays.
    """
    lines = [_line(COLUMNS), *map(_row, episodes)]
    with atomic_write(path) as file:
        file.writelines(lines)


def _row(episode: PlayedEpisode) -> bytes:
    success = "" if math.isnan(episode.success) else repr(float(episode.success))
    flags = (int(episode.terminated), int(episode.truncated), int(episode.lost))
    total = repr(float(episode.episode_return))
    return _line((episode.number, episode.seed, total, episode.length, success, *flags))


def _line(values: Iterable[Any]) -> bytes:
    buffer = StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(values)
    return buffer.getvalue().encode()


def write_summary(directory: Path, content: Mapping[str, Any]) -> None:
    """Write `summary.json`; NaN becomes null.

    Raises:
        OSError: If the file can not be written; what was there stays.
    """
    writer = JSONSummaryWriter(SUMMARY_FILE)
    writer.start(RunInfo(run_dir=directory))
    writer.finish(content)


def tell_stop(played: int, requested: int, output_dir: Path) -> None:
    """Print where an unfinished rollout stopped.

    Args:
        played: Episodes that were played.
        requested: Episodes that were asked for.
        output_dir: Directory of the results.
    """
    count = f"{played:,} of {requested:,} episodes"
    with suppress(OSError):
        print(f"stopped after {count}; results: {output_dir}", file=sys.stderr, flush=True)


@contextmanager
def writing(output_dir: Path) -> Iterator[None]:
    """Errors of the disk are those of the directory of the results.

    Raises:
        RunDirectoryError: In place of OSError.
    """
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(f"{output_dir} can not be written: {error}") from error


class RolloutProgress:
    """Shows how many episodes were played; a context manager, which gives the terminal back.

    A reader of standard output that goes away costs the display, not the rollout.

    Args:
        total: Episodes to play.
        mode: `bar`, `lines`, `quiet`, or `auto`: a bar on a terminal, lines elsewhere.
        console: Where to print; None: standard output.
        clock: Time in seconds, any origin.
    """

    def __init__(
        self,
        total: int,
        mode: ProgressMode = "auto",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = Screen() if console is None else console
        if mode == "auto":
            is_screen = self._console.is_terminal and not self._console.is_dumb_terminal
            mode = "bar" if is_screen else "lines"
        self._mode = mode
        self._total = total
        self._clock = clock
        self._bar: Progress | None = None
        self._started_at = self._shown_at = clock()
        self._played = 0
        self._steps = 0
        self._sum_of_returns = 0.0
        self._counted = 0

    def __enter__(self) -> RolloutProgress:
        if self._mode == "bar":
            self._bar = make_bar(self._console)
            self._bar.add_task("", total=float(self._total), status="")
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            bar, self._bar = self._bar, None
            with suppress(OSError):
                self._fill(bar)
                bar.stop()

    def say(self, lines: Iterable[str]) -> None:
        """Print lines, unless everything is quiet."""
        for line in lines:
            self._print(line)

    def steps(self, count: int) -> None:
        """Count so many steps."""
        self._steps += count
        self._show()

    def ended(self, episode: PlayedEpisode) -> None:
        """Take in an episode."""
        self._played += 1
        if not episode.lost:
            self._counted += 1
            self._sum_of_returns += episode.episode_return
        self._show()

    def _show(self) -> None:
        interval, now = INTERVAL_S.get(self._mode, math.inf), self._clock()
        if now - self._shown_at < interval:
            return
        self._shown_at = now
        if self._bar is None:
            self._print(f"{self._episodes_text()}  {self._status()}")
            return
        self._fill(self._bar)
        try:
            self._bar.refresh()
        except OSError:
            self._mode = "quiet"

    def _fill(self, bar: Progress) -> None:
        bar.update(
            bar.task_ids[0],
            description=self._episodes_text(),
            completed=float(self._played),
            status=self._status(),
        )

    def _episodes_text(self) -> str:
        return f"episode {self._played:>{len(str(self._total))}}/{self._total}"

    def _status(self) -> str:
        elapsed = self._clock() - self._started_at
        parts = [f"{compact(self._steps):>5} steps"]
        if elapsed > 0:
            parts.append(f"{compact(self._steps / elapsed):>5}/s")
        if self._played:
            left = elapsed * (self._total - self._played) / self._played
            parts.append(f"eta {duration(left)}")
        if self._counted:
            parts.append(f"return {readable(self._sum_of_returns / self._counted)}")
        return "  ".join(parts)

    def _print(self, text: str) -> None:
        if self._mode == "quiet":
            return
        try:
            # No wrapping and no markup: lines are for files and pipes as well.
            self._console.print(Text(text), soft_wrap=True, highlight=False)
        except OSError:
            self._mode = "quiet"
