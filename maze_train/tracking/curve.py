"""The learning curve of a run as a picture."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from maze_train.checks import check_below
from maze_train.files import atomic_write
from maze_train.tracking.formatting import compact, readable
from maze_train.tracking.league import write_leagues
from maze_train.tracking.tracker import (
    ENV_STEPS,
    EPOCH,
    EVAL_RETURN,
    EVAL_RETURN_STD,
    TRAIN_RETURN,
    MetricsRow,
    MetricsWriter,
    RunInfo,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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

    def __init__(self, filename: str = "plots/learning_curve.png") -> None:
        check_below("filename", filename)
        self.filename = filename
        self._run = RunInfo()
        self._rows: list[MetricsRow] = []

    def start(self, run: RunInfo) -> None:
        """Begin with the rows of the run that is continued, if there is one."""
        self._run = run
        self._rows = list(run.past_rows)

    def write(self, row: Mapping[str, float]) -> None:
        """Keep what is drawn of a row."""
        wanted = (EPOCH, ENV_STEPS, TRAIN_RETURN, EVAL_RETURN, EVAL_RETURN_STD, *LOSSES)
        self._rows.append({key: row[key] for key in row if key in wanted or key.startswith(LEAGUE)})
        if EVAL_RETURN in row:
            self._write_leagues()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Draw the picture."""
        if self._run.run_dir is not None:
            figure = draw_learning_curve(self._rows, self._run)
            with atomic_write(self._run.run_dir / self.filename) as file:
                figure.savefig(file, format="png", dpi=150)
        self._write_leagues()

    def _write_leagues(self) -> None:
        played = any(key.startswith(LEAGUE) for row in self._rows for key in row)
        if self._run.run_dir is not None and played:
            write_leagues(self._rows, self._run.run_dir, self._run.title)


def draw_learning_curve(rows: Sequence[Mapping[str, float]], run: RunInfo) -> Figure:
    """A figure of the returns of a run, without the global state of pyplot.

    Where there are none, losses are drawn if one of them selects the best policy.

    Args:
        rows: Rows of metrics in the order of epochs.
        run: Description of the run.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.5), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(run.title, loc="left", fontsize=12, color=TEXT_COLOR, fontweight="bold")
    train = _points(rows, TRAIN_RETURN)
    evaluation = _points(rows, EVAL_RETURN)
    is_by_loss = run.metric.endswith("loss")
    losses = {name: _points(rows, name) for name in LOSSES} if is_by_loss else {}
    if train or evaluation:
        if train:
            _line(axes, train, color=_TRAIN_COLOR, label="training episodes")
        if evaluation:
            _draw_evaluation(axes, rows, evaluation, run.mode == "max")
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
    rows: Sequence[Mapping[str, float]],
    points: list[tuple[float, float]],
    larger_is_better: bool,
) -> None:
    deviations = dict(_points(rows, EVAL_RETURN_STD))
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
