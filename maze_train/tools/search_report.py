"""Results of a search (table, plot, best settings), and the search space."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from maze_train.config.compose import load_config
from maze_train.config.options import PROGRAM
from maze_train.config.search_config import GROUP, LINEAR, SearchRange
from maze_train.config.train_config import TrainConfig
from maze_train.core.conversion import config_to_dict, join
from maze_train.core.errors import ConfigError, printable
from maze_train.core.files import writable
from maze_train.core.plain_yaml import dump_yaml
from maze_train.core.report import (
    BLUE,
    GREY,
    RED,
    add_legend,
    csv_text,
    curve,
    decorate,
    leave_out_extremes,
    markdown_table,
    new_figure,
    text_table,
    write_report,
)
from maze_train.core.targets import import_extra
from maze_train.core.text import duration, readable
from maze_train.tools.compare_report import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from optuna.study import Study
    from optuna.trial import FrozenTrial


def optuna() -> ModuleType:
    """Import Optuna, with logging limited to errors.

    Raises:
        MissingExtraError: If Optuna is not installed.
    """
    package = import_extra("optuna", "optuna", "a search")
    package.logging.set_verbosity(package.logging.ERROR)
    return package


def text_of(value: object) -> str:
    """Format a value as on the command line; other objects are shown by their class name."""
    plain = str(value) if isinstance(value, str) else value
    try:
        text: str = dump_yaml([plain], default_flow_style=True, width=2**31 - 1)
    except yaml.representer.RepresenterError:
        return f"<{type(value).__name__}>"
    return text.strip()[1:-1]


def shown(text: str) -> str:
    """Format a value; numbers and starts of schedules have four significant digits."""
    number = text.removeprefix(LINEAR)
    return text[: len(text) - len(number)] + short(number)


def short_names(keys: Collection[str]) -> dict[str, str]:
    """Return short names of settings: the last part of each dotted name, if unique."""
    last = [key.rpartition(".")[2] for key in keys]
    return {
        key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)
    }


class Space:
    """The search space, checked against the settings of the runs.

    Args:
        ranges: Ranges by dotted name of the setting.
        settings: Values of the other settings, as for `load_config`.

    Raises:
        ConfigError: If a setting does not exist, or a bound or a choice is not a valid value.
    """

    def __init__(self, ranges: Mapping[str, SearchRange], settings: Mapping[str, Any]) -> None:
        self.ranges = dict(ranges)
        self._settings = settings
        self._choices = {
            key: {text_of(choice): choice for choice in found.choices or ()}
            for key, found in self.ranges.items()
        }
        self._as_set: dict[
            str, dict[str, str]
        ] = {}  # Text of each choice by text of the converted setting.
        self.distributions = {key: self._distribution(key) for key in self.ranges}
        """Optuna distributions by setting; choices are represented as text."""

    def place(self, key: str, text: str) -> float:
        """Return the x position of a value: the value itself or the index of the choice."""
        choices = list(self._choices[key])
        return choices.index(text) if choices else float(text.removeprefix(LINEAR))

    def settings_of(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a trial by dotted name from Optuna's parameters."""
        return {key: self._setting(key, params[key]) for key in self.ranges}

    def given(self, config: TrainConfig) -> dict[str, Any]:
        """Return Optuna's parameters for the configured settings.

        Raises:
            ConfigError: If a configured value is outside the range of its setting.
        """
        values, params = config_to_dict(config), {}
        param: float | str | None
        for key in self.ranges:
            value = _select(values, key)
            if self._choices[key]:
                param, problem = self._as_set[key].get(text_of(value)), "outside the range"
            else:
                param, problem = self._number(key, value)
            if param is None:
                raise ConfigError(key, problem, value)
            params[key] = param
        return params

    def _number(self, key: str, value: Any) -> tuple[float | None, str]:
        """Convert a value of a setting to a number in the range of the setting.

        Returns:
            The number and an empty text, or None and the reason.
        """
        found = self.ranges[key]
        assert found.low is not None
        assert found.high is not None
        number = value
        if found.linear:
            problem = "the range has schedules that decrease to 0 (linear_<start>), not this value"
            if not (isinstance(value, str) and value.startswith(LINEAR)):
                return None, f"{problem}; remove `linear` from the range to search constants"
            number = float(value.removeprefix(LINEAR))
        if type(number) not in (int, float) or not found.low <= number <= found.high:
            return None, "outside the range"
        steps = (number - found.low) / (found.step or 1.0)
        if found.step and abs(steps - round(steps)) > 1e-8:
            return None, f"between two steps of the range (step: {found.step:g})"
        return number, ""

    def _setting(self, key: str, value: Any) -> object:
        if self._choices[key]:
            return self._choices[key][value]
        return f"{LINEAR}{value!r}" if self.ranges[key].linear else value

    def _distribution(self, key: str) -> Any:
        found, kinds = self.ranges[key], optuna().distributions
        if self._choices[key]:
            self._as_set[key] = {text_of(self._accepted(key, t)): t for t in self._choices[key]}
            return kinds.CategoricalDistribution(list(self._choices[key]))
        low, high = (self._accepted(key, end) for end in (found.low, found.high))
        if all(isinstance(number, int) for number in (low, high, found.step or 1)):
            return kinds.IntDistribution(low, high, found.log, found.step or 1)
        return kinds.FloatDistribution(found.low, found.high, found.log, found.step)

    def _accepted(self, key: str, value: object) -> object:
        """Return a value as converted by the configuration.

        Raises:
            ConfigError: If the value is invalid.
        """
        setting = self._setting(key, value)
        try:
            return _select(config_to_dict(load_config({**self._settings, key: setting})), key)
        except ConfigError as error:
            problem = f"not a valid setting: {error}"
            raise ConfigError(join(GROUP, key), problem, setting) from error


def _select(node: object, key: str) -> object:
    """Return the value of a setting by dotted name; None if missing."""
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


Row = dict[str, Any]

STYLES: dict[str, dict[str, Any]] = {
    "complete": {"marker": "o", "color": BLUE, "markersize": 5.0},
    "pruned": {"marker": "x", "color": GREY, "markersize": 5.0},
}
"""Markers of the trials by state."""

COLUMNS = 3
"""Maximum number of settings per row of the plot."""

SHOWN = {True: (25.0, 100.0), False: (0.0, 75.0)}
"""Percentiles of the values of finished trials that are always shown; key: whether larger values
are better."""


def draw_search(result: SearchResult, space: Space) -> Figure:
    """Draw the values of trials over their number and over each setting.

    Optuna's plots would change the global style, omit pruned trials, and draw all settings in one
    row.
    """
    rows = [row for row in result.rows if row["state"] in STYLES and np.isfinite(row["value"])]
    names = {"trial": "trial", **short_names(space.ranges)}
    n_columns = min(COLUMNS, len(names))
    n_rows = -(-len(names) // n_columns)
    figure = new_figure(11.0, 3.2 * n_rows)
    first = None
    for i, (key, name) in enumerate(names.items()):
        axes = figure.add_subplot(n_rows, n_columns, i + 1, sharey=first)
        for state, style in STYLES.items():
            drawn = [row for row in rows if row["state"] == state]
            places = [row[key] if first is None else space.place(key, row[key]) for row in drawn]
            label = state if drawn else ""
            curve(axes, places, [row["value"] for row in drawn], label, linestyle="", **style)
        decorate(axes, name, result.metric if first is None else "", counts=False)
        if first is None:
            first = axes
        else:
            _scale(axes, space.distributions[key])
    assert first is not None
    done = [row for row in rows if row["state"] == "complete"]
    reached = np.array([row["value"] for row in done], float)
    best = (np.maximum if result.larger_is_better else np.minimum).accumulate(reached)
    step: dict[str, Any] = {"drawstyle": "steps-post", "marker": "", "zorder": 1}
    curve(first, [row["trial"] for row in done], best, "best so far", color=RED, **step)
    first.locator_params(axis="x", integer=True)
    first.set_xlim(left=-0.5)
    values = np.array([row["value"] for row in rows], float)
    leave_out_extremes(first, values, reached, SHOWN[result.larger_is_better])
    add_legend(figure)
    return figure


def _scale(axes: Axes, found: Any) -> None:
    """Scale the x axis to the whole range or all choices of an Optuna distribution."""
    choices = getattr(found, "choices", ())
    if choices:
        axes.set_xticks(range(len(choices)), choices)
        axes.set_xlim(-0.5, len(choices) - 0.5)
    elif found.log:
        axes.set(xscale="log", xlim=(found.low / 1.1, found.high * 1.1))
    else:
        margin = 0.03 * (found.high - found.low)
        axes.set_xlim(found.low - margin, found.high + margin)


CSV_FILE, MARKDOWN_FILE, PICTURE_FILE = "trials.csv", "trials.md", "search.png"
BEST_FILE = "best.yaml"
MAX_ROWS = 10
"""Maximum number of trials to print; the files contain all trials."""

STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "interrupted"}
ERROR, SECONDS = "error", "seconds"
"""User attributes of a trial: error message, and duration in seconds."""


@dataclass(frozen=True)
class SearchResult:
    """Result of a search: all trials and the best trial."""

    study: Path
    """Directory of the study."""

    metric: str
    """The optimised metric."""

    rows: list[dict[str, Any]] = field(repr=False)
    """One row per trial: values by column of trials.csv."""

    settings: tuple[str, ...]
    """The settings that were searched."""

    best: dict[str, Any]
    """The best settings by dotted name; empty if no trial finished."""

    best_trial: int | None
    """Number of the best trial."""

    best_value: float
    """Value of the best trial; NaN if missing."""

    given: tuple[str, ...] = ()
    """Settings common to all runs, as on the command line."""

    larger_is_better: bool = True

    @property
    def line(self) -> str:
        """The command that trains with the best settings."""
        kept = [word for word in self.given if word.partition("=")[0] not in self.best]
        found = [f"{key}={text_of(value)}" for key, value in self.best.items()]
        return shlex.join([PROGRAM, *kept, *found])

    @property
    def outcome(self) -> str:
        """Summary line: number of trials by state, and the best trial."""
        states = [row["state"] for row in self.rows]
        counts = [f"{states.count(s)} {s}" for s in STATES.values() if s in states]
        plural = "" if len(states) == 1 else "s"
        line = f"{len(states)} trial{plural} ({', '.join(counts)})"
        if self.best_trial is None:
            return f"{line}; no trial finished"
        return f"{line}; best: trial {self.best_trial}, {self.metric} {readable(self.best_value)}"

    def _ranked(self) -> list[dict[str, Any]]:
        """Return the trials ordered by state, then from the best to the worst."""
        order = list(STATES.values())
        sign = -1.0 if self.larger_is_better else 1.0

        def rank(row: dict[str, Any]) -> tuple[int, float]:
            value = row["value"]
            return order.index(row["state"]), math.inf if math.isnan(value) else sign * value

        return sorted(self.rows, key=rank)

    def _words(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
        """Format rows for a table."""
        names = {"done_percent": "done", "seconds": "time", **short_names(self.settings)}
        return [
            {names.get(name, name): _word(name, value) for name, value in row.items()}
            for row in rows
        ]

    def __str__(self) -> str:
        """Format the best trials and the best settings for a terminal."""
        words = [
            {key: text for key, text in row.items() if key not in ("run_dir", "error")}
            for row in self._words(self._ranked())
        ]
        lines = [*text_table(words, MAX_ROWS, self.study / CSV_FILE), "", self.outcome]
        return printable("\n".join([*lines, "", self.line] if self.best else lines))

    def markdown(self) -> str:
        """Format all trials as Markdown with the plot and the best settings."""
        lines = ["# Search", "", self.outcome, ""]
        if self.best:
            line = printable(self.line)
            lines += ["```bash", line, "```", "", f"![trials]({PICTURE_FILE})", ""]
        lines += markdown_table(self._words(self._ranked()))
        return "\n".join(lines) + "\n"

    def best_yaml(self) -> str:
        """Format the best settings as YAML for `train`, with their origin as a comment."""
        head = f"# Trial {self.best_trial} of {len(self.rows)}: {self.metric} {self.best_value!r}"
        return f"{head}\n# {self.line}\n{dump_yaml(self.best)}"


def result_of(
    study: Study, space: Space, directory: Path, metric: str, given: Sequence[str]
) -> SearchResult:
    """Return the current result of a study."""
    trials = [trial for trial in study.trials if trial.state.name in STATES]
    mode = study.direction.name
    done = [t for t in trials if t.state.name == "COMPLETE" and t.value is not None]
    best = study.best_trial if done else None
    return SearchResult(
        study=directory,
        metric=metric,
        rows=[_row(trial, space) for trial in trials],
        settings=tuple(space.ranges),
        best=space.settings_of(best.params) if best else {},
        best_trial=best.number if best else None,
        best_value=float(best.value or 0.0) if best else math.nan,
        given=tuple(given),
        larger_is_better=mode == "MAXIMIZE",
    )


def write_result(result: SearchResult, picture: Figure | None = None) -> None:
    """Write tables, best settings and the plot, if any.

    Raises:
        ConfigError: If the files cannot be written.
    """
    texts = {MARKDOWN_FILE: result.markdown()}
    texts |= {CSV_FILE: csv_text(result.rows)} if result.rows else {}
    texts |= {BEST_FILE: result.best_yaml()} if result.best else {}
    with writable("study", result.study):
        write_report(result.study, texts, {PICTURE_FILE: picture} if picture else {})


def _row(trial: FrozenTrial, space: Space) -> dict[str, Any]:
    values = trial.intermediate_values
    last = values[max(values)] if values else math.nan
    # Earlier versions did not store SECONDS.
    took = trial.duration.total_seconds() if trial.duration else math.nan
    known = trial.params.keys() >= space.ranges.keys()
    settings = space.settings_of(trial.params) if known else {}
    return {
        "trial": trial.number,
        "state": STATES[trial.state.name],
        "value": float(last if trial.value is None else trial.value),
        **{key: text_of(settings[key]) if key in settings else "" for key in space.ranges},
        "done_percent": 100 if trial.state.name == "COMPLETE" else max(values, default=0),
        "seconds": float(trial.user_attrs.get(SECONDS, took)),
        "run_dir": str(trial.number),
        "error": str(trial.user_attrs.get(ERROR, "")),
    }


def _word(name: str, value: Any) -> str:
    if name == "seconds":
        return "" if math.isnan(value) else duration(value)
    if name == "value":
        return "" if math.isnan(value) else readable(value)
    if name == "done_percent":
        return f"{value} %"
    return shown(value) if isinstance(value, str) else str(value)
