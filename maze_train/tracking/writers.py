"""Writers of metrics: CSV, TensorBoard, JSON, the learning curve, results of self-play."""

from __future__ import annotations

import json
import math
import os
import re
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
from maze_train.core.run_directory import EPOCH
from maze_train.core.targets import build_targets
from maze_train.tracking.config import TrackingConfig
from maze_train.tracking.console import ConsoleWriter
from maze_train.tracking.tracker import (
    ENV_STEPS,
    EVAL_RETURN,
    EVAL_RETURN_STD,
    TRAIN_RETURN,
    MetricsWriter,
    RunInfo,
    compact,
    csv_text,
    flattened,
    ordered_columns,
    readable,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch.utils.tensorboard import SummaryWriter


WIN_RATE = re.compile(r"league/([^/]+)@(\d+)/win_rate")


def write_leagues(rows: Sequence[Mapping[str, float]], run_dir: Path, title: str) -> None:
    """Write `plots/league_<policy>.csv` and `.png` of each policy that met snapshots.

    A row of the table is an epoch, with the Elo rating of the policy, and a column a snapshot: the
    share of points of the policy against it in this epoch, empty where they did not meet.

    Args:
        rows: Rows of metrics in the order of epochs.
        run_dir: Directory of the run.
        title: Title of the run.
    """
    found = {match for row in rows for name in row if (match := WIN_RATE.match(name))}
    for policy in sorted({match[1] for match in found}):
        numbers = sorted({int(match[2]) for match in found if match[1] == policy})
        names = {"elo": f"league/{policy}/elo"}
        names |= {str(number): f"league/{policy}@{number}/win_rate" for number in numbers}
        table = [
            {EPOCH: int(row[EPOCH]), **{key: row.get(name) for key, name in names.items()}}
            for row in rows
        ]
        path = run_dir / PLOTS / f"league_{policy}.csv"
        with atomic_write(path) as file:
            file.write(csv_text(table).encode())
        figure = draw_league(table, numbers, f"{title}: {policy} against its snapshots")
        save_picture(figure, path.with_suffix(".png"))


def draw_league(table: Sequence[Mapping[str, Any]], numbers: Sequence[int], title: str) -> Figure:
    """A figure of the points against snapshots and of the rating, epoch by epoch.

    Args:
        table: Epoch, rating, and points by the number of the snapshot; None: no value.
        numbers: Numbers of the snapshots.
        title: Title of the figure.
    """
    import numpy as np

    figure = new_figure(8.0, 6.0)
    above, below = figure.subplots(2, height_ratios=(1, 2))
    figure.suptitle(title)
    epochs, elo, *points = np.array([list(row.values()) for row in table], np.float64).T
    above.plot(epochs, elo)
    above.set_ylabel("Elo rating")
    extent = (epochs[0] - 0.5, epochs[-1] + 0.5, numbers[-1] + 0.5, numbers[0] - 0.5)
    image = below.imshow(points, "RdYlGn", vmin=0.0, vmax=1.0, aspect="auto", extent=extent)
    figure.colorbar(image, ax=below, label="share of points")
    below.set_xlabel("epoch")
    below.set_ylabel("snapshot")
    return figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, without the global state of pyplot; sizes in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def save_picture(figure: Figure, path: Path, dpi: int = 150) -> None:
    """Write a figure as PNG.

    Raises:
        OSError: If the file cannot be written.
    """
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=dpi)


LEAGUE = "league/"
"""Beginning of the metrics of self-play."""


LOSSES = ("train/policy_loss", "validation/policy_loss")

_TRAIN_COLOR = "#9aa5b1"
_EVAL_COLOR = "#1f6feb"
_BEST_COLOR = "#d1242f"
TEXT_COLOR = "#3d444d"


class LearningCurveWriter(MetricsWriter):
    """`plots/learning_curve.png`: returns in training and evaluation over environment steps.

    Drawn once, at the end of training; results of self-play (`write_leagues`) after each evaluation
    as well.

    Args:
        filename: Name of the file below the run directory.
    """

    def __init__(self, filename: str = f"{PLOTS}/{CURVE}") -> None:
        check_below("filename", filename)
        self.filename = filename
        self._run = RunInfo()
        self._rows: list[Mapping[str, float]] = []  # shared with the tracker
        self._has_league = False

    def start(self, run: RunInfo) -> None:
        """Begin with the rows of the run that is continued, if there is one."""
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
        """Draw the picture, unless the run failed before its first epoch ended."""
        if self._run.run_dir is not None and self._rows:
            figure = draw_learning_curve(self._rows, self._run)
            save_picture(figure, self._run.run_dir / self.filename)
        self._write_leagues()

    def _write_leagues(self) -> None:
        if self._run.run_dir is not None and self._has_league:
            write_leagues(self._rows, self._run.run_dir, self._run.title)


def draw_learning_curve(rows: Sequence[Mapping[str, float]], run: RunInfo) -> Figure:
    """A figure of the returns of a run, without the global state of pyplot.

    Without returns, losses are drawn if one of them selects the best policy; where results against
    an opponent do, these are drawn instead.

    Args:
        rows: Rows of metrics in the order of epochs.
        run: Description of the run.
    """
    figure = new_figure(8.0, 4.5)
    axes = figure.add_subplot()
    axes.set_title(run.title, loc="left", fontsize=12, color=TEXT_COLOR, fontweight="bold")
    train = _points(rows, TRAIN_RETURN)
    evaluation = _points(rows, EVAL_RETURN)
    is_by_loss = run.metric.endswith("loss")
    losses = {name: _points(rows, name) for name in LOSSES} if is_by_loss else {}
    if foe := run.opponent:
        name = run.metric.rpartition("/")[2].replace("_", " ")
        if points := _points(rows, run.metric):
            _draw_evaluation(axes, {}, points, run.mode == "max")
        decorate(axes, run.step_label, f"{name} against {foe}")
    elif train or evaluation:
        if train:
            _line(axes, train, color=_TRAIN_COLOR, label="training episodes")
        if evaluation:
            deviations = dict(_points(rows, EVAL_RETURN_STD))
            _draw_evaluation(axes, deviations, evaluation, run.mode == "max")
        decorate(axes, run.step_label, "episode return (mean)")
    elif any(losses.values()):
        for (name, points), color in zip(losses.items(), (_TRAIN_COLOR, _EVAL_COLOR), strict=True):
            if points:
                _line(axes, points, color=color, label=name)
        decorate(axes, run.step_label, "loss")
    else:
        _say(axes, "Nothing to draw: this run recorded no episode return.")
        return figure
    # Outside of the axes it hides no data, and needs no search for the emptiest corner.
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _points(rows: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    found = ((row[ENV_STEPS], row.get(name, math.nan)) for row in rows)
    return [(steps, value) for steps, value in found if math.isfinite(value)]


def _line(axes: Axes, points: list[tuple[float, float]], **style: Any) -> None:
    # A line through one point, or through a handful, shows only with marks on its points.
    marker = "o" if len(points) <= 40 else ""
    xs, ys = zip(*points, strict=True)
    axes.plot(xs, ys, linewidth=1.8, marker=marker, markersize=3.5, **style)


def _draw_evaluation(
    axes: Axes,
    deviations: Mapping[float, float],
    points: list[tuple[float, float]],
    larger_is_better: bool,
) -> None:
    band = [(x, y - deviations[x], y + deviations[x]) for x, y in points if x in deviations]
    _line(axes, points, color=_EVAL_COLOR, label="evaluation")
    if len(band) > 1:
        xs, low, high = zip(*band, strict=True)
        label = "± 1 std over its episodes"
        axes.fill_between(xs, low, high, color=_EVAL_COLOR, alpha=0.15, linewidth=0, label=label)
    x, y = (max if larger_is_better else min)(points, key=lambda point: point[1])
    label = f"best: {readable(y)} at {compact(x)}"
    axes.plot([x], [y], "*", color=_BEST_COLOR, markersize=13, zorder=5, label=label)


def decorate(axes: Axes, x_label: str, y_label: str) -> None:
    """Label the axes of a curve, and draw its grid: counts on the x axis, from 0."""
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel(x_label, color=TEXT_COLOR)
    axes.set_ylabel(y_label, color=TEXT_COLOR)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlim(left=0)
    axes.grid(visible=True, color="#d8dee4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=TEXT_COLOR)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#b0b8c1")


def _say(axes: Axes, text: str) -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, fontsize=11)


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

    def __init__(self, filename: str = METRICS, columns: Sequence[str] = ()) -> None:
        check_below("filename", filename)
        self.filename = filename
        self._path: Path | None = None
        self._first_columns = columns
        self._columns: list[str] = []
        self._rows: list[Mapping[str, float]] = []  # shared with the tracker
        self._file: IO[str] | None = None

    def start(self, run: RunInfo) -> None:
        """Begin the file with the rows of the run that is continued, if there is one."""
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
            self._file.write(csv_text(self._rows[-1:], self._columns, header=False))
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
            with suppress(OSError):  # What it could not write is written again.
                file.close()

    def _take(self, row: Mapping[str, float]) -> bool:
        """Keep a row; returns whether it has new columns."""
        self._rows.append(row)
        has_new = not row.keys() <= set(self._columns)
        if has_new:
            self._columns = ordered_columns([*self._columns, *row])
        return has_new

    def _replace(self) -> None:
        """Replace the file by one with all rows, and append to that."""
        assert self._path is not None
        self.close()
        with atomic_write(self._path) as new:
            new.write(csv_text(self._rows, self._columns).encode())
        descriptor = open_own(self._path, os.O_WRONLY | os.O_APPEND)
        self._file = os.fdopen(descriptor, "a", encoding="utf-8", newline="")


OF_NUMBERS = ("env", "model", "algorithm", "runner", "seed", "total_steps")
"""Sections of settings that TensorBoard compares runs by."""


class TensorBoardWriter(MetricsWriter):
    """TensorBoard event files in the run directory, with environment steps on the x axis.

    They have the configuration as a text, and its values as hyperparameters.
    """

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None

    def start(self, run: RunInfo) -> None:
        """Open an event file; points after the checkpoint of a continued run are marked void."""
        if run.run_dir is None:
            return
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if run.resumed_at_step is None else run.resumed_at_step + 1
        make_folders(run.run_dir / run.name)  # TensorBoard follows links
        self._writer = SummaryWriter(str(run.run_dir / run.name), purge_step=purge_step)
        settings = dump_yaml(_plain(run.config))
        self._writer.add_text("config", indent(settings, "    "))  # Markdown shows it as code
        self._add_hparams(run)

    def _add_hparams(self, run: RunInfo) -> None:
        """Add the settings that numbers depend on to the table of hyperparameters."""
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
        self._writer.flush()  # what its thread writes later fails there, out of reach

    def sync(self) -> None:
        """Wait until all points are in the event file."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write the remaining rows and end the thread of the event file."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()


class JSONSummaryWriter(MetricsWriter):
    """`summary.json`: the outcome of a run; NaN and infinities become null, as JSON has neither.

    Args:
        filename: Name of the file below the run directory.
    """

    def __init__(self, filename: str = SUMMARY) -> None:
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
        ConfigError: If one of `writers` cannot be built or is not a `MetricsWriter`.
        MissingExtraError: If one needs a package that is not installed.
    """
    writers = [writer() for setting, writer in WRITERS.items() if getattr(config, setting)]
    writers += build_targets(config.writers, "tracking.writers", MetricsWriter)
    writers.append(ConsoleWriter(config.progress))
    return writers
