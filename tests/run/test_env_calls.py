"""Environment calls by callbacks: identical on every runner and after resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from called_envs import LevelEnv
from cases import everyday
from killed_runs import differences, final_state
from recorded import record
from run_cases import ALGORITHMS, FORK, LOCAL, SMALL, TWO_EPOCHS, go_on
from short_runs import rows, short_run, summary

from maze_train import Callback, CallbackError, ConfigError, train
from maze_train.core.errors import EnvError

LEVELS: dict[str, Any] = {"env": {"_target_": "called_envs.LevelEnv"}}
KEPT: dict[str, Any] = {"env": {"_target_": "called_envs.KeptLevelEnv"}}
SIMULATOR = {"env": {"_target_": "called_envs.LevelSimulator", "backend": "tensor"}}
TRUST = ["called_envs"]
TRAIN_RETURN = "train/episode_return_mean"

CASES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "ppo, own states that draw": {**KEPT, "draws": True},
    "ppo, actors": {"runner.envs_per_actor": 1},
    "sac": {},
    "es": {},
    "es, own states": {**KEPT, "draws": True},
    "impala": {},
    "ppo, simulator": SIMULATOR,
}


def settings(case: str, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Return settings of a run of four epochs with a callback."""
    algorithm, own = case.partition(",")[0], dict(CASES[case])
    caller = {"_target_": "called_envs.Caller", "draws": own.pop("draws", False)}
    given = {**SMALL, **LEVELS, "algorithm": algorithm, **ALGORITHMS[algorithm], **own}
    return {**given, "callbacks": [caller], "run_dir": str(run_dir), **changes}


class CallOnce(Callback):
    """Callback that calls the environments in one of its methods."""

    def __init__(self, hook: str, *call: Any, **how: Any) -> None:
        self.hook, self.call, self.how = hook, call, how
        self.first_epoch = 0

    def _called(self, hook: str, run: Any) -> None:
        if hook == self.hook and run.progress.epoch >= self.first_epoch:
            run.call_envs(*self.call, **self.how)

    def on_run_start(self, run: Any) -> None:
        self._called("on_run_start", run)

    def on_rollout_end(self, run: Any) -> None:
        self._called("on_rollout_end", run)

    def on_update_end(self, run: Any) -> None:
        self._called("on_update_end", run)

    def on_evaluation_end(self, run: Any) -> None:
        self._called("on_evaluation_end", run)

    def on_epoch_end(self, run: Any) -> None:
        self._called("on_epoch_end", run)

    def on_checkpoint(self, run: Any) -> None:
        self._called("on_checkpoint", run)


@pytest.mark.usefixtures("empty_directory")
@pytest.mark.parametrize("algorithm", ["ppo", "es"])
def test_call_envs_reaches_evaluation_environments_on_request(algorithm: str) -> None:
    """Evaluation environments are called only with `evaluate=True`."""
    found = {}
    for evaluate in (False, True):
        caller = CallOnce("on_run_start", "set_level", 1000.0, evaluate=evaluate)
        name = f"run_{evaluate}"
        short_run(name, algorithm=algorithm, callbacks=[caller], **LEVELS)
        found[evaluate] = rows(name)[0]
    assert all(float(row["train/episode_return_mean"]) < -3000 for row in found.values())
    assert float(found[True]["eval/episode_return_mean"]) < -3000
    assert float(found[False]["eval/episode_return_mean"]) > -300


@pytest.mark.usefixtures("empty_directory")
@pytest.mark.parametrize(
    ("hook", "call", "error", "message"),
    [
        ("on_update_end", ("jump",), ConfigError, "run.call_envs = 'jump': LevelEnv and its wrap"),
        ("on_update_end", ("fail",), EnvError, "ZeroDivisionError: no such floor"),
        ("on_update_end", ("draw_level",), ConfigError, "samples from the random generator"),
        ("on_update_end", ("keep", object), CallbackError, r"args\[0\] is type"),
        ("on_checkpoint", ("keep", []), CallbackError, "not available in on_checkpoint, because"),
    ],
)
def test_failing_calls_end_the_run(hook: str, call: Any, error: Any, message: str) -> None:
    """Failed calls end the run before the next rollout or in the callback."""
    with pytest.raises(error, match=message):
        short_run(callbacks=[CallOnce(hook, *call)], **LEVELS)


RESTART = {"runner.on_worker_failure": "restart"}
FAILING: dict[str, tuple[dict[str, Any], str, str]] = {
    "ppo": ({}, "on_epoch_end", "fail"),
    "ppo, evaluation": ({"evaluation.interval": 4}, "on_epoch_end", "louder"),
    "ppo, actors": ({"runner.envs_per_actor": 1}, "on_epoch_end", "fail"),
    "es": ({}, "on_epoch_end", "jump"),
    "sac": ({}, "on_epoch_end", "fail"),
    "impala, processes": ({**FORK, **RESTART}, "on_epoch_end", "fail"),
    "ppo, processes": (LOCAL, "on_epoch_end", "jump"),
    "es, processes": ({**LOCAL, **RESTART}, "on_epoch_end", "fail"),
    "impala": ({}, "on_evaluation_end", "fail"),
    "bc": ({}, "on_epoch_end", "fail"),
}


@pytest.mark.usefixtures("empty_directory")
@pytest.mark.parametrize("case", everyday(6, FAILING))
def test_checkpoints_contain_no_failed_call(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Checkpoints contain no failed call, so a corrected run continues.

    A worker is restarted once, since another restart would not help.
    """
    how, hook, method = FAILING[case]
    algorithm = case.partition(",")[0]
    given = {**SMALL, **LEVELS, "algorithm": algorithm, **ALGORITHMS[algorithm], **how}
    if algorithm == "bc":
        given["runner.dataset"] = str(record(Path("data"), LevelEnv()))
    if case == "ppo, evaluation":
        given["env"] = {**LEVELS["env"], "training_wrappers": [{"_target_": "called_envs.Louder"}]}
    caller = CallOnce(hook, method, evaluate=algorithm == "bc" or "evaluation" in case)
    caller.first_epoch = 1
    with pytest.raises((ConfigError, EnvError), match=r"jump|louder|no such floor"):
        train(**given, callbacks=[caller], run_dir="run")
    assert capsys.readouterr().err.count("it is restarted") <= 2  # one per worker
    caller.call = ("set_level", 1.0)
    assert go_on(resume="run", callbacks=[caller], trust=TRUST).summary.epochs == 4


@pytest.mark.usefixtures("empty_directory")
def test_calls_in_on_run_start_have_no_effect_in_resumed_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Calls in `on_run_start` are in the checkpoint and not repeated."""
    caller = CallOnce("on_run_start", "set_level", 1)
    short_run(callbacks=[caller], **LEVELS, **TWO_EPOCHS)
    assert "no effect" not in capsys.readouterr().err
    go_on(resume="run", callbacks=[caller], trust=TRUST, **{"algorithm.n_epochs": 3})
    assert (
        "run.call_envs (set_level) in on_run_start has no effect in a resumed run"
        in capsys.readouterr().err
    )


@pytest.mark.usefixtures("empty_directory")
def test_checkpoint_of_the_first_update_contains_calls_at_the_start() -> None:
    """Calls at the start are in the checkpoint of the first update."""
    env = {"_target_": "called_envs.InterruptsOnce", "kwargs": {"marker": "stopped"}}
    caller = CallOnce("on_run_start", "keep", [])
    with pytest.raises(KeyboardInterrupt):
        short_run(algorithm="es", env=env, callbacks=[caller])
    assert summary("run")["updates"] == 0
    go_on(resume="run", callbacks=[caller], trust=TRUST)
    assert len(final_state(Path("run"))["env_calls"]["training"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", everyday(1, ["ppo", "ppo, actors", "es"]))
def test_workers_that_die_in_a_call_are_restarted(case: str, tmp_path: Path) -> None:
    """Workers are restarted, and results are unchanged."""
    marker = tmp_path / "died"
    env = {"_target_": "called_envs.LevelEnv", "kwargs": {"marker": str(marker)}}
    how = {**LOCAL, "runner.on_worker_failure": "restart"}
    train(**settings(case, tmp_path / "restarted", env=env, **how))
    assert marker.exists()
    train(**settings(case, tmp_path / "straight", env=env))
    states = [final_state(tmp_path / name)["learners"] for name in ("restarted", "straight")]
    assert differences(*states) == []


NATIVE = {"_target_": "called_envs.level_vector", "backend": "native"}
RUNNING = {"model.normalization.mode": "running"}


@pytest.mark.parametrize(
    "given",
    [
        {"algorithm": "impala", "runner": "local", "runner.start_method": "fork"},
        {"algorithm": "impala", **RUNNING},
        {"algorithm": "es", **RUNNING},
        {"algorithm": "ppo", "env": NATIVE, "evaluation.n_episodes": 0},
    ],
    ids=["actors at their own pace", "impala", "es", "third-party vector environments"],
)
@pytest.mark.usefixtures("empty_directory")
def test_calls_reach_training_environments(given: dict[str, Any]) -> None:
    """Calls affect rewards also for runs that are not reproducible."""
    settings = {**SMALL, **LEVELS, **ALGORITHMS[given["algorithm"]], **given, "run_dir": "run"}
    caller = CallOnce("on_update_end", "set_level", 1000.0)
    result = train(**settings, callbacks=[caller], **{"evaluation.metric": TRAIN_RETURN})
    assert result.history[-1]["train/episode_return_mean"] < -3000
