"""Metrics of a run, and writers for CSV and JSON."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, TypeVar

import numpy as np
import torch

from maze_train.core.checks import check_below
from maze_train.core.files import atomic_write, open_own
from maze_train.core.folders import check_guarded, make_folders
from maze_train.core.names import METRICS, SUMMARY
from maze_train.core.notices import warn
from maze_train.core.report import csv_text
from maze_train.core.run_directory import EPOCH, MetricsRow
from maze_train.core.types import Array

UPDATES = "updates"
ENV_STEPS = "env_steps"
TRAIN_RETURN = "train/episode_return_mean"
EVAL_RETURN = "eval/episode_return_mean"
STAGE = "curriculum/stage"
TRAIN_LENGTH = "train/episode_length_mean"
TOTAL_S = "time/total_s"
EVAL_RETURN_STD = "eval/episode_return_std"


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Description of a run for writers."""

    run_dir: Path | None = None
    """Directory of the run; None if nothing is written to disk."""

    title: str = ""
    """Display name, such as `PPO on CartPole-v1`."""

    name: str = ""
    """Subfolder for TensorBoard files in the run directory; empty for no subfolder."""

    group: str = ""
    """Common name of related runs, such as the jobs of a sweep; empty for none."""

    config: dict[str, Any] = field(default_factory=dict)
    """Configuration as plain values, with the defaults of the networks filled in, without passwords
    and tokens."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """Entries of `summary.json` that describe the run: algorithm, environment, seed, version,
    networks and the metric that selects the best policy."""

    total_env_steps: int | None = None
    """Environment steps after which training ends; None: not limited."""

    n_epochs: int | None = None
    """Epochs after which training ends; None: not limited."""

    max_wall_time_s: float | None = None
    """Wall-clock time in seconds after which training ends; None: not limited."""

    step_label: str = "environment steps"
    """Display name of the unit of `env_steps`."""

    metric: str = EVAL_RETURN
    """Metric that selects the best policy."""

    mode: Literal["max", "min"] = "max"
    """Whether larger (max) or smaller (min) values of the metric are better."""

    past_rows: tuple[MetricsRow, ...] = ()
    """Rows of the epochs before the checkpoint from which this run resumed (see `read_rows`)."""

    resumed_at_step: int | None = None
    """Environment steps at the checkpoint to resume from; None for a new run."""

    @property
    def opponent(self) -> str:
        """Opponent whose results select the best policy; empty without opponents."""
        return self.metric.split("/")[1][3:] if self.metric.startswith("eval/vs_") else ""

    def is_better(self, score: float, best: float) -> bool:
        """Return whether a score is better than the best score so far."""
        return score > best if self.mode == "max" else score < best


class MetricsWriter:
    """Base class of metric writers. Subclasses override some methods; the defaults do nothing.

    The order of calls is `start`, any number of `write`, `advance` and `sync`, `finish` if training
    finished, and always `close`. Writers must not use global state, so that several runs can share
    a process. If a method raises OSError, a warning is printed and training continues; without
    `recovers`, the writer is dropped.

    If `start` raises an exception other than OSError, the run does not start. Since the run
    directory must then be unchanged, writers open their files in the first `write`.
    """

    recovers: ClassVar[bool] = False
    """Whether unwritten rows are kept after an error; `write`, `sync` and `finish` then retry."""

    is_kept: ClassVar[bool] = True
    """Whether the files are required results, so that missing files are an error."""

    filename: str = ""
    """Path relative to the run directory, for messages; empty without a file or with several
    files."""

    def start(self, run: RunInfo) -> None:
        """Prepare to write the rows of a run."""

    def write(self, row: Mapping[str, float]) -> None:
        """Write the row of a finished epoch. The row may be stored but must not be modified."""

    def advance(self, progress_fraction: float, env_steps: int) -> None:
        """Show progress within an epoch.

        Args:
            progress_fraction: Completed fraction of the current epoch, in [0, 1].
            env_steps: Environment steps since the start of training.
        """

    def log_image(self, name: str, image: Array, env_steps: int) -> bool:
        """Store an image `[H, W, C]`, uint8; return whether it was stored."""
        return False

    def log_histogram(self, name: str, values: Array, env_steps: int) -> bool:
        """Store a histogram of values `[n]`; return whether it was stored."""
        return False

    def log_video(self, name: str, frames: Array, fps: float, env_steps: int) -> bool:
        """Store a video `[T, H, W, C]`, uint8; return whether it was stored."""
        return False

    def log_text(self, name: str, text: str, env_steps: int) -> bool:
        """Store a text in Markdown; return whether it was stored."""
        return False

    def sync(self) -> None:
        """Flush all rows to disk; called before a checkpoint is written."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the outcome of the run: plain values, keyed by name."""

    def close(self) -> None:
        """Release files, threads and the terminal; may be called more than once."""


class Tracker:
    """Forwards metrics to all writers and keeps the rows in memory.

    If a writer raises OSError, for example on a full disk, a warning is printed and training
    continues; without `recovers`, the writer is dropped. Any other exception propagates. The
    tracker is a context manager that calls `start` and `close`.

    Args:
        writers: The writers.
        run_info: Description of the run for the writers.
        warn: Called with warnings about writers; prints to stderr by default.
    """

    def __init__(
        self,
        writers: Sequence[MetricsWriter],
        run_info: RunInfo,
        warn: Callable[[str], None] = warn,
    ) -> None:
        self.run_info = run_info
        self.history: list[MetricsRow] = [dict(row) for row in run_info.past_rows]
        self._writers = list(writers)
        self._failing: set[MetricsWriter] = set()
        self._dropped: list[MetricsWriter] = []
        self._not_stored: set[str] = set()
        self._warn = warn

    @property
    def missing(self) -> list[str]:
        """Names of incomplete files or writers, except the console."""
        writers = [*self._dropped, *self._failing]
        return [
            str(writer.filename or type(writer).__name__) for writer in writers if writer.is_kept
        ]

    def start(self) -> None:
        """Open the writers."""
        self._forward(lambda writer: writer.start(self.run_info))

    def write(self, row: Mapping[str, float]) -> None:
        """Store a copy of the row of a finished epoch and forward it to all writers."""
        kept = dict(row)
        self.history.append(kept)
        self._forward(lambda writer: writer.write(kept), retries=True)

    def advance(self, progress_fraction: float, env_steps: int) -> None:
        """Show progress within an epoch.

        Args:
            progress_fraction: Completed fraction of the current epoch, in [0, 1].
            env_steps: Environment steps since the start of training.
        """
        self._forward(lambda writer: writer.advance(progress_fraction, env_steps))

    def log(self, kind: str, name: str, store: Callable[[MetricsWriter], bool]) -> None:
        """Store content that a callback logs; warn once if no writer stores this kind.

        Args:
            kind: Kind of the content, such as `image`, for the warning.
            name: Name of the content, for the warning.
            store: Function that passes the content to a writer and returns whether it was stored.
        """
        if not any(self._forward(store)) and kind not in self._not_stored:
            self._not_stored.add(kind)
            remedy = "use tracking.tensorboard=true, WandbWriter or MLflowWriter"
            self._warn(f"{name} is not stored: no writer of this run stores {kind}s; {remedy}")

    def sync(self) -> None:
        """Flush all rows to disk."""
        self._forward(lambda writer: writer.sync(), retries=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Forward the outcome of the run as plain values, keyed by name.

        The console shows `stop_reason`, `epochs`, `env_steps`, `wall_time_s`, `steps_per_second`
        and `final_test`, and the best and the last return of the rows.
        """
        self._forward(lambda writer: writer.finish(summary), retries=True)

    def close(self) -> None:
        """Close all writers, even if a writer fails; may be called more than once."""
        writers, self._writers = self._writers, []
        failure: Exception | None = None
        for writer in writers:
            try:
                writer.close()
            except OSError as error:
                self._report(writer, error)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def __enter__(self) -> Tracker:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _forward(
        self, call: Callable[[MetricsWriter], Result], retries: bool = False
    ) -> list[Result]:
        """Call all writers; return the results of the writers that did not fail.

        Args:
            call: Function to call with each writer.
            retries: Whether the call writes all missing rows of writers that recover.
        """
        results = []
        for writer in tuple(self._writers):
            try:
                results.append(call(writer))
                if retries:
                    self._failing.discard(writer)
            except OSError as error:
                if not writer.recovers:
                    self._drop(writer, error)
                elif writer not in self._failing:
                    self._failing.add(writer)
                    name = type(writer).__name__
                    self._warn(f"{name} could not write and will retry: {error}")
        return results

    def _drop(self, writer: MetricsWriter, error: OSError) -> None:
        self._writers.remove(writer)
        # After a failed write, closing may fail as well.
        with contextlib.suppress(OSError):
            writer.close()
        self._report(writer, error)

    def _report(self, writer: MetricsWriter, error: OSError) -> None:
        self._dropped.append(writer)
        name = type(writer).__name__
        self._warn(f"{name} is no longer updated; training continues: {error}")


def ordered_columns(names: Iterable[str]) -> list[str]:
    """Return names in column order: epoch, updates, env_steps, train, eval, others, time.

    The order of `names` is kept within a group.
    """

    def rank(name: str) -> int:
        if name in (EPOCH, UPDATES, ENV_STEPS):
            return (EPOCH, UPDATES, ENV_STEPS).index(name)
        group = name.split("/", 1)[0]
        return {"train": 3, "eval": 4, "time": 6}.get(group, 5)

    return sorted(dict.fromkeys(names), key=rank)


class CSVWriter(MetricsWriter):
    """Writes `metrics.csv`: one line per epoch, one column per metric.

    Floats are written with full precision; a missing value is an empty cell. Each line is flushed
    immediately, so a killed run keeps its rows. The file is rewritten when a new metric appears,
    and when writing succeeds again after an error.

    Args:
        filename: Path of the file relative to the run directory.
        columns: Columns that the file always contains.
    """

    recovers = True

    def __init__(self, filename: str = METRICS, columns: Sequence[str] = ()) -> None:
        check_below("filename", filename)
        self.filename = filename
        self._path: Path | None = None
        self._may_replace = True
        self._first_columns = columns
        self._columns: list[str] = []
        self._rows: list[Mapping[str, float]] = []  # Shared with the tracker.
        self._file: IO[str] | None = None

    def start(self, run: RunInfo) -> None:
        """Load the rows of the resumed run, if any."""
        if run.run_dir is None:
            return
        self._path = run.run_dir / self.filename
        self._columns, self._rows = list(self._first_columns), []
        self._may_replace = run.resumed_at_step is not None or bool(run.past_rows)
        for row in run.past_rows:
            self._take(row)

    def write(self, row: Mapping[str, float]) -> None:
        """Append one line."""
        if self._path is None:
            return
        if self._take(row) or self._file is None:
            self._replace()
            return
        try:
            check_guarded(self._path)  # An open file moves with its directory.
            self._file.write(csv_text(self._rows[-1:], self._columns, header=False))
            self._file.flush()
        except OSError:
            self.close()
            raise

    def sync(self) -> None:
        """Flush the file to disk; raises OSError if the file was removed."""
        if self._path is None or not self._columns:
            return
        if self._file is None:
            self._replace()
        assert self._file is not None
        try:
            check_guarded(self._path)
            os.fsync(self._file.fileno())
            self._path.stat()
        except OSError:
            self.close()
            raise

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write all rows that could not be written earlier."""
        self.sync()

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # Unwritten rows are written again later.
                file.close()

    def _take(self, row: Mapping[str, float]) -> bool:
        """Store a row; return whether the row has new columns."""
        self._rows.append(row)
        has_new = not row.keys() <= set(self._columns)
        if has_new:
            self._columns = ordered_columns([*self._columns, *row])
        return has_new

    def _replace(self) -> None:
        """Replace the file by a new file with all rows and open it for appending."""
        assert self._path is not None
        self.close()
        if not self._may_replace:
            make_folders(self._path.parent)
            with contextlib.suppress(FileNotFoundError):  # The file may belong to a different run.
                os.replace(self._path, self._path.with_suffix(".previous.csv"))
            self._may_replace = True
        with atomic_write(self._path) as new:
            new.write(csv_text(self._rows, self._columns).encode())
        descriptor = open_own(self._path, os.O_WRONLY | os.O_APPEND)
        self._file = os.fdopen(descriptor, "a", encoding="utf-8", newline="")


class JSONSummaryWriter(MetricsWriter):
    """Writes the outcome of a run to `summary.json`; NaN and infinity become null.

    Args:
        filename: Path of the file relative to the run directory.
    """

    def __init__(self, filename: str = SUMMARY) -> None:
        check_below("filename", filename)
        self.filename = filename
        self._run_dir: Path | None = None
        self._facts: Mapping[str, Any] = {}

    def start(self, run: RunInfo) -> None:
        """Store the run directory and the facts."""
        self._run_dir, self._facts = run.run_dir, run.facts

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the file."""
        if self._run_dir is not None:
            content = plain_json({**self._facts, **summary})
            text = json.dumps(content, indent=2, allow_nan=False) + "\n"
            with atomic_write(self._run_dir / self.filename) as file:
                file.write(text.encode())


def plain_json(value: object) -> object:
    """Convert a value to JSON types; other values become text."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return plain_json(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain_json(item) for item in value]
    return str(value)
