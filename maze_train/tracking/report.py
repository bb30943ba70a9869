"""Reports (text files and plots), learning curves, and shared plotting helpers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.core.files import atomic_write, writable
from maze_train.core.names import PLOTS
from maze_train.core.run_directory import EPOCH
from maze_train.core.text import compact, csv_text, readable
from maze_train.core.types import Array
from maze_train.tracking.tracker import (
    ENV_STEPS,
    EVAL_RETURN,
    EVAL_RETURN_STD,
    TRAIN_RETURN,
    RunInfo,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def write_report(
    key: str, directory: Path, texts: Mapping[str, str], pictures: Mapping[str, Figure]
) -> None:
    """Write the texts and plots of a report to the directory given by a setting.

    Raises:
        ConfigError: If a file cannot be written.
    """
    with writable(key, directory):
        for name, text in texts.items():
            with atomic_write(directory / name) as file:
                file.write(text.encode())
        for name, figure in pictures.items():
            save_picture(figure, directory / name, dpi=110)


LOSSES = ("train/policy_loss", "validation/policy_loss")

_TRAIN_COLOR = "#9aa5b1"
_EVAL_COLOR = "#1f6feb"
_BEST_COLOR = "#d1242f"
TEXT_COLOR = "#3d444d"


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure without the global state of pyplot; sizes in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def save_picture(figure: Figure, path: Path, dpi: int = 150) -> None:
    """Write a figure as PNG.

    Raises:
        OSError: If the file cannot be written.
    """
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=dpi)


def leave_out_extremes(
    axes: Axes, values: Array, typical: Array, percentiles: tuple[float, float]
) -> None:
    """Exclude rare extreme values that would take more than half of the y axis, with a label.

    Args:
        axes: The axes.
        values: The plotted values.
        typical: Values that should remain visible, except for rare extremes.
        percentiles: Percentiles of `typical`; values between them are never excluded.
    """
    values, typical = values[np.isfinite(values)], typical[np.isfinite(typical)]
    if not len(typical):
        return
    lowest, highest = float(values.min()), float(values.max())
    low, high = np.percentile(typical, percentiles)
    low, high = low - 0.2 * (high - low), high + 0.2 * (high - low)
    cut_low, cut_high = low - lowest > high - low > 0, highest - high > high - low > 0
    if cut_low or cut_high:
        shown = (low if cut_low else lowest, high if cut_high else highest)
        margin = 0.05 * (shown[1] - shown[0])
        axes.set_ylim(shown[0] - margin, shown[1] + margin)
    style: dict[str, Any] = {"transform": axes.transAxes, "ha": "right", "fontsize": 8}
    if cut_low:
        axes.text(0.98, 0.02, f"beyond: to {readable(lowest)}", va="bottom", **style)
    if cut_high:
        axes.text(0.98, 0.98, f"beyond: to {readable(highest)}", va="top", **style)


WIN_RATE = re.compile(r"league/([^/]+)@(\d+)/win_rate")


def write_leagues(rows: Sequence[Mapping[str, float]], run_dir: Path, title: str) -> None:
    """Write `plots/league_<policy>.csv` and `.png` for each policy that played snapshots.

    Each row of the table is an epoch with the Elo rating of the policy. Each further column is a
    snapshot: the policy's fraction of points against it in this epoch, empty if they did not play.

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
    """Draw the points against snapshots and the rating over epochs.

    Args:
        table: Epoch, rating, and points by number of the snapshot; None for no value.
        numbers: Indices of the snapshots.
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


def draw_learning_curve(rows: Sequence[Mapping[str, float]], run: RunInfo) -> Figure:
    """Draw the returns of a run without the global state of pyplot.

    If results against an opponent select the best policy, these are drawn instead. If there are no
    returns and a loss selects the best policy, losses are drawn.

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
    # Outside of the axes, the legend hides no data and needs no search for a free corner.
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _points(rows: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    found = ((row[ENV_STEPS], row.get(name, math.nan)) for row in rows)
    return [(steps, value) for steps, value in found if math.isfinite(value)]


def _line(axes: Axes, points: list[tuple[float, float]], **style: Any) -> None:
    # A line through one or a few points is only visible with markers.
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
    """Label the axes of a curve with counts from 0 on the x axis, and draw the grid."""
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
