"""Test of a run after training, in episodes that no evaluation has played."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from maze_train.files import read_regular

if TYPE_CHECKING:
    from pathlib import Path

    from maze_train.rollout.acting import ActingModel
    from maze_train.training.evaluators import Evaluator
    from maze_train.training.model_selection import BestModelSelection
    from maze_train.training.outcome import TrainingSummary


RETURNS = {"episode_return_mean", "episode_return_std"}


def final_test(
    evaluator: Evaluator, selection: BestModelSelection, epoch: int
) -> dict[str, dict[str, float]]:
    """Test the last policy and the best one, both in the same episodes; the model has that then.

    Args:
        evaluator: Plays the episodes.
        selection: Has the model with the last weights, and the best ones.
        epoch: Epochs so far.

    Returns:
        Metrics without their prefix, and `epoch`, of the policies `last` and `best`.
    """
    last = best = _test(evaluator, selection, epoch)
    if selection.best_epoch not in (0, epoch):
        selection.reset_to_best()
        best = _test(evaluator, selection, selection.best_epoch)
    return {"last": last, "best": best}


def _test(evaluator: Evaluator, selection: BestModelSelection, epoch: int) -> dict[str, float]:
    metrics = evaluator.evaluate(cast("ActingModel", selection.model))
    return {"epoch": epoch, **{name.partition("/")[2]: x for name, x in metrics.items()}}


def earlier_test(
    path: Path, summary: TrainingSummary, n_episodes: int
) -> dict[str, dict[str, float]]:
    """Test of a run that had come to its end before, from summary.json; empty if there is none.

    Args:
        path: The file.
        summary: The outcome now.
        n_episodes: Episodes of a test.
    """
    with suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
        found: dict[str, Any] = json.loads(read_regular(path))
        tests = {name: found["final_test"][name] for name in ("last", "best")}
        is_that = found["updates"] == summary.updates and all(
            test["episodes"] == n_episodes
            and test.keys() >= RETURNS
            and all(type(x) in (int, float) for x in test.values())
            for test in tests.values()
        )
        return tests if is_that else {}
    return {}
