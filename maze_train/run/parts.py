"""Pieces of a run that do not depend on the algorithm: its directory, evaluators and result."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from maze_train.config.writing import config_text
from maze_train.core.files import read_regular
from maze_train.core.folders import check_held
from maze_train.core.notices import notify
from maze_train.core.run_directory import FAILURES, RunDirectory
from maze_train.tracking.tracker import Tracker
from maze_train.training.outcome import TrainingSummary

if TYPE_CHECKING:
    from maze_train.run.pipeline import PreparedRun
    from maze_train.training.evaluators import BestModelSelection
    from maze_train.training.policy_files import TrainedPolicy
    from maze_train.training.trainer import Trainer


WHOLE = "the directory itself"
"""Name of the missing part where a run directory was moved or removed."""


def tell_stop(trainer: Trainer, how_to_go_on: str) -> None:
    """Print where an unfinished run stopped, and how to continue."""
    latest = None if trainer.checkpoints is None else trainer.checkpoints.latest
    stopped = f"stopped in epoch {trainer.epoch + 1} after {trainer.env_steps:,} steps"
    if latest is None:
        notify(f"{stopped}; there is no checkpoint: a run in this directory begins again")
    elif not latest.is_dir():
        notify(f"{stopped}; the last checkpoint, {latest}, was moved or removed")
    else:
        notify(f"{stopped}; last checkpoint: {latest}\n{how_to_go_on}")


def missing_results(
    trainer: Trainer, tracker: Tracker, selection: BestModelSelection, run_dir: Path
) -> tuple[str, ...]:
    """Results of a run that ended which could not be written, as on a full disk."""
    missing = [*tracker.missing, *map(str, selection.missing)]
    try:
        check_held(run_dir)
    except OSError:
        missing.insert(0, WHOLE)
    checkpoints = trainer.checkpoints
    if checkpoints is not None and not checkpoints.holds(trainer.epoch, trainer.updates, False):
        missing.append("the last checkpoint")
    return tuple(missing)


@dataclass(frozen=True)
class TrainingResult:
    """Result of a finished run."""

    run_dir: Path
    """Directory of the run."""

    summary: TrainingSummary
    """The outcome in numbers."""

    history: list[dict[str, float]] = field(repr=False)
    """One row of metrics per epoch."""

    policy: TrainedPolicy
    """The best policy, or the last one if none was selected."""

    missing: tuple[str, ...] = ()
    """Results that could not be written, as on a full disk; `maze-run` fails then."""

    @property
    def best_metric(self) -> float:
        """Best value of the metric that selects the policy; the objective of a sweep."""
        return self.summary.best_metric


def best_of_finished(prepared: PreparedRun) -> float | None:
    """Return the best metric of a run that has finished and would not change if it was resumed.

    Args:
        prepared: The run.

    Returns:
        The metric; None if there is more to do, or the outcome is not known.
    """
    last = prepared.checkpoint
    if prepared.resumed_dir is None:
        return None
    run = RunDirectory(prepared.resumed_dir)
    try:
        # Without checkpoints, those of the run are in its file only.
        settings = last.settings if last else read_regular(run.config).decode()
        summary = run.outcome
        is_over = str(summary["stop_reason"]) not in ("", *FAILURES)
        is_last = last is None or last.updates == int(summary["updates"])
        best = summary["best_metric"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    if not (is_over and is_last and settings == config_text(prepared.config)):
        return None
    return math.nan if best is None else float(best)
