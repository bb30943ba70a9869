"""Writers of metrics that write files."""

from __future__ import annotations

import csv
import json
import math
import os
from contextlib import suppress
from io import StringIO
from numbers import Integral, Real
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from maze_train.checks import check_below
from maze_train.files import atomic_write, check_held
from maze_train.targets import build_target
from maze_train.tracking.console import ConsoleWriter
from maze_train.tracking.curve import LearningCurveWriter
from maze_train.tracking.rows import ordered_columns
from maze_train.tracking.tracker import ENV_STEPS, MetricsWriter, RunInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.utils.tensorboard import SummaryWriter

    from maze_train.tracking.config import TrackingConfig


class CSVWriter(MetricsWriter):
    """`metrics.csv`: one line per epoch, one column per metric.

    Numbers are written so that reading them gives the same numbers; a metric without a value has an
    empty cell. Each line is handed to the system at once, so a killed run keeps its rows. When a
    metric appears for the first time, the file is replaced by one with the new column; so it is
    when the disk takes it again after it did not.

    Args:
        filename: Name of the file below the run directory.
        columns: The first columns, which the file has from the beginning.
    """

    recovers = True

    def __init__(self, filename: str = "metrics.csv", columns: Sequence[str] = ()) -> None:
        check_below("filename", filename)
        self.filename = filename
        self._path: Path | None = None
        self._first_columns = columns
        self._columns: list[str] = []
        self._lines: list[dict[str, str]] = []
        self._file: IO[str] | None = None

    def start(self, run: RunInfo) -> None:
        """Begin the file with the rows of the run that is continued, if there is one."""
        if run.run_dir is None:
            return
        run.run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run.run_dir / self.filename
        self._columns, self._lines = list(self._first_columns), []
        if run.past_rows or self._columns:
            for row in run.past_rows:
                self._take(row)
            self._replace()
        elif self._path.exists() and run.resumed_at_step is not None:
            self._path.unlink()  # rows of epochs that will be repeated
        elif self._path.exists():
            # Whose rows these are is not for a writer to judge: they are kept, out of the way.
            os.replace(self._path, self._path.with_suffix(".previous.csv"))

    def write(self, row: Mapping[str, float]) -> None:
        """Append one line."""
        if self._path is None:
            return
        if self._take(row) or self._file is None:
            self._replace()
            return
        try:
            check_held(self._path)  # an open file follows its directory
            line = self._lines[-1]
            self._file.write(_csv_line(line.get(name, "") for name in self._columns))
            self._file.flush()
        except OSError:
            self.close()
            raise

    def sync(self) -> None:
        """Make the system write the file; an `OSError` means that it is gone."""
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
        """Write what the disk did not take before."""
        self.sync()

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # What it could not write is written anew.
                file.close()

    def _take(self, row: Mapping[str, float]) -> bool:
        """Keep a row; returns whether it has new columns."""
        self._lines.append({name: cell(value) for name, value in row.items()})
        has_new = not row.keys() <= set(self._columns)
        if has_new:
            self._columns = ordered_columns([*self._columns, *row])
        return has_new

    def _replace(self) -> None:
        """Replace the file by one with all rows, and append to that."""
        assert self._path is not None
        self.close()
        with atomic_write(self._path) as new:
            new.write(_csv_line(self._columns).encode())
            for line in self._lines:
                new.write(_csv_line(line.get(name, "") for name in self._columns).encode())
        self._file = self._path.open("a", encoding="utf-8", newline="")


class TensorBoardWriter(MetricsWriter):
    """TensorBoard event files in the run directory, with environment steps on the x axis."""

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None

    def start(self, run: RunInfo) -> None:
        """Open an event file; points after the checkpoint of a continued run are marked void."""
        if run.run_dir is None:
            return
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if run.resumed_at_step is None else run.resumed_at_step + 1
        self._writer = SummaryWriter(str(run.run_dir), purge_step=purge_step)

    def write(self, row: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        if self._writer is None:
            return
        check_held(Path(self._writer.log_dir))
        step = int(row[ENV_STEPS])
        for name, value in row.items():
            if name != ENV_STEPS:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()  # what its thread writes later fails there, out of reach

    def sync(self) -> None:
        """Wait until all points are in the event file."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write what is left and end the thread of the event file."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()


class JSONSummaryWriter(MetricsWriter):
    """`summary.json`: the outcome of a run; NaN and infinities become null, as JSON has neither.

    Args:
        filename: Name of the file below the run directory.
    """

    def __init__(self, filename: str = "summary.json") -> None:
        check_below("filename", filename)
        self.filename = filename
        self._run_dir: Path | None = None

    def start(self, run: RunInfo) -> None:
        """Remember the directory."""
        self._run_dir = run.run_dir

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the file."""
        if self._run_dir is not None:
            text = json.dumps(_plain(summary), indent=2, allow_nan=False) + "\n"
            with atomic_write(self._run_dir / self.filename) as file:
                file.write(text.encode())


def _csv_line(cells: Iterable[str]) -> str:
    buffer = StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()


def cell(value: float | None) -> str:
    """A number so that reading it gives the same number; None is empty."""
    if value is None:
        return ""
    # numpy's scalars are numbers too, but their repr is not one.
    return repr(int(value) if isinstance(value, Integral) else float(value))


def _plain(value: Any) -> Any:
    """The value in JSON's types; what JSON has no type for is written as text."""
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
"""Writers by the setting that asks for them."""


def build_writers(config: TrackingConfig) -> list[MetricsWriter]:
    """The writers that the settings ask for; the console comes last, after the files are written.

    Raises:
        ConfigError: If one of `writers` can not be built or is not a `MetricsWriter`.
        MissingExtraError: If one needs a package that is not installed.
    """
    writers = [writer() for setting, writer in WRITERS.items() if getattr(config, setting)]
    for i, node in enumerate(config.writers):
        writers.append(build_target(node, key=f"tracking.writers[{i}]", kind=MetricsWriter))
    writers.append(ConsoleWriter(config.progress))
    return writers
