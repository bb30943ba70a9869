"""The picture of a search: values by trial, importance of the settings, and values by setting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.comparison.picture import leave_out_extremes
from maze_train.tracking.curve import decorate
from maze_train.tuning.space import short_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from optuna.study import Study

    from maze_train.tuning.space import Space

Row = dict[str, Any]

BLUE, GREY, RED = "#1f6feb", "#9aa5b1", "#d1242f"
COLUMNS = 3
"""Settings beside each other, at most."""

SHOWN = {True: (25.0, 100.0), False: (0.0, 75.0)}
"""By whether larger is better: percentiles of the values of ended trials, between which the picture
shows all."""

MIN_TRIALS = 4
"""Trials that come to their end for which importances are told."""


def draw_search(rows: Sequence[Row], study: Study, space: Space, metric: str) -> Figure:
    """A figure of the trials of a study, without the global state of pyplot.

    Args:
        rows: The trials, see `SearchResult.rows`.
        study: The study, for the importance of its settings.
        space: The settings.
        metric: Name of the value.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [row for row in rows if row["state"] in ("complete", "pruned")]
    shown = [row for row in shown if np.isfinite(row["value"])]
    weights = _importances(study)
    names = short_names(space.ranges)
    n_columns = min(COLUMNS, len(names))
    n_rows = -(-len(names) // n_columns)
    figure = Figure(figsize=(11.0, 3.2 * (1 + n_rows)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    parts: Any = figure.subfigures(2, 1, height_ratios=[1, n_rows])
    top, below = parts
    ratios = {"width_ratios": [2, 1] if weights else [1]}
    first, *second = top.subplots(1, 1 + bool(weights), squeeze=False, gridspec_kw=ratios)[0]
    _draw_history(first, shown, study.direction.name == "MAXIMIZE", metric)
    for axes in second:
        _draw_importances(axes, {names[key]: weight for key, weight in weights.items()})
    for i, (key, name) in enumerate(names.items()):
        axes = below.add_subplot(n_rows, n_columns, i + 1, sharey=first)
        _draw_setting(axes, shown, key, space)
        axes.set_xlabel(name)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _importances(study: Study) -> dict[str, float]:
    """Importance of each setting (PED-ANOVA of Optuna), from the largest; they sum to 1."""
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    done = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    varied = {key for trial in done for key in trial.params}
    if len(done) < MIN_TRIALS or len(varied) < 2 or len({trial.value for trial in done}) < 2:
        return {}
    found: dict[str, float] = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    return found


def _draw_history(axes: Axes, rows: Sequence[Row], larger_is_better: bool, metric: str) -> None:
    from matplotlib.ticker import MaxNLocator

    numbers = {state: [r["trial"] for r in rows if r["state"] == state] for state in _STYLES}
    for state, style in _STYLES.items():
        values = [row["value"] for row in rows if row["state"] == state]
        if values:
            axes.plot(numbers[state], values, linestyle="", label=state, **style)
    done = [row for row in rows if row["state"] == "complete"]
    best = np.maximum if larger_is_better else np.minimum
    reached = np.array([row["value"] for row in done], float)
    levels = best.accumulate(reached)
    axes.step(numbers["complete"], levels, where="post", color=RED, label="best so far", zorder=1)
    decorate(axes, "trial", metric)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlim(left=-0.5)
    shown = np.array([row["value"] for row in rows], float)
    leave_out_extremes(axes, shown, reached, SHOWN[larger_is_better])


_STYLES: dict[str, dict[str, Any]] = {
    "complete": {"marker": "o", "color": BLUE, "markersize": 5.0},
    "pruned": {"marker": "x", "color": GREY, "markersize": 5.0},
}


def _draw_importances(axes: Axes, weights: dict[str, float]) -> None:
    axes.barh(list(weights), list(weights.values()), color=BLUE, height=0.6)
    decorate(axes, "importance", "")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.invert_yaxis()  # the largest one above


def _draw_setting(axes: Axes, rows: Sequence[Row], key: str, space: Space) -> None:
    """Draw the values by the settings of the trials."""
    found = space.ranges[key]
    order = {text: i for i, text in enumerate(space.texts(key))}
    for state, style in _STYLES.items():
        some = [row for row in rows if row["state"] == state]
        places = [order[row[key]] if order else space.number(key, row[key]) for row in some]
        axes.plot(places, [row["value"] for row in some], linestyle="", **style)
    decorate(axes, key, "")
    if order:
        axes.set_xticks(list(order.values()), list(order))
        axes.set_xlim(-0.5, len(order) - 0.5)
        return
    assert found.low is not None
    assert found.high is not None
    margin = 0.03 * (found.high - found.low)
    if found.log:
        axes.set_xlim(found.low / 1.1, found.high * 1.1)
        axes.set_xscale("log")
    else:
        axes.set_xlim(found.low - margin, found.high + margin)
        axes.xaxis.set_major_formatter("{x:g}")
