"""Metric writers: CSV, TensorBoard, JSON, plots."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from textwrap import indent
from typing import IO, TYPE_CHECKING, Any

from maze_train.core.checks import check_below
from maze_train.core.files import atomic_write, open_own
from maze_train.core.folders import check_held, make_folders
from maze_train.core.names import CURVE, METRICS, PLOTS, SUMMARY
from maze_train.core.plain_yaml import dump_yaml
from maze_train.core.targets import build_targets
from maze_train.core.text import csv_text, flattened
from maze_train.tracking.config import TrackingConfig
from maze_train.tracking.console import ConsoleWriter
from maze_train.tracking.report import draw_learning_curve, save_picture, write_leagues
from maze_train.tracking.tracker import (
    ENV_STEPS,
    EVAL_RETURN,
    MetricsWriter,
    RunInfo,
    ordered_columns,
)

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


LEAGUE = "league/"
"""Prefix of the metrics of self-play."""


class LearningCurveWriter(MetricsWriter):
    """Writes `plots/learning_curve.png`: training and evaluation returns over environment steps.

    The plot is drawn at the end of training. Results of self-play (`write_leagues`) are also
    written after each evaluation.

    Args:
        filename: Name of the file below the run directory.
    """

    def __init__(self, filename: str = f"{PLOTS}/{CURVE}") -> None:
        check_below("filename", filename)
        self.filename = filename
        self._run = RunInfo()
        self._rows: list[Mapping[str, float]] = []  # Shared with the tracker.
        self._has_league = False

    def start(self, run: RunInfo) -> None:
        """Start with the rows of the resumed run, if any."""
        self._run = run
        self._rows = list(run.past_rows)
        self._has_league = any(key.startswith(LEAGUE) for row in self._rows for key in row)

    def write(self, row: Mapping[str, float]) -> None:
        """Keep a row."""
        self._rows.append(row)
        self._has_league = self._has_league or any(key.startswith(LEAGUE) for key in row)
        if EVAL_RETURN in row:
            self._write_leagues()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Draw the plot, unless the run failed before the end of the first epoch."""
        if self._run.run_dir is not None and self._rows:
            figure = draw_learning_curve(self._rows, self._run)
            save_picture(figure, self._run.run_dir / self.filename)
        self._write_leagues()

    def _write_leagues(self) -> None:
        if self._run.run_dir is not None and self._has_league:
            write_leagues(self._rows, self._run.run_dir, self._run.title)


class CSVWriter(MetricsWriter):
    """Writes `metrics.csv`: one line per epoch, one column per metric.

    Floats are written with full precision; a missing value is an empty cell. Each line is flushed
    immediately, so a killed run keeps its rows. The file is rewritten when a new metric appears,
    and when writing succeeds again after an error.

    Args:
        filename: Path of the file relative to the run directory.
        columns: Initial columns, which the file always has.
    """

    recovers = True

    def __init__(self, filename: str = METRICS, columns: Sequence[str] = ()) -> None:
        check_below("filename", filename)
        self.filename = filename
        self._path: Path | None = None
        self._first_columns = columns
        self._columns: list[str] = []
        self._rows: list[Mapping[str, float]] = []  # Shared with the tracker.
        self._file: IO[str] | None = None

    def start(self, run: RunInfo) -> None:
        """Start the file with the rows of the resumed run, if any."""
        if run.run_dir is None:
            return
        self._path = run.run_dir / self.filename
        make_folders(self._path.parent)
        self._columns, self._rows = list(self._first_columns), []
        if run.past_rows or self._columns:
            for row in run.past_rows:
                self._take(row)
            self._replace()
        elif self._path.exists() and run.resumed_at_step is not None:
            self._path.unlink()  # Rows of epochs that will be repeated.
        elif self._path.exists():
            # The file may belong to another run, so it is renamed instead of overwritten.
            os.replace(self._path, self._path.with_suffix(".previous.csv"))

    def write(self, row: Mapping[str, float]) -> None:
        """Append one line."""
        if self._path is None:
            return
        if self._take(row) or self._file is None:
            self._replace()
            return
        try:
            check_held(self._path)  # An open file follows its directory.
            self._file.write(csv_text(self._rows[-1:], self._columns, header=False))
            self._file.flush()
        except OSError:
            self.close()
            raise

    def sync(self) -> None:
        """Flush the file to disk; raises OSError if the file is gone."""
        if self._path is None or not self._columns:
            return
        if self._file is None:
            self._replace()
        assert self._file is not None
        try:
            check_held(self._path)
            os.fsync(self._file.fileno())
            self._path.stat()
        except OSError:
            self.close()
            raise

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write rows that could not be written before."""
        self.sync()

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # Rows that it failed to write are written again later.
                file.close()

    def _take(self, row: Mapping[str, float]) -> bool:
        """Keep a row; return whether it has new columns."""
        self._rows.append(row)
        has_new = not row.keys() <= set(self._columns)
        if has_new:
            self._columns = ordered_columns([*self._columns, *row])
        return has_new

    def _replace(self) -> None:
        """Replace the file by one with all rows and open it for appending."""
        assert self._path is not None
        self.close()
        with atomic_write(self._path) as new:
            new.write(csv_text(self._rows, self._columns).encode())
        descriptor = open_own(self._path, os.O_WRONLY | os.O_APPEND)
        self._file = os.fdopen(descriptor, "a", encoding="utf-8", newline="")


OF_NUMBERS = ("env", "model", "algorithm", "runner", "seed", "total_steps")
"""Sections of settings that are logged as TensorBoard hyperparameters."""


class TensorBoardWriter(MetricsWriter):
    """Writes TensorBoard event files, with environment steps on the x axis.

    The configuration is logged as text, and its values as hyperparameters.
    """

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None

    def start(self, run: RunInfo) -> None:
        """Open an event file; points after the checkpoint of a resumed run are discarded."""
        if run.run_dir is None:
            return
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if run.resumed_at_step is None else run.resumed_at_step + 1
        make_folders(run.run_dir / run.name)  # TensorBoard follows links.
        self._writer = SummaryWriter(str(run.run_dir / run.name), purge_step=purge_step)
        settings = dump_yaml(_plain(run.config))
        self._writer.add_text("config", indent(settings, "    "))  # Markdown shows it as code.
        self._add_hparams(run)

    def _add_hparams(self, run: RunInfo) -> None:
        """Log the settings that affect results as hyperparameters."""
        from torch.utils.tensorboard.summary import hparams

        assert self._writer is not None
        settings = flattened({key: run.config[key] for key in OF_NUMBERS if key in run.config})
        values = {
            key: value if isinstance(value, (bool, int, float, str)) else str(value)
            for key, value in settings.items()
        }
        for summary in hparams(values, {run.metric: None})[:2]:  # type: ignore[no-untyped-call]
            self._writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]

    def write(self, row: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        if self._writer is None:
            return
        check_held(Path(self._writer.log_dir))
        step = int(row[ENV_STEPS])
        for name, value in row.items():
            if name != ENV_STEPS:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()  # Errors of later writes occur in its thread.

    def sync(self) -> None:
        """Flush all points to the event file."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write the remaining points and stop the writer thread."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()


class JSONSummaryWriter(MetricsWriter):
    """Writes `summary.json`, the outcome of a run; NaN and infinity become null.

    Args:
        filename: Path of the file relative to the run directory.
    """

    def __init__(self, filename: str = SUMMARY) -> None:
        check_below("filename", filename)
        self.filename = filename
        self._run_dir: Path | None = None

    def start(self, run: RunInfo) -> None:
        """Store the run directory."""
        self._run_dir = run.run_dir

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the file."""
        if self._run_dir is not None:
            text = json.dumps(_plain(summary), indent=2, allow_nan=False) + "\n"
            with atomic_write(self._run_dir / self.filename) as file:
                file.write(text.encode())


def _plain(value: Any) -> Any:
    """Convert a value to JSON types; other values become text."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "items"):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value)


WRITERS: dict[str, type[MetricsWriter]] = {
    "csv": CSVWriter,
    "tensorboard": TensorBoardWriter,
    "summary": JSONSummaryWriter,
    "plot": LearningCurveWriter,
}
"""Writers by the setting that enables them."""


def build_writers(config: TrackingConfig) -> list[MetricsWriter]:
    """Build the configured writers; the console comes last, after all files are written.

    Raises:
        ConfigError: If an entry of `writers` cannot be built or is not a `MetricsWriter`.
        MissingExtraError: If a writer needs a package that is not installed.
    """
    writers = [writer() for setting, writer in WRITERS.items() if getattr(config, setting)]
    writers += build_targets(config.writers, "tracking.writers", MetricsWriter)
    writers.append(ConsoleWriter(config.progress))
    return writers
