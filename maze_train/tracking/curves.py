"""Plots of learning curves and of self-play."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.core.checks import check_below
from maze_train.core.names import CURVE, PLOTS
from maze_train.core.report import (
    BLUE,
    GREY,
    RED,
    add_legend,
    band,
    csv_text,
    curve,
    decorate,
    new_figure,
    save_picture,
    write_report,
)
from maze_train.core.run_directory import EPOCH
from maze_train.core.text import compact, readable
from maze_train.tracking.tracker import (
    ENV_STEPS,
    EVAL_RETURN,
    EVAL_RETURN_STD,
    TRAIN_RETURN,
    MetricsWriter,
    RunInfo,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAGUE = "league/"
"""Prefix of the metrics of self-play."""

WIN_RATE = re.compile(rf"{LEAGUE}([^/]+)@(\d+)/win_rate")
LOSSES = {"train/policy_loss": GREY, "validation/policy_loss": BLUE}


class LearningCurveWriter(MetricsWriter):
    """Writes `plots/learning_curve.png`: training and evaluation returns over environment steps.

    The plot is drawn at the end of training. For self-play, `write_leagues` is also called after
    each evaluation.

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
        """Load the rows of the resumed run, if any."""
        self._run = run
        self._rows = list(run.past_rows)
        self._has_league = any(key.startswith(LEAGUE) for row in self._rows for key in row)

    def write(self, row: Mapping[str, float]) -> None:
        """Store a row of metrics."""
        self._rows.append(row)
        self._has_league = self._has_league or any(key.startswith(LEAGUE) for key in row)
        if EVAL_RETURN in row:
            self._write_leagues()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Draw the plot; does nothing if no epoch was finished."""
        if self._run.run_dir is not None and self._rows:
            figure = draw_learning_curve(self._rows, self._run)
            save_picture(figure, self._run.run_dir / self.filename)
        self._write_leagues()

    def _write_leagues(self) -> None:
        if self._run.run_dir is not None and self._has_league:
            write_leagues(self._rows, self._run.run_dir / PLOTS, self._run.title)


def draw_learning_curve(rows: Sequence[Mapping[str, float]], run: RunInfo) -> Figure:
    """Draw the returns of a run without the global state of pyplot.

    If results against an opponent select the best policy, these results are drawn. If the run has
    no returns and a loss selects the best policy, losses are drawn.

    Args:
        rows: Rows of metrics in the order of epochs.
        run: Description of the run.
    """
    figure = new_figure(8.0, 4.5)
    axes = figure.add_subplot()
    label = "episode return (mean)"
    train, evaluation = _points(rows, TRAIN_RETURN), _points(rows, EVAL_RETURN)
    losses = {name: _points(rows, name) for name in LOSSES if run.metric.endswith("loss")}
    if foe := run.opponent:
        label = f"{run.metric.rpartition('/')[2].replace('_', ' ')} against {foe}"
        _draw_evaluation(axes, _points(rows, run.metric), {}, run)
    elif train or evaluation:
        if train:
            curve(axes, list(train), list(train.values()), "training episodes", color=GREY)
        _draw_evaluation(axes, evaluation, _points(rows, EVAL_RETURN_STD), run)
    elif any(losses.values()):
        label = "loss"
        for name, points in losses.items():
            if points:
                curve(axes, list(points), list(points.values()), name, color=LOSSES[name])
    else:
        text = "Nothing to draw: this run recorded no episode return."
        axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
    decorate(axes, run.step_label, label, title=run.title)
    add_legend(figure)
    return figure


def _points(rows: Sequence[Mapping[str, float]], name: str) -> dict[float, float]:
    """Return the finite values of a metric by environment steps."""
    found = {row[ENV_STEPS]: row.get(name, math.nan) for row in rows}
    return {steps: value for steps, value in found.items() if math.isfinite(value)}


def _draw_evaluation(
    axes: Axes, points: Mapping[float, float], stds: Mapping[float, float], run: RunInfo
) -> None:
    """Draw the results of evaluations, a band of one standard deviation, and the best result."""
    if not points:
        return
    curve(axes, list(points), list(points.values()), "evaluation", color=BLUE)
    if len(xs := [x for x in points if x in stds]) > 1:
        low, high = ([points[x] + sign * stds[x] for x in xs] for sign in (-1, 1))
        band(axes, xs, low, high, "± 1 std over its episodes")
    x, y = (max if run.mode == "max" else min)(points.items(), key=lambda point: point[1])
    label = f"best: {readable(y)} at {compact(x)}"
    curve(axes, [x], [y], label, color=RED, marker="*", linestyle="", markersize=13, zorder=5)


def write_leagues(rows: Sequence[Mapping[str, float]], plots: Path, title: str) -> None:
    """Write `league_<policy>.csv` and `.png` for each policy that played against snapshots.

    Each row of the table is an epoch. Columns are the Elo rating of the policy and, for each
    snapshot, the mean points of the policy against this snapshot in the epoch (empty without
    episodes).

    Args:
        rows: Rows of metrics in the order of epochs.
        plots: Directory of the files.
        title: Title of the run.
    """
    found = {match for row in rows for name in row if (match := WIN_RATE.match(name))}
    for policy in sorted({match[1] for match in found}):
        numbers = sorted({int(match[2]) for match in found if match[1] == policy})
        names = {"elo": f"{LEAGUE}{policy}/elo"}
        names |= {str(number): f"{LEAGUE}{policy}@{number}/win_rate" for number in numbers}
        table = [
            {EPOCH: int(row[EPOCH]), **{key: row.get(name) for key, name in names.items()}}
            for row in rows
        ]
        figure = draw_league(table, numbers, f"{title}: {policy} against its snapshots")
        name = f"league_{policy}"
        write_report(plots, {f"{name}.csv": csv_text(table)}, {f"{name}.png": figure})


def draw_league(table: Sequence[Mapping[str, Any]], numbers: Sequence[int], title: str) -> Figure:
    """Draw the points against snapshots and the rating over epochs.

    Args:
        table: Epoch, rating, and points by number of the snapshot; None: no value.
        numbers: Indices of the snapshots.
        title: Title of the figure.
    """
    figure = new_figure(8.0, 6.0)
    above, below = figure.subplots(2, height_ratios=(1, 2), sharex=True)
    epochs, elo, *points = np.array([list(row.values()) for row in table], np.float64).T
    extent = (epochs[0] - 0.5, epochs[-1] + 0.5, numbers[-1] + 0.5, numbers[0] - 0.5)
    curve(above, epochs, elo, color=BLUE)
    image = below.imshow(points, "RdBu", vmin=0.0, vmax=1.0, aspect="auto", extent=extent)
    figure.colorbar(image, ax=below, label="fraction of points")
    decorate(above, "", "Elo rating", title=title, counts=False)
    decorate(below, "epoch", "snapshot", counts=False)
    below.set_xlim(extent[:2])
    below.locator_params(integer=True)
    below.grid(visible=False)
    return figure
