"""The picture of a comparison: a row of axes per environment, by steps and by time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.comparison.aggregates import bootstrap_interval, interquartile_mean
from maze_train.errors import printable
from maze_train.tracking.curve import TEXT_COLOR, decorate
from maze_train.tracking.formatting import readable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from maze_train.comparison.aggregates import Array
    from maze_train.comparison.table import Group


COLORS = (
    *("#1f6feb", "#d1242f", "#1a7f37", "#bf8700", "#8250df"),
    *("#0f8b8d", "#e85aad", "#6e5494", "#7d4e00", "#57606a"),
)
"""Colours of the curves; there are no more curves than these."""

N_POINTS = 200
"""Places at which a curve over several runs is computed, at most."""

N_RESAMPLES = 1_000
"""Bootstrap samples of a band: enough for the width of a line."""

EXTREMES = (5.0, 95.0)
"""Percentiles of the values of a row of axes beyond which they may be left out."""

UNITS = ((2 * 3600.0, 3600.0, "h"), (2 * 60.0, 60.0, "min"), (0.0, 1.0, "s"))
"""Units of time by the longest one that is shown, in seconds."""


def draw_comparison(
    groups: Sequence[Group], labels: Mapping[tuple[str, ...], str], metric: str, step_label: str
) -> Figure:
    """A figure of interquartile means with 95 % bands, without the global state of pyplot.

    Single runs are thin lines. A curve over several runs ends where the shortest of them does.

    Args:
        groups: What is drawn.
        labels: Text in the legend by name of a group; groups without one are left out.
        metric: Metric on the y axis.
        step_label: Unit of the steps.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    labels = {name: _as_text(label) for name, label in labels.items()}
    envs = list(dict.fromkeys(group.env for group in groups))
    legend_rows = -(-len(labels) // 2)
    height = 3.6 * len(envs) + 0.3 * legend_rows
    figure = Figure(figsize=(11.0, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(envs), 2, squeeze=False, sharey="row")
    colors = dict(zip(labels, COLORS, strict=False))
    for env, (by_steps, by_time) in zip(envs, axes, strict=True):
        drawn = [group for group in groups if group.env == env and group.name in labels]
        curves = [[run.curve(metric) for run in group.runs] for group in drawn]
        longest = max((seconds[-1] for runs in curves for _, seconds, _ in runs), default=0.0)
        unit, word = next((unit, word) for least, unit, word in UNITS if not longest < least)
        for group, runs in zip(drawn, curves, strict=True):
            color, label = colors[group.name], labels[group.name]
            _draw(by_steps, [(steps, values) for steps, _, values in runs], color, label)
            _draw(by_time, [(seconds / unit, values) for _, seconds, values in runs], color)
        by_steps.set_title(
            _as_text(env), loc="left", fontsize=12, color=TEXT_COLOR, fontweight="bold"
        )
        decorate(by_steps, step_label, _as_text(metric))
        decorate(by_time, f"wall time ({word})", "")
        by_time.xaxis.set_major_formatter("{x:g}")
        values = np.concatenate([*(values for runs in curves for _, _, values in runs), []])
        leave_out_extremes(by_steps, values, values, EXTREMES)
    handles = {line.get_label(): line for ax in axes[:, 0] for line in ax.lines}
    shown = [(handles[label], label) for label in labels.values() if label in handles]
    if shown:
        lines, texts = zip(*shown, strict=True)
        figure.legend(lines, texts, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def _as_text(name: str) -> str:
    """A name as it is: dollar signs begin no formula, which could end the comparison."""
    return printable(name).replace("$", r"\$")


def _draw(axes: Axes, runs: list[tuple[Array, Array]], color: str, label: str = "") -> None:
    """Draw the runs of a group, and over them their interquartile mean with its band."""
    runs = [(xs, values) for xs, values in runs if np.isfinite(xs).all()]
    if not runs:
        return
    style: dict[str, Any] = {"color": color, "linewidth": 2.0, "label": label or "_"}
    start, end = max(xs[0] for xs, _ in runs), min(xs[-1] for xs, _ in runs)
    if len(runs) == 1 or end < start:
        for xs, values in runs:
            axes.plot(xs, values, marker="o" if len(xs) <= 40 else "", markersize=3.0, **style)
        return
    for xs, values in runs:
        axes.plot(xs, values, color=color, linewidth=0.8, alpha=0.3)
    grid = np.unique(np.concatenate([xs for xs, _ in runs]))
    grid = grid[(grid >= start) & (grid <= end)]
    if len(grid) > N_POINTS:
        grid = np.linspace(start, end, N_POINTS)
    values = np.stack([np.interp(grid, xs, values) for xs, values in runs])
    low, high = bootstrap_interval([values], N_RESAMPLES)
    marker = "o" if len(grid) == 1 else ""
    axes.plot(grid, interquartile_mean(values, axis=0), marker=marker, **style)
    axes.fill_between(grid, low, high, color=color, alpha=0.18, linewidth=0)


def leave_out_extremes(
    axes: Axes, values: Array, typical: Array, percentiles: tuple[float, float]
) -> None:
    """End the y axis before rare values that would take more than half of it, and say so.

    Args:
        axes: The axes.
        values: What is drawn.
        typical: The values of which nearly all are to be seen.
        percentiles: Percentiles of these within which none is left out.
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
