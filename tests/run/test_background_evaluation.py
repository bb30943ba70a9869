"""Evaluation in a background process gives the metrics of evaluation in the training process."""

from __future__ import annotations

import os
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import everyday
from killed_runs import run_in_child
from run_cases import FORK, HEAPS, assert_same_training, go_on, settings
from short_runs import rows, short_run, summary
from torch import nn

from maze_train import Callback, ConfigError, Evaluator, load_policy
from maze_train.core.errors import WorkerError
from maze_train.envs.calls import EnvCalls
from maze_train.training.background import BackgroundEvaluator
from maze_train.workers.process_pool import LocalProcesses

pytestmark = pytest.mark.usefixtures("empty_directory")
ASYNC = {"evaluation.asynchronous": True}
TRUST = ["own_envs", "called_envs", "test_background_evaluation"]
HERE = "test_background_evaluation"


class Counted(Evaluator):
    """Evaluator with a state that may fail or kill its process.

    Args:
        marker: File created on failure; with an empty string, the evaluator never fails.
        how: `raises` or `dies`.
    """

    def __init__(self, marker: str = "", how: str = "raises") -> None:
        self.marker, self.how, self.made = marker, how, 0

    def evaluate(self, policy: Any) -> dict[str, float]:
        self.made += 1
        if self.made == 2 and self.marker and not Path(self.marker).exists():
            Path(self.marker).touch()
            if self.how == "dies":
                os._exit(7)
            raise ArithmeticError("a bug")
        return {"own/made": self.made, "own/weights": sum(p.sum() for p in policy.parameters())}

    def state_dict(self) -> dict[str, Any]:
        return {"made": self.made}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.made = state["made"]


class Seen(Callback):
    """Callback that records the steps at which results are used, and the metrics of epochs."""

    def __init__(self) -> None:
        self.used: list[int] = []
        self.shown: list[float | None] = []

    def on_evaluation_end(self, run: Any) -> None:
        self.used.append(run.progress.env_steps)
        run.record("noted", run.progress.env_steps)

    def on_epoch_end(self, run: Any) -> None:
        self.shown.append(run.metrics.get("eval/episode_return_mean"))


def counted(**how: Any) -> dict[str, Any]:
    """Return settings with the evaluator `Counted`."""
    return {"evaluation.evaluators": [{"_target_": f"{HERE}.Counted", **how}]}


CALLS: dict[str, Any] = {
    "env": {"_target_": "called_envs.KeptLevelEnv"},
    "callbacks": [{"_target_": "called_envs.Caller", "draws": True}],
}
SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo", {"model.normalization.mode": "running", **counted()}),
    "ppo, steps": (
        "ppo",
        {"algorithm.epoch_length": 4, "evaluation.interval_steps": 50, "total_steps": 448},
    ),
    "interval": ("ppo", {"evaluation.interval": 2, "total_steps": 320}),
    "calls, own states": ("ppo", {**CALLS, "evaluation.concurrency": 1}),
    "sac": ("sac", {}),
    "es": ("es", {"model.normalization.mode": "running"}),
    "impala": ("impala", {"total_steps": 288}),
    "several agents": (
        "ppo",
        {"env": HEAPS, "evaluation.opponents": {"random": "random"}, **counted()},
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_metrics_and_best_policy_are_those_of_evaluation_in_turn(case: str) -> None:
    """Each row contains the results of the weights of its epoch."""
    algorithm, more = SAME[case]
    local = {} if "impala" in case else FORK
    short_run("turns", algorithm, **more, **local)
    short_run("beside", algorithm, **more, **local, **ASYNC)
    assert rows("beside") == rows("turns")
    assert len(rows("turns")) >= 3
    clocks = {"wall_time_s": 0, "steps_per_second": 0}
    assert {**summary("beside"), **clocks} == {**summary("turns"), **clocks}
    for version in ("best", "final"):
        one, other = (load_policy(f"{run}@{version}", trust=TRUST) for run in ("turns", "beside"))
        weights = other.model.state_dict()
        assert all(x.equal(weights[key]) for key, x in one.model.state_dict().items())


@pytest.mark.parametrize("runner", [{}, FORK])
def test_results_are_used_at_the_next_evaluation(runner: dict[str, Any]) -> None:
    """Results are used at the next evaluation and at the end of training, also by callbacks."""
    seen = Seen()
    result = short_run(callbacks=[seen], total_steps=256, **runner, **ASYNC)
    assert seen.used == [128, 192, 256, 256]
    values = [row["eval/episode_return_mean"] for row in result.history]
    assert seen.shown == [None, *values[:2], values[3]]
    assert [row["callback/noted"] for row in rows("run")] == ["128.0", "192.0", "256.0", "256.0"]


def test_patience_and_callbacks_stop_one_evaluation_later() -> None:
    """The last policy is evaluated as well."""
    stop = {"_target_": "maze_train.StopAtReturn", "threshold": -1e9}
    for name, more in (
        ("patience", {"algorithm.patience": 1, "algorithm.lr": 1e-30}),
        ("callback", {"callbacks": [stop]}),
    ):
        turns, beside = (
            short_run(f"{name}{len(own)}", total_steps=640, **FORK, **more, **own)
            for own in ({}, ASYNC)
        )
        assert beside.summary.epochs == turns.summary.epochs + 1
        assert "eval/episode_return_mean" in beside.history[-1]
        assert rows(f"{name}1")[: turns.summary.epochs] == rows(f"{name}0")


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_failed_evaluations(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A failed evaluation ends the run, which can be resumed, or is repeated in a new process."""
    short_run("whole", **FORK, **ASYNC, **counted())
    failing = {**FORK, **ASYNC, **counted(marker=str(Path("marker").absolute()), how=how)}
    problem = "ArithmeticError: a bug" if how == "raises" else "died in an evaluation"
    with pytest.raises(WorkerError, match=problem):
        short_run(**failing)
    assert [row["epoch"] for row in rows("run")] == ["1", "2"]
    go_on(resume="run", trust=TRUST)
    assert rows("run") == rows("whole")
    Path("marker").unlink()
    short_run("restarted", **failing, **{"runner.on_worker_failure": "restart"})
    assert rows("restarted") == rows("whole")
    assert "and the evaluation is repeated" in capsys.readouterr().err


def test_additional_evaluations_leave_the_pending_one_unchanged() -> None:
    """The state of the evaluator is the one without the additional evaluations."""
    model, cpu = nn.Linear(1, 1), torch.device("cpu")
    make_model, processes = partial(nn.Linear, 1, 1), LocalProcesses(start_method="fork")
    with closing(
        BackgroundEvaluator(Counted(), EnvCalls(), make_model, cpu, processes)
    ) as background:
        for epoch in (1, 2, 3):
            background.begin(model, epoch, epoch)
            for _ in range(2):
                assert background.evaluate(model)["own/made"] == epoch + 1
                assert background.state_dict()["state"] == {"made": epoch - 1}
            background.make_calls()
            joined = background.join()
            assert joined is not None
            assert joined[0].epoch == joined[1]["own/made"] == epoch


@pytest.mark.parametrize("moment", everyday(1, ["rollout", "update", "writing", "saving"]))
@pytest.mark.parametrize("more", [{}, {"evaluation.interval": 2}])
def test_killed_runs_repeat_the_pending_evaluation(
    moment: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """Evaluation environments with their own states are restored, too."""
    given = {**FORK, **ASYNC, **CALLS, **more}
    assert run_in_child(settings("ppo", tmp_path / "straight", **given)) == 0
    killed = settings("ppo", tmp_path / "killed", resume="auto", **given)
    call = {"rollout": 50, "update": 17, "writing": 2, "saving": 3}[moment]
    assert run_in_child(killed, moment, call) == -9
    assert run_in_child(killed) == 0
    assert_same_training(tmp_path / "killed", tmp_path / "straight")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"evaluation.n_episodes": 0}, r"asynchronous = True: requires n_episodes > 0"),
        ({"checkpoint.keep_best": 1}, r"checkpoint.keep_best = 1: with evaluation.asynchronous"),
        (
            {"algorithm": "bc", "runner.dataset": "data"},
            r"evaluation.asynchronous = True: bc validates on its dataset",
        ),
        (
            {"evaluation.evaluators": [{"_target_": f"{HERE}.Unsendable"}]},
            r"asynchronous: cannot be sent to a worker process .* or use false",
        ),
    ],
)
def test_settings_that_are_not_supported(more: dict[str, Any], message: str) -> None:
    """The error names the setting."""
    given: dict[str, Any] = {"env": "CartPole-v1", "run_dir": "run", **FORK, **ASYNC, **more}
    with pytest.raises(ConfigError, match=message):
        go_on(**given)


class Unsendable(Counted):
    """Evaluator that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("no")
