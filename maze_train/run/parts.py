"""Pieces of a run that do not depend on the algorithm: its directory, evaluators and result."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from maze_train.config.writing import CHECKPOINTS, CONFIG_FILE, config_text, writable
from maze_train.core.errors import ConfigError
from maze_train.core.files import new_directory, read_regular, remove_leftovers
from maze_train.core.folders import check_held, make_folders
from maze_train.core.notices import notify, warn
from maze_train.tracking.tracker import FAILURES, Tracker
from maze_train.training.outcome import TrainingSummary

if TYPE_CHECKING:
    from maze_train.run.prepared import PreparedRun
    from maze_train.training.checkpoints import CheckpointStore
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


BEST, METRICS, SUMMARY = "best", "metrics.csv", "summary.json"


RESULTS = (METRICS, BEST, SUMMARY, "policies", "plots", "profile", "events.out.tfevents.*")
"""Files and directories of a run in addition to its configuration and its checkpoints."""


def clear(store: CheckpointStore, run_dir: Path) -> None:
    """Remove what killed processes left in a run directory, which must be locked."""
    for directory in (run_dir, run_dir / BEST):
        remove_leftovers(directory)
    store.clean()


def put_aside(run_dir: Path) -> None:
    """Move the results of a run that begins again into a directory below it, if there are any.

    Its settings stay until those of the new run take their place, so that it can begin once more.

    Raises:
        ConfigError: If they cannot be moved.
    """
    found = [path for name in RESULTS for path in sorted(run_dir.glob(name))]
    if not found or not (run_dir / CONFIG_FILE).exists():
        return
    with writable("run_dir", run_dir):
        aside = new_directory(run_dir / "before")
        shutil.copy(run_dir / CONFIG_FILE, aside)
        for path in found:
            path.rename(aside / path.name)
    warn(
        f"{run_dir} has no checkpoint: the run begins again, at step 0; what it had "
        f"written is in {aside}"
    )


def check_is_free(run_dir: str | Path | None) -> None:
    """Refuse a directory for a new run that holds one already, or the remains of one.

    One that failed before its first checkpoint does not count: there is nothing to continue.

    Raises:
        ConfigError: If it does.
    """
    if run_dir is None:
        return
    if (Path(run_dir) / CONFIG_FILE).exists():
        if not any((Path(run_dir) / CHECKPOINTS).glob("*")) and _has_failed(Path(run_dir)):
            return
        problem = "holds a run already; continue it with resume=auto, name another directory, or "
        raise ConfigError("run_dir", f"{problem}remove it", str(run_dir))
    left = [name for name in (CHECKPOINTS, BEST, METRICS) if (Path(run_dir) / name).exists()]
    if left:
        raise ConfigError(
            "run_dir",
            f"holds {', '.join(left)} of a run whose {CONFIG_FILE} is missing: restore that file "
            "(best/ has a copy) to continue it, or name another directory",
            str(run_dir),
        )


def stop_reason_of(run_dir: Path) -> str:
    """Why a run ended, as its summary says; empty: there is none that can be read."""
    try:
        return str(json.loads(read_regular(run_dir / SUMMARY))["stop_reason"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""


def best_of_finished(prepared: PreparedRun) -> float | None:
    """Return the best metric of a run that has finished and would not change if it was resumed.

    Args:
        prepared: The run.

    Returns:
        The metric; None if there is more to do, or the outcome is not known.
    """
    run_dir, last = prepared.resumed_dir, prepared.checkpoint
    if run_dir is None:
        return None
    try:
        # Without checkpoints, those of the run are in its file only.
        settings = last.settings if last else read_regular(run_dir / CONFIG_FILE).decode()
        summary = json.loads(read_regular(run_dir / SUMMARY))
        is_over = str(summary["stop_reason"]) not in ("", *FAILURES)
        is_last = last is None or last.updates == int(summary["updates"])
        best = summary["best_metric"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    if not (is_over and is_last and settings == config_text(prepared.config)):
        return None
    return math.nan if best is None else float(best)


def _has_failed(run_dir: Path) -> bool:
    """Whether a run says that it failed, or has written no result at all."""
    if any((run_dir / name).exists() for name in (METRICS, BEST, SUMMARY)):
        return stop_reason_of(run_dir) in FAILURES
    return True


def make_run_dir(run_dir: str | None, default_parent: Path) -> Path:
    """Create the directory of a new run.

    Args:
        run_dir: Its name; None: `<default_parent>/<date>_<time>`.
        default_parent: Where runs of its kind are.

    Raises:
        ConfigError: If it cannot be created.
    """
    with writable("run_dir", Path(run_dir or default_parent)):
        if run_dir is None:
            return new_directory(default_parent)
        make_folders(Path(run_dir))
        return Path(run_dir)
