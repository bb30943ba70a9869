"""Pieces of a run that do not depend on the algorithm."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from maze_train.errors import RunDirectoryError
from maze_train.targets import build_target
from maze_train.tracking.rows import read_rows
from maze_train.training.evaluators import Evaluator, MultiEvaluator

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from maze_train.tracking.rows import MetricsRow
    from maze_train.tracking.tracker import Tracker
    from maze_train.training.checkpoints import Checkpoint
    from maze_train.training.config import EvaluationConfig
    from maze_train.training.model_selection import BestModelSelection
    from maze_train.training.trainer import Trainer

__all__ = [
    "joined",
    "missing_results",
    "own_evaluators",
    "past_rows",
    "tell_stop",
]


def own_evaluators(config: EvaluationConfig) -> list[Evaluator]:
    """The evaluators of the user.

    Raises:
        ConfigError: If one can not be built, or is none.
    """
    evaluators: list[Evaluator] = []
    for i, node in enumerate(config.evaluators):
        key = f"evaluation.evaluators[{i}]"
        evaluators.append(build_target(node, key=key, kind=Evaluator))
    return evaluators


def joined(evaluators: Sequence[Evaluator]) -> Evaluator | None:
    """Several evaluators as one; None: there is none."""
    if len(evaluators) > 1:
        return MultiEvaluator(evaluators)
    return evaluators[0] if evaluators else None


def past_rows(run_dir: Path, resumed: Checkpoint, is_kept: bool) -> tuple[MetricsRow, ...]:
    """The metrics of a run up to the checkpoint from which it is continued.

    A table that is damaged is set aside: the checkpoint is whole, and the run goes on without it.

    Args:
        run_dir: Directory of the run.
        resumed: The checkpoint.
        is_kept: Whether the run writes metrics.csv; then missing rows are told.
    """
    table = run_dir / "metrics.csv"
    try:
        rows = read_rows(table, resumed.epoch)
    except RunDirectoryError as error:
        aside = table.with_suffix(".damaged.csv")
        os.replace(table, aside)
        kept = f"it is kept as {aside.name}, and a new one begins after {resumed.path.name}"
        print(f"warning: {error}; {kept}", file=sys.stderr)
        return ()
    if is_kept and len(rows) < resumed.epoch:
        missing = f"{resumed.epoch - len(rows)} of {resumed.epoch} epochs"
        print(f"warning: metrics.csv lacks {missing} before {resumed.path.name}", file=sys.stderr)
    return tuple(rows)


def tell_stop(trainer: Trainer, how_to_go_on: str) -> None:
    """Print where an unfinished run stopped, and how to go on."""
    latest = None if trainer.checkpoints is None else trainer.checkpoints.latest
    stopped = f"stopped in epoch {trainer.epoch + 1} after {trainer.env_steps:,} steps"
    if latest is None:
        text = f"{stopped}; there is no checkpoint"
    else:
        text = f"{stopped}; last checkpoint: {latest}\n{how_to_go_on}"
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def missing_results(
    trainer: Trainer, tracker: Tracker, selection: BestModelSelection
) -> tuple[str, ...]:
    """Results of a run that ended which could not be written, as on a full disk."""
    missing = [*tracker.missing, *map(str, selection.missing)]
    checkpoints = trainer.checkpoints
    if checkpoints is not None and not checkpoints.holds(trainer.epoch, trainer.updates, False):
        missing.append("the last checkpoint")
    return tuple(missing)
