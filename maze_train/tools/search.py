"""Hyperparameter searches with Optuna: search space, study, trials, processes and results."""

from __future__ import annotations

import inspect
import math
import os
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import yaml

from maze_train.config.compose import load_config
from maze_train.config.options import FAILURE
from maze_train.config.search_config import (
    GROUP,
    LINEAR,
    SearchConfig,
    SearchRange,
    load_search_config,
)
from maze_train.config.stored import MAX_BYTES, plain_values
from maze_train.config.train_config import AUTO, TrainConfig
from maze_train.core.conversion import config_to_dict, join
from maze_train.core.errors import (
    ConfigError,
    MazeTrainError,
    RunDirectoryError,
    TrainingError,
    did_you_mean,
    nearest,
    printable,
)
from maze_train.core.files import atomic_write, exclusive, open_own, read_regular, writable
from maze_train.core.folders import make_folders
from maze_train.core.names import JOURNAL, METRICS, OUTPUTS, PROGRAM, STUDY_FILE
from maze_train.core.notices import notify, say, tell_traceback, warn
from maze_train.core.plain_yaml import dump_yaml, load_yaml
from maze_train.core.report import (
    BLUE,
    GREY,
    RED,
    add_legend,
    csv_text,
    curve,
    decorate,
    markdown_table,
    new_figure,
    text_table,
    write_report,
)
from maze_train.core.run_directory import objective_of
from maze_train.core.targets import TARGET, import_extra, is_within, locate
from maze_train.core.text import duration, flattened, readable
from maze_train.envs.factory import EnvFactory
from maze_train.run.train import TrainingRunner
from maze_train.tools.compare import short
from maze_train.tools.runs import task_name
from maze_train.training.callbacks import Callback, TrainingView
from maze_train.training.config import EvaluationConfig
from maze_train.workers.job_pool import (
    LOG_FILE,
    JobRecord,
    LocalJobs,
    ProcessJob,
    StartedJob,
    tell_failure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from optuna.storages import BaseStorage
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


STUDY = "search"
"""Name of the study in its journal."""

DEFAULTS = {"median": {"n_warmup_steps": 30}}
"""Default arguments of samplers and pruners that differ from Optuna's defaults."""

MAY_DIFFER = ("tracking", "checkpoint", "trust", "moved")
"""Sections of settings that do not affect the values of trials."""


def open_journal(directory: Path) -> BaseStorage:
    """Open the storage of the study in a directory; each process must open the storage separately.

    Raises:
        RunDirectoryError: If the file cannot be read, or is a different journal.
    """
    storages = optuna().storages
    path = directory / JOURNAL
    with reading_journal(directory):
        os.close(open_own(path, os.O_RDWR))  # Optuna itself follows links.
        storage: BaseStorage = storages.JournalStorage(
            storages.journal.JournalFileBackend(str(path))
        )
    return storage


@contextmanager
def reading_journal(directory: Path) -> Iterator[None]:
    """Convert Optuna's errors about a damaged journal to RunDirectoryError.

    Raises:
        RunDirectoryError: If reading the journal fails in this context.
    """
    damages = (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError)
    try:
        yield
    except (*damages, RuntimeError, AssertionError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise RunDirectoryError(f"{directory / JOURNAL} cannot be read: {problem}") from error


def release_journal(directory: Path) -> None:
    """Remove the journal lock of a killed process, since the lock would block Optuna.

    No other process may use the directory.

    Raises:
        RunDirectoryError: If the lock cannot be removed.
    """
    lock = directory / f"{JOURNAL}.lock"
    try:
        lock.unlink(missing_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"{lock} cannot be removed: {error}; remove the file") from error


def open_study(storage: BaseStorage, mode: str) -> Study:
    """Return the study in a storage; create a missing study.

    Args:
        storage: The storage.
        mode: `max` or `min`: whether to maximise or minimise.
    """
    study: Study = optuna().create_study(
        storage=storage, study_name=STUDY, direction=f"{mode}imize", load_if_exists=True
    )
    return study


def check_settings(directory: Path, settings: Mapping[str, Any]) -> None:
    """Write the common settings of the trials, or compare them with the existing file.

    Raises:
        ConfigError: If the existing study has different settings.
        RunDirectoryError: If the file is damaged.
    """
    path = directory / STUDY_FILE
    text = dump_yaml(dict(settings))
    if not path.exists():
        with writable("study", directory), atomic_write(path) as file:
            file.write(text.encode())
        return
    try:
        text_before = read_regular(path, MAX_BYTES).decode()
        before = flattened(plain_values(text_before))
    except (OSError, ValueError, ArithmeticError, yaml.YAMLError, AttributeError) as error:
        raise RunDirectoryError(f"{path} is damaged: {error}") from error
    now = flattened(load_yaml(text))
    for key in before | now:
        if key not in before and not key.startswith(f"{GROUP}."):
            continue  # A setting of a newer version.
        if str(before.get(key)) != str(now.get(key)) and not is_within(key, MAY_DIFFER):
            problem = f"the study in {directory} has {before.get(key)}; use this value to resume "
            problem += "the study, or set another directory: study=<directory>"
            raise ConfigError(key, problem, now.get(key))


def part_named(kind: str, node: str | Mapping[str, Any], seed: int | None = None) -> Any:
    """Build a sampler or pruner of Optuna.

    Args:
        kind: `sampler` or `pruner`.
        node: First part of the class name, or a mapping with `name` and the arguments.
        seed: Seed, if the class has a seed; added to the seed in the arguments.

    Raises:
        ConfigError: If the name is unknown, or the arguments are invalid.
    """
    given: dict[str, Any] = {"name": node} if isinstance(node, str) else dict(node)
    name, module = str(given.pop("name", "")), getattr(optuna(), f"{kind}s")
    suffix = kind.capitalize()
    classes = {
        key.removesuffix(suffix).lower(): getattr(module, key)
        for key in dir(module)
        if key.endswith(suffix) and not key.startswith("Base")
    }
    cls = classes.get(name.lower())
    if cls is None:
        hint = did_you_mean(nearest(name, classes, count=1), "", " ")
        raise ConfigError(kind, f"unknown; {hint}allowed: {', '.join(classes)}", name)
    if seed is not None and "seed" in inspect.signature(cls).parameters:
        given["seed"] = int(given.get("seed") or 0) + seed
    try:
        return cls(**{**DEFAULTS.get(name.lower(), {}), **given})
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(kind, str(error).replace(".__init__()", ""), node) from error


TEST_EPISODES = 20
"""Number of test episodes of each run, if the settings have none."""

GRID = 5
"""Interval between reports in percent of a run."""


@dataclass(frozen=True)
class TrialRecord(JobRecord):
    """Record of a finished trial; the objective is the value of the trial."""

    pruned_at: int = 0
    """Percentage of the run at which the trial was pruned; 0 if the trial was not pruned."""

    word: ClassVar[str] = "trial"


@dataclass(frozen=True)
class TrialTask:
    """Arguments of a process that runs a trial."""

    number: int
    study: Path
    """Directory of the study."""

    settings: Mapping[str, Any]
    """Settings of the runs, without seed and directory."""

    seeds: Sequence[int]
    metric: str
    """Column of metrics.csv."""

    mode: Literal["max", "min"]
    value: str
    """Value of a run, see `SearchConfig.value`."""

    pruner: Any
    """Pruner of Optuna."""

    def directory_of(self, seed: int) -> Path:
        """Return the run directory for a seed."""
        directory = self.study / str(self.number)
        return directory / f"seed_{seed}" if len(self.seeds) > 1 else directory


class PruningCallback(Callback):
    """Reports the metric of a run to the study, and stops the run if the pruner returns True.

    Trials may have epochs of different lengths, so values are reported on a common grid of
    percentages of the run. The value at a grid point is the latest value of the metric at that
    time.

    Args:
        task: The trial.
    """

    def __init__(self, task: TrialTask) -> None:
        self.pruned_at = 0
        self._metric, self._pruner = task.metric, task.pruner
        self._storage = open_journal(task.study)  # Must not be shared with the parent process.
        self._study = open_study(self._storage, task.mode)
        study_id = self._storage.get_study_id_from_name(STUDY)
        self._id = self._storage.get_trial_id_from_study_id_trial_number(study_id, task.number)

    def on_run_start(self, run: TrainingView) -> None:
        """Stop a resumed run that was already pruned."""
        self._prune(run)

    def on_epoch_end(self, run: TrainingView) -> None:
        """Report the metric if it was logged in this epoch."""
        value = run.metrics.get(self._metric, math.nan)
        percent = math.floor(100 * run.progress.fraction + 1e-9)
        known = self._storage.get_trial(self._id).intermediate_values
        if math.isfinite(value):
            for step in range(GRID, percent + 1, GRID):
                if step not in known:
                    self._storage.set_trial_intermediate_value(self._id, step, value)
        self._prune(run)

    def _prune(self, run: TrainingView) -> None:
        trial = self._storage.get_trial(self._id)
        if not run.stop_reason and trial.last_step and self._pruner.prune(self._study, trial):
            self.pruned_at = trial.last_step
            run.stop(f"pruned at {self.pruned_at} %")


def run_trial(task: TrialTask, record: TrialRecord) -> TrialRecord:
    """Run a trial; after an error, record the message and print the traceback to stderr."""
    try:
        values = []
        for seed in task.seeds:
            value, pruned_at = _run(task, seed, is_first=seed == task.seeds[0])
            values.append(value)
            if pruned_at:
                return replace(record, objective=value, pruned_at=pruned_at, code=0)
        return replace(record, objective=math.fsum(values) / len(values), code=0)
    except Exception as error:
        tell_traceback(error)
        is_ours = isinstance(error, MazeTrainError)
        return replace(record, error=str(error) if is_ours else f"{type(error).__name__}: {error}")


def _run(task: TrialTask, seed: int, is_first: bool) -> tuple[float, int]:
    """Start or resume a run; return its value and the percentage at which the run was pruned.

    Raises:
        TrainingError: If the run has no finite value of the metric.
    """
    run_dir = str(task.directory_of(seed))
    values = {**task.settings, "seed": seed, "run_dir": run_dir, "resume": AUTO}
    values["tracking.csv"] = True
    metric = task.metric
    pruning = PruningCallback(task) if is_first else None
    result = TrainingRunner(load_config(values), [pruning] if pruning else []).run()
    history = result.history
    found = [row[metric] for row in history if math.isfinite(row.get(metric, math.nan))]
    if not found:
        known = ", ".join(history[-1]) if history else "nothing"
        raise TrainingError(f"no finite {metric}; {METRICS} has {known}")
    value = found[-1]
    if task.value == "best":
        value = max(found) if task.mode == "max" else min(found)
    elif task.value == "test":
        value = objective_of(result.summary.as_dict(), history, metric)
    return value, pruning.pruned_at if pruning else 0


def search(
    env: object = None,
    algorithm: str | dict[str, Any] = "ppo",
    ranges: str | Mapping[str, Any] | None = None,
    **settings: object,
) -> SearchResult:
    """Search for hyperparameters with Optuna, like `maze-run search`.

        result = search(
            "CartPole-v1",
            "ppo",
            {"algorithm.lr": {"low": 1e-4, "high": 1e-2, "log": True}},
            n_trials=20,
            total_steps=20_000,
            study="studies/cartpole",
        )
        train("CartPole-v1", "ppo", **result.best)

    Trials run in forked processes, so this process must not have used a GPU.

    Args:
        env: A registered id, an environment class or function that can be imported by name, or the
            settings of the `env` section as a mapping.
        algorithm: The name of an algorithm, or its settings as a mapping with `_target_`.
        ranges: Search space by dotted setting, `{"low": a, "high": b}` or a list of values; or the
            name of a file in `conf/search`.
        **settings: Settings of `SearchConfig` and of the runs, keyed by name.

    Raises:
        ConfigError: If a setting or a range is invalid. Raised before anything is written.
        TrainingError: If all trials failed.
        MissingExtraError: If Optuna is not installed.
    """
    if env is not None and not isinstance(env, str | Mapping):
        env = {TARGET: EnvFactory.from_any(env).config.target}
    given = {} if env is None else {"env": env}
    given |= {} if ranges is None else {"search": ranges}
    config, shared = load_search_config({**given, "algorithm": algorithm, **settings})
    words = [f"{key}={text_of(value)}" for key, value in flattened(shared).items()]
    return run_search(config, shared, words)


def run_search(
    config: SearchConfig,
    settings: Mapping[str, Any],
    given: Sequence[str] = (),
    directory: str | None = None,
) -> SearchResult:
    """Start or resume a study; return its result.

    Args:
        config: The search.
        settings: Settings common to all runs, as for `load_config`.
        given: The user's overrides as on the command line, to print the best command.
        directory: Default directory of the study.

    Raises:
        ConfigError: If a setting is invalid. Raised before anything is written.
        KeyboardInterrupt: If a signal was received. Raised once all trials have ended; the study
            can be resumed.
        TrainingError: If all trials failed.
    """
    for kind in ("sampler", "pruner"):
        part_named(kind, config.value_of(kind))
    base = load_config(settings)
    metric = config.metric or base.selection_metric
    if config.value == "test" and metric.startswith("eval/") and base.evaluation.n_episodes:
        n_episodes = base.evaluation.final_episodes or TEST_EPISODES
        settings = {**settings, "evaluation.final_episodes": n_episodes}
        base = load_config(settings)
    if not base.tracking.csv:
        notify(f"note: trials always write {METRICS}, since resuming a trial requires this file")
    space = Space(config.ranges, settings)
    default = Path(OUTPUTS, "studies", f"{task_name(config_to_dict(base))}-{base.algorithm.name}")
    path = Path(config.study or directory or default).absolute()
    with writable("study", path):
        make_folders(path)
    with exclusive(path, "searches in"):
        return _Search(config, settings, base, space, path, given).run()


@dataclass
class _Search:
    """A running search."""

    config: SearchConfig
    settings: Mapping[str, Any]
    """Settings common to all runs."""

    base: TrainConfig
    """Configuration built from `settings`."""

    space: Space
    directory: Path
    given: Sequence[str]
    """The user's overrides, as on the command line."""

    def __post_init__(self) -> None:
        config, base = self.config, self.base
        self.metric = config.metric or base.selection_metric
        evaluation = base.evaluation if config.metric is None else EvaluationConfig()
        own_mode = None if config.mode == "auto" else config.mode
        self.mode = own_mode or evaluation.selection_mode(self.metric)
        self.seed = base.seed or 0
        self._check_settings()
        release_journal(self.directory)
        self.storage = open_journal(self.directory)
        with reading_journal(self.directory):
            self.study = open_study(self.storage, self.mode)
            self._result()
        self.pool = LocalJobs(self._take, config.n_jobs, config.gpus)
        self.states = optuna().trial.TrialState

    def _check_settings(self) -> None:
        own = {
            "search": {
                key: {name: value for name, value in vars(found).items() if value is not None}
                for key, found in self.space.ranges.items()
            },
            "metric": self.metric,
            "mode": self.mode,
            "value": self.config.value,
            "n_seeds": self.config.n_seeds,
        }
        values = {**config_to_dict(self.base), "seed": self.seed}
        values = {key: value for key, value in values.items() if key not in ("run_dir", "resume")}
        check_settings(self.directory, {**own, **values})

    def run(self) -> SearchResult:
        """Run the missing trials."""
        before = len(self.study.trials)
        if before:
            is_full = before >= self.config.n_trials
            rest = "is complete; increase n_trials to run more" if is_full else "is resumed"
            notify(f"{PROGRAM}: the study in {self.directory} has {before} trials, and {rest}")
        if before < self.config.n_trials:
            self._import_parts()
        try:
            self.pool.run(self._jobs())
        except KeyboardInterrupt:
            self._write(is_final=False)
            notify(f"{PROGRAM}: run the same command again to resume the study in {self.directory}")
            raise
        result = self._write()
        if not result.best and all(row["state"] == "failed" for row in result.rows):
            raise TrainingError(
                f"all {len(result.rows)} trials failed; last error: {result.rows[-1]['error']}"
            )
        return result

    def _import_parts(self) -> None:
        """Import the modules needed for training before forking trials."""
        for name in ("learner_class", "trainer_class"):
            path = self.base.algorithm.value_of(name)
            if path:
                locate(path, f"algorithm.{name}")
        new_figure(1.0, 1.0)

    def _write(self, is_final: bool = True, with_picture: bool = True) -> SearchResult:
        """Write the tables; while the study runs, errors are only printed as warnings."""
        result = self._result()
        has_picture = with_picture and bool(result.best)
        figure = draw_search(result, self.space) if has_picture else None
        try:
            write_result(result, figure)
        except ConfigError as error:
            if is_final:
                raise
            warn(f"{error}; the search continues and will write these files later")
        return result

    def _result(self) -> SearchResult:
        return result_of(self.study, self.space, self.directory, self.metric, self.given)

    def _jobs(self) -> Iterator[ProcessJob]:
        """Yield interrupted trials, then new trials that are sampled when a process is free."""
        for trial in self.study.get_trials(states=(self.states.RUNNING,)):
            if trial.params.keys() == self.space.ranges.keys():
                with reading_journal(self.directory):  # The stored choices might differ.
                    job = self._job(trial)
                yield job
            else:  # The process was killed while sampling the settings.
                self._fail(trial.number, "the settings were not sampled")
        if not self.study.trials and self.config.begin_with_given:
            try:
                self.study.enqueue_trial(self.space.given(self.base))
            except ConfigError as error:
                notify(f"note: no trial uses the configured settings: {error}")
        while True:
            waiting = self.study.get_trials(states=(self.states.WAITING,))
            number = len(self.study.trials) - len(waiting)
            if number >= self.config.n_trials:
                return
            # A new sampler per trial, so that a resumed study samples the same settings.
            self.study.sampler = part_named("sampler", self.config.sampler, self.seed + number)
            with reading_journal(self.directory):  # The stored choices might differ.
                trial_number = self.study.ask(self.space.distributions).number
                job = self._job(self.study.trials[trial_number])
            yield job

    def _job(self, trial: FrozenTrial) -> ProcessJob:
        found = self.space.settings_of(trial.params)
        task = TrialTask(
            number=trial.number,
            study=self.directory,
            settings={**self.settings, **found},
            seeds=range(self.seed, self.seed + self.config.n_seeds),
            metric=self.metric,
            mode=self.mode,
            value=self.config.value,
            pruner=part_named("pruner", self.config.pruner),
        )
        words = " ".join(f"{key}={shown(text_of(value))}" for key, value in found.items())
        directory = self.directory / str(trial.number)
        record = TrialRecord(trial.number, words, str(directory), code=FAILURE)
        return ProcessJob(record, directory / LOG_FILE, lambda: run_trial(task, record))

    def _take(self, job: StartedJob) -> None:
        """Report the outcome of a trial to the study; an interrupted trial is only printed."""
        record = job.outcome
        assert isinstance(record, TrialRecord)
        took = duration(job.seconds)
        trial = self.study.trials[record.number]
        seconds = trial.user_attrs.get(SECONDS, 0.0) + job.seconds
        self.storage.set_trial_user_attr(trial._trial_id, SECONDS, seconds)
        if job.result is None and self.pool.is_ending:
            say(f"{PROGRAM}: {record.name}: interrupted after {took}")
            return
        if record.error:
            self._fail(record.number, record.error)
            tell_failure(job)
        elif record.pruned_at:
            self.study.tell(record.number, state=self.states.PRUNED)
            say(f"{PROGRAM}: {record.name}: pruned at {record.pruned_at} % after {took}")
        else:
            self.study.tell(record.number, record.objective)
            best = f"best {readable(self.study.best_value)} of trial {self.study.best_trial.number}"
            value = readable(record.objective)
            say(f"{PROGRAM}: {record.name}: {value} after {took}; {best}")
        self._write(is_final=False, with_picture=False)

    def _fail(self, number: int, error: str) -> None:
        trial = self.study.trials[number]
        self.storage.set_trial_user_attr(trial._trial_id, ERROR, error)
        self.study.tell(number, state=self.states.FAIL)
