"""One trial, in a process of its own: its runs, and their end where it is hopeless."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from maze_train.config.messages import CONFIGURATION_ERRORS, explain
from maze_train.config.sweep_jobs import JobRecord
from maze_train.config.train_config import AUTO
from maze_train.errors import MazeTrainError, TrainingError
from maze_train.notices import tell_traceback
from maze_train.runners.base import TrainingRunner
from maze_train.runners.pipeline import configure, prepare
from maze_train.training.callbacks import Callback
from maze_train.tuning.study import STUDY, open_journal, open_study

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from maze_train.training.callbacks import TrainingView


GRID = 5
"""Percents of a run from one report to the next."""


@dataclass(frozen=True)
class TrialRecord(JobRecord):
    """One trial that ended; its value is the objective."""

    pruned_at: int = 0
    """Percent of the run at which it was pruned; 0: it came to its end."""

    word: ClassVar[str] = "trial"


@dataclass(frozen=True)
class TrialTask:
    """What a process has to know to carry out a trial."""

    number: int
    study: Path
    """Directory of the study."""

    settings: Mapping[str, Any]
    """The settings of the runs without seed and directory."""

    seeds: Sequence[int]
    metric: str | None
    """Column of metrics.csv; None: the one that selects the best policy."""

    mode: Literal["max", "min"]
    value: str
    """`best` or `final`."""

    pruner: Any
    """Pruner of Optuna."""

    def directory_of(self, seed: int) -> Path:
        """The directory of a run."""
        directory = self.study / str(self.number)
        return directory / f"seed_{seed}" if len(self.seeds) > 1 else directory


class PruningCallback(Callback):
    """Reports the metric of a run to its study, and ends the run when the pruner says so.

    Trials may have epochs of different lengths, so values are reported by the percent of the run
    that is done, on a grid that is the same for all: the last value holds at each point that was
    passed since.

    Args:
        task: The trial.
        metric: Column of the metrics.
    """

    def __init__(self, task: TrialTask, metric: str) -> None:
        self.pruned_at = 0
        self._metric, self._pruner = metric, task.pruner
        self._storage = open_journal(task.study)  # of this process; the other one has its own
        self._study = open_study(self._storage, task.mode)
        study_id = self._storage.get_study_id_from_name(STUDY)
        self._id = self._storage.get_trial_id_from_study_id_trial_number(study_id, task.number)

    def on_run_start(self, run: TrainingView) -> None:
        """End a run that was pruned, and interrupted before it came to its end."""
        self._prune(run)

    def on_epoch_end(self, run: TrainingView) -> None:
        """Report the metric, if the epoch has it."""
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
    """Carry out a trial; a failure is in its record, and its traceback on standard error."""
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
        if isinstance(error, CONFIGURATION_ERRORS):
            return replace(record, error=explain(error))
        kind = "" if isinstance(error, MazeTrainError) else f"{type(error).__name__}: "
        return replace(record, error=f"{kind}{error}")


def _run(task: TrialTask, seed: int, is_first: bool) -> tuple[float, int]:
    """Make a run, or go on with it; returns its value, and the percent at which it was pruned.

    Raises:
        TrainingError: If it has no value.
    """
    run_dir = str(task.directory_of(seed))
    values = {**task.settings, "seed": seed, "run_dir": run_dir, "resume": AUTO}
    values["tracking.csv"] = True
    runner = TrainingRunner(prepare(configure(values)))
    metric = task.metric or runner.builder.selection_metric
    pruning = PruningCallback(task, metric) if is_first else None
    runner.callbacks.extend([pruning] if pruning else [])
    history = runner.run().history
    found = [row[metric] for row in history if math.isfinite(row.get(metric, math.nan))]
    if not found:
        known = ", ".join(history[-1]) if history else "nothing"
        raise TrainingError(f"no finite {metric}; metrics.csv has {known}")
    best = max(found) if task.mode == "max" else min(found)
    value = best if task.value == "best" else found[-1]
    return value, pruning.pruned_at if pruning else 0
