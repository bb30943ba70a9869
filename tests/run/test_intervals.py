"""Intervals in environment steps: evaluations, checkpoints and dumps within epochs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_cases import go_on
from short_runs import rows, short_run

from maze_train import Callback, CallbackError, ConfigError, Evaluator, load_policy
from maze_train.training.outcome import crosses

pytestmark = pytest.mark.usefixtures("empty_directory")
EPOCHS = {"algorithm.epoch_length": 4, "total_steps": 384, "algorithm.lr": 1e-3}
STEPS = {
    **EPOCHS,
    "evaluation.interval_steps": 100,
    "evaluation.dump_interval_steps": 150,
    "checkpoint.interval_steps": 100,
}
"""An update has 32 steps, an epoch 128."""


class Steps(Callback):
    """Callback that records the steps of evaluations and checkpoints."""

    def __init__(self) -> None:
        self.evaluations: list[int] = []
        self.checkpoints: list[int] = []

    def on_evaluation_end(self, run: Any) -> None:
        self.evaluations.append(run.progress.env_steps)

    def on_checkpoint(self, run: Any) -> None:
        self.checkpoints.append(run.progress.env_steps)


class FailsOnce(Evaluator):
    """Evaluator that fails in one of its evaluations."""

    def __init__(self, at: int) -> None:
        self.at = at

    def evaluate(self, policy: Any) -> dict[str, float]:
        self.at -= 1
        if self.at == 0:
            raise ArithmeticError("a bug")
        return {"own": 1.0}


def columns(path: str, prefix: str) -> list[dict[str, str]]:
    """Return the columns of a group in all rows."""
    return [{k: v for k, v in row.items() if k.startswith(prefix)} for row in rows(path)]


def test_interval_steps_follow_the_update() -> None:
    """Evaluation, dump and checkpoint follow the update; training is unchanged."""
    steps = Steps()
    short_run(callbacks=[steps], **STEPS)
    assert steps.evaluations == [128, 224, 320, 384]  # the last one is at the end of the run
    assert steps.checkpoints == [128, 224, 320, 384]
    assert [row["eval/env_steps"] for row in rows("run")] == ["128", "224", "384"]
    dumps = sorted(path.name for path in Path("run/policies").iterdir())
    assert dumps == ["step_000000160", "step_000000320"]
    load_policy("run@step_000000320", trust=["own_envs"])
    short_run("plain", **EPOCHS)
    assert columns("run", "train/") == columns("plain", "train/")


@pytest.mark.parametrize("at", [1, 2, 4])
def test_failed_evaluation_is_repeated_on_resume(at: int) -> None:
    """The evaluation is repeated within an epoch, at its end, and at the end of the run."""
    short_run("whole", **STEPS, **{"evaluation.evaluators": [FailsOnce(0)]})
    with pytest.raises(CallbackError, match="ArithmeticError: a bug"):
        short_run(**STEPS, **{"evaluation.evaluators": [FailsOnce(at)]})
    steps = Steps()
    go_on(
        resume="run",
        callbacks=[steps],
        trust=["own_envs", "test_intervals"],
        **{"evaluation.evaluators": [FailsOnce(0)]},
    )
    assert steps.evaluations == [128, 224, 320, 384][at - 1 :]
    assert rows("run") == rows("whole")


@pytest.mark.parametrize(
    ("key", "value"),
    [("evaluation.interval", 2), ("evaluation.dump_interval", 1), ("checkpoint.interval", 3)],
)
def test_interval_in_epochs_and_steps_raises(key: str, value: int) -> None:
    """Intervals in epochs and in steps cannot be combined."""
    with pytest.raises(
        ConfigError, match=rf"{key}_steps = 64: cannot be combined with .* {value};"
    ):
        short_run(**{key: value, f"{key}_steps": 64})


@pytest.mark.parametrize(
    ("algorithm", "steps"), [("ppo", 32), ("a2c", 32), ("sac", 8), ("impala", 32)]
)
def test_an_interval_shorter_than_an_update_is_refused(algorithm: str, steps: int) -> None:
    """The error names the interval and the number of steps of an update."""
    short = {"evaluation.interval_steps": steps - 1}
    problem = f"interval_steps = {steps - 1}: shorter than an update of {steps} steps"
    with pytest.raises(ConfigError, match=problem):
        short_run(algorithm=algorithm, **short)
    short_run(algorithm=algorithm, **{"evaluation.interval_steps": steps}, total_steps=128)


def test_interval_crossing_includes_its_end() -> None:
    """An interval that ends at a multiple crosses it; one that starts there does not."""
    cases = {(10, 0, 9): False, (10, 9, 10): True, (10, 10, 19): False, (10, 5, 45): True}
    assert {case: crosses(*case) for case in cases} == cases
    assert not crosses(0, 0, 100)
