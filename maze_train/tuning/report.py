"""The outcome of a search: a table of its trials, the best settings, and their files."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from maze_train.comparison.table import csv_table, markdown_table, text_table
from maze_train.config.job_processes import PROGRAM
from maze_train.config.writing import writable
from maze_train.errors import printable
from maze_train.files import atomic_write
from maze_train.tracking.formatting import duration, readable
from maze_train.tuning.picture import draw_search
from maze_train.tuning.space import short_names, shown, text_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from optuna.study import Study
    from optuna.trial import FrozenTrial

    from maze_train.tuning.space import Space

CSV_FILE, MARKDOWN_FILE, PICTURE_FILE = "trials.csv", "trials.md", "search.png"
BEST_FILE = "best.yaml"
MAX_ROWS = 10
"""Trials that are printed; the files have all of them."""

STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "interrupted"}
ERROR, SECONDS = "error", "seconds"
"""Attributes of a trial: the message of one that failed, and how long it took."""


@dataclass(frozen=True)
class SearchResult:
    """A search: its trials, and the best one."""

    study: Path
    """Directory of the study."""

    metric: str
    """The metric that decides."""

    rows: list[dict[str, Any]]
    """One row per trial: texts and numbers by the names of the columns of trials.csv."""

    settings: tuple[str, ...]
    """The settings that were searched."""

    best: dict[str, Any]
    """The best settings by dotted name; empty: no trial came to its end."""

    best_trial: int | None
    """Number of the best trial."""

    best_value: float
    """Its value; NaN: there is none."""

    given: tuple[str, ...] = ()
    """Settings of all runs, as on the command line."""

    larger_is_better: bool = True

    @property
    def line(self) -> str:
        """The command that trains with the best settings."""
        kept = [word for word in self.given if word.partition("=")[0] not in self.best]
        found = [f"{key}={text_of(value)}" for key, value in self.best.items()]
        return shlex.join([PROGRAM, *kept, *found])

    @property
    def outcome(self) -> str:
        """How many trials there were, and the best one, in a line."""
        states = [row["state"] for row in self.rows]
        counts = [f"{states.count(s)} {s}" for s in STATES.values() if s in states]
        plural = "" if len(states) == 1 else "s"
        line = f"{len(states)} trial{plural} ({', '.join(counts)})"
        if self.best_trial is None:
            return f"{line}, none of which came to its end"
        return f"{line}; best: trial {self.best_trial}, {self.metric} {readable(self.best_value)}"

    def _ranked(self) -> list[dict[str, Any]]:
        """Trials that came to their end from the best one, then those that were pruned, others."""
        order = list(STATES.values())
        sign = -1.0 if self.larger_is_better else 1.0

        def rank(row: dict[str, Any]) -> tuple[int, float]:
            value = row["value"]
            return order.index(row["state"]), math.inf if math.isnan(value) else sign * value

        return sorted(self.rows, key=rank)

    def _words(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
        """Rows for people."""
        names = {"done_percent": "done", "seconds": "time", **short_names(self.settings)}
        return [
            {names.get(name, name): _word(name, value) for name, value in row.items()}
            for row in rows
        ]

    def __str__(self) -> str:
        """The best trials and the best settings as text for a terminal."""
        ranked = self._ranked()
        words = [
            {key: text for key, text in row.items() if key not in ("run_dir", "error")}
            for row in self._words(ranked[:MAX_ROWS])
        ]
        lines = text_table(words) if words else []
        if len(ranked) > MAX_ROWS:
            lines.append(f"and {len(ranked) - MAX_ROWS} more in {self.study / CSV_FILE}")
        lines += ["", self.outcome]
        return printable("\n".join([*lines, "", self.line] if self.best else lines))

    def markdown(self) -> str:
        """All trials as Markdown, with the picture and the best settings."""
        lines = ["# Search", "", self.outcome, ""]
        if self.best:
            lines += ["```bash", self.line, "```", "", f"![trials]({PICTURE_FILE})", ""]
        lines += markdown_table(self._words(self._ranked())) if self.rows else []
        return "\n".join(lines) + "\n"

    def best_yaml(self) -> str:
        """The best settings by dotted name, as `train` takes them, below where they come from."""
        head = f"# Trial {self.best_trial} of {len(self.rows)}: {self.metric} {self.best_value!r}"
        return f"{head}\n# {self.line}\n{yaml.safe_dump(self.best, sort_keys=False)}"


def result_of(
    study: Study, space: Space, directory: Path, metric: str, given: Sequence[str]
) -> SearchResult:
    """The result of a study as it is."""
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


def write_tables(result: SearchResult) -> None:
    """Write tables and best settings.

    Raises:
        ConfigError: If they can not be written.
    """
    texts = {MARKDOWN_FILE: result.markdown()}
    texts |= {CSV_FILE: csv_table(result.rows)} if result.rows else {}
    texts |= {BEST_FILE: result.best_yaml()} if result.best else {}
    with writable("study", result.study):
        for name, text in texts.items():
            with atomic_write(result.study / name) as file:
                file.write(text.encode())


def write_picture(result: SearchResult, study: Study, space: Space) -> None:
    """Draw the trials, if there is one that came to its end.

    Raises:
        ConfigError: If the picture can not be written.
    """
    if result.best:
        figure = draw_search(result.rows, study, space, result.metric)
        with writable("study", result.study), atomic_write(result.study / PICTURE_FILE) as file:
            figure.savefig(file, format="png", dpi=110)


def _row(trial: FrozenTrial, space: Space) -> dict[str, Any]:
    values = trial.intermediate_values
    last = values[max(values)] if values else math.nan
    took = trial.duration.total_seconds() if trial.duration else math.nan  # of earlier versions
    known = trial.params.keys() >= space.ranges.keys()
    settings = space.settings_of(trial.params) if known else {}
    return {
        "trial": trial.number,
        "state": STATES[trial.state.name],
        "value": last if trial.value is None else trial.value,
        **{key: text_of(settings[key]) if key in settings else "" for key in space.ranges},
        "done_percent": 100 if trial.state.name == "COMPLETE" else max(values, default=0),
        "seconds": trial.user_attrs.get(SECONDS, took),
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
