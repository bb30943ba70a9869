"""The hint for evaluation returns that lag behind training."""

from __future__ import annotations

import math
from typing import Any

import pytest

from maze_train import RunInfo
from maze_train.run.notes import EVALUATION_GAP, EvaluationGapNote

LEARNED = [0.3, 0.6, 0.9, 0.95, 0.94, 0.95, 0.96, 0.95, 0.96, 0.95]
JUMPS = [0.0, 0.9, 0.0, 0.96, 0.0, 0.0, 0.96, 0.0, 0.0, 0.0]


def rows(train: list[float], evaluated: list[float]) -> list[dict[str, float]]:
    """Return rows of metrics; NaN means no value."""
    found = []
    for epoch, (one, other) in enumerate(zip(train, evaluated, strict=True), start=1):
        row = {"train/episode_return_mean": one, "eval/episode_return_mean": other}
        row = {name: value for name, value in row.items() if not math.isnan(value)}
        found.append({"epoch": epoch, "env_steps": epoch, **row})
    return found


def told_at(train: list[float], evaluated: list[float], **config: Any) -> list[int]:
    """Return the epochs at which the hint is printed."""
    found: list[int] = []
    told: list[str] = []
    note = EvaluationGapNote(told.append)
    note.start(RunInfo(config=config))
    for row in rows(train, evaluated):
        note.write(row)
        found += [int(row["epoch"])] * (len(told) - len(found))
    return found


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (1e-3, 5.0), (1e4, -1e5)])
def test_evaluation_gap_is_noted_once(scale: float, shift: float) -> None:
    """The hint is printed once, for any scale of rewards."""
    train, evaluated = ([scale * x + shift for x in series] for series in (LEARNED, JUMPS))
    assert told_at(train, evaluated) == [6]
    gaps = [math.nan if i % 2 else x for i, x in enumerate(evaluated)]
    assert told_at(train, gaps) == [9]


@pytest.mark.parametrize(
    ("train", "evaluated"),
    [
        (LEARNED, LEARNED),
        (LEARNED, [0.0, 0.0, 0.0, 0.9, 0.9, 0.9, 0.9, 0.0, 0.9, 0.0]),
        (LEARNED, [0.0, 0.0, *[0.5] * 8]),
        ([22.0, 21, 23, 22, 24, 25, 23, 26], [9.4] * 8),
        ([-180.0, -200, -170, -190, -150, -140], [-600.0, -130, -600, -650, -600, -600]),
        ([20.0, 60, 120, 250, 400, 480], [9.0, 200, 500, 500, 500, 500]),
        ([8.0, 20, 40, 60, 70, 70], [9.0, 14, 25, 35, 40, 45]),
        ([0.9, 0.1, 0.0, 0.0, 0.0], [0.9, 0.0, 0.0, 0.0, 0.0]),
        ([-200.0] * 6, [-200.0] * 6),
        ([math.nan] * 6, [0.0] * 6),
        (LEARNED, [math.nan] * 10),
    ],
    ids=[
        "equal", "rarely", "partly", "early", "early and far", "lag", "other scale", "collapse",
        "constant", "no training", "no evaluation",
    ],
)  # fmt: skip
def test_evaluation_gap_is_not_noted_without_improvement(
    train: list[float], evaluated: list[float]
) -> None:
    """No hint before training has improved or if both returns are low."""
    assert told_at(train, evaluated) == []


@pytest.mark.parametrize(
    "config", [{"evaluation": {"deterministic": False}}, {"algorithm": {"deterministic": True}}]
)
def test_evaluation_gap_is_not_noted_for_equal_actions(config: dict[str, Any]) -> None:
    """No hint if training and evaluation choose actions in the same way."""
    assert told_at(LEARNED, JUMPS, **config) == []


@pytest.mark.parametrize(("past", "count"), [(0, 1), (5, 1), (6, 0)])
def test_resumed_run_notes_the_evaluation_gap_once(past: int, count: int) -> None:
    """Rows before the checkpoint are used, and the hint is not repeated."""
    series, told = rows(LEARNED, JUMPS), list[str]()
    note = EvaluationGapNote(told.append)
    note.start(RunInfo(past_rows=tuple(series[:past])))
    for row in series[past:]:
        note.write(row)
    assert told == [EVALUATION_GAP] * count
