"""Runs of evolution strategies that are continued: exactly, wherever members play."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from killed_runs import (
    CALLS,
    CONTEXT,
    MOMENTS,
    assert_equal_runs,
    differences,
    final_state,
    rows_of,
    train_here,
)
from leftovers import left_in
from test_impala_resume import command

from maze_train import load_policy, train
from maze_train.errors import ConfigError
from maze_train.training.interruption import Interrupted, Interruption

OWN = ["own_envs", "own_parts", "test_impala_resume"]
SMALL: dict[str, Any] = {
    "env": "CartPole-v1",
    "algorithm": "es",
    "algorithm.epoch_length": 3,
    "algorithm.n_rollouts_per_update": 4,
    "algorithm.n_epochs": 4,
    "algorithm.max_steps": 30,
    "algorithm.noise_table_size": 5000,
    "runner": "dev",
    "runner.concurrency": 3,
    "evaluation.n_episodes": 2,
    "evaluation.max_episode_steps": 20,
    "checkpoint.keep_last": 4,
    "model.hidden_sizes": [6],
    "seed": 1,
    "total_steps": 0,
    "tracking.progress": "quiet",
    "tracking.plot": False,
    "tracking.tensorboard": False,
}

FORK = {"runner": "local", "runner.start_method": "fork", "runner.n_workers": 2}
DICT_ENV = {"_target_": "own_envs.SpacesEnv", "kwargs": {"obs": "dict", "action": "tuple"}}
NORMALISED = {"model.normalization.mode": "running", "model.normalization.n_steps": 48}

CASES: dict[str, dict[str, Any]] = {
    "CartPole": {},
    "normalised, schedules": {
        "env": {"id": "Pendulum-v1", "max_episode_steps": 20},
        **NORMALISED,
        "algorithm.lr": "linear_0.1",
        "algorithm.noise_stddev": {"points": [[0, 0.5], [8, 0.01]], "by": "updates"},
    },
    "more steps": {
        **NORMALISED,
        "algorithm.n_timesteps_per_update": 150,
        "algorithm.optimizer": {"_target_": "maze_train.SGD", "momentum": 0.8},
        "algorithm.lr": {"points": [[0, 0.5], [900, 0.01]], "by": "env_steps"},
    },
    "sampled": {
        "env": DICT_ENV,
        "algorithm.deterministic": False,
        "algorithm.action_noise_stddev": 0.3,
        "algorithm.optimizer": {"_target_": "torch.optim.Adam", "amsgrad": True},
    },
    "memory": {"model": "vector_rnn", "model.memory.size": 4, **NORMALISED},
    "steps end it": {"total_steps": 700, "algorithm.n_epochs": 0, "algorithm.lr": "linear_0.1"},
}


@pytest.fixture(autouse=True)
def _own_envs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments of the tests of runners."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "runners")


def start(run_dir: Path, **changes: Any) -> Any:
    """A run of four epochs, or of as many as `changes` says."""
    return train(**{**SMALL, "run_dir": run_dir, **changes})


def assert_same_training(run_dir: Path, other: Path) -> None:
    """Every number is the same, but how many steps were made in vain."""
    dropped = "population/steps_dropped"
    rows, others = ([{**row, dropped: ""} for row in rows_of(path)] for path in (run_dir, other))
    assert len(rows) >= 3
    assert rows == others
    state, wanted = ({**final_state(path), "steps_dropped": 0} for path in (run_dir, other))
    assert differences(state, wanted) == []
    weights, best = (load_policy(path).model.state_dict() for path in (run_dir, other))
    assert differences(dict(weights), dict(best)) == []


# -- stopped and continued -----------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_continued(tmp_path, capsys, case):
    """From each of its checkpoints, as if it had not been interrupted; no episode is new."""
    start(tmp_path / "whole", **CASES[case])
    epochs = len(rows_of(tmp_path / "whole"))
    assert epochs >= 3
    for epoch in range(1, epochs):
        run_dir = shutil.copytree(tmp_path / "whole", tmp_path / f"run{epoch}")
        train(trust=OWN, resume=run_dir / "checkpoints" / f"epoch_{epoch:06d}")
        assert_equal_runs(run_dir, tmp_path / "whole")
    assert "new episodes" not in capsys.readouterr().err


@pytest.mark.parametrize("case", ["CartPole", "more steps", "sampled"])
def test_a_finished_run_is_extended(tmp_path, case):
    """With more epochs it goes on as a run that had as many from the beginning."""
    start(tmp_path / "whole", **CASES[case])
    start(tmp_path / "run", **{**CASES[case], "algorithm.n_epochs": 2})
    train(trust=OWN, resume=tmp_path / "run", **{"algorithm.n_epochs": 4})
    assert_equal_runs(tmp_path / "run", tmp_path / "whole")


def test_before_the_first_checkpoint_a_run_begins_again(tmp_path):
    """There is nothing to go on from, so it does all that it did."""
    case = CASES["more steps"]
    start(tmp_path / "whole", **case)
    start(tmp_path / "run", **{**case, "algorithm.n_epochs": 1})
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    train(trust=OWN, resume=tmp_path / "run", **{"algorithm.n_epochs": 4})
    assert_equal_runs(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("case", ["normalised, schedules", "more steps", "memory"])
def test_a_signal_within_an_iteration(tmp_path, monkeypatch, case):
    """The checkpoint is that of the update before; the iteration is played from its beginning."""
    check, calls, stop_at = Interruption.check, [], -1

    def noted(self: Interruption) -> None:
        calls.append(None)
        if len(calls) == stop_at:
            raise Interrupted(signal.SIGINT)
        check(self)

    monkeypatch.setattr(Interruption, "check", noted)
    start(tmp_path / "whole", **CASES[case])
    found, total = [], len(calls)
    for share in (0.2, 0.35, 0.5, 0.65, 0.8):
        calls.clear()
        stop_at = int(share * total)
        run_dir = tmp_path / f"run{share}"
        with pytest.raises(Interrupted) as stop:
            start(run_dir, **CASES[case])
        stop_at = -1
        found.append(json.loads((run_dir / "summary.json").read_text())["updates"])
        assert stop.value.checkpoint is not None
        assert stop.value.checkpoint.is_dir()
        train(trust=OWN, resume=run_dir)
        assert_same_training(run_dir, tmp_path / "whole")
    # Within epochs, not at their ends alone.
    assert any(updates % 3 for updates in found)
    assert found == sorted(found)
    assert 0 < found[0] < found[2] < found[4] < 12


def test_dev_to_local_and_back(tmp_path, capsys):
    """Numbers are those of a run in one process, whatever the place and the number of workers."""
    case = CASES["more steps"]
    start(tmp_path / "whole", **case)
    start(tmp_path / "run", **{**case, "algorithm.n_epochs": 1})
    train(trust=OWN, resume=tmp_path / "run", **FORK, **{"algorithm.n_epochs": 2})
    train(
        trust=OWN,
        resume=tmp_path / "run",
        **{**FORK, "runner.n_workers": 3, "algorithm.n_epochs": 3},
    )
    result = train(trust=OWN, resume=tmp_path / "run", runner="dev", **{"algorithm.n_epochs": 4})
    assert_same_training(tmp_path / "run", tmp_path / "whole")
    dropped = [row["population/steps_dropped"] for row in result.history]
    assert dropped == sorted(dropped)
    assert "new episodes" not in capsys.readouterr().err


def test_what_a_checkpoint_holds(tmp_path):
    """No environment; of the noise table what it follows from."""
    start(tmp_path / "run", **{**CASES["more steps"], "algorithm.n_epochs": 2})
    state = final_state(tmp_path / "run")
    assert state["noise_table"]["count"] == 5000
    assert not {"collector", "env", "envs", "actors"} & state.keys()
    assert state["learners"]["learner"]["weights_seq_no"] == 6
    files = [path for path in (tmp_path / "run" / "checkpoints").rglob("*") if path.is_file()]
    assert 0 < max(path.stat().st_size for path in files) < 50_000


# -- what may not change -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm.noise_table_size": 6000},
        {"seed": 2},
        {"algorithm.n_rollouts_per_update": 6},
        {"algorithm.n_timesteps_per_update": 100},
        {"algorithm.max_steps": 31},
        {"algorithm.noise_stddev": 0.1},
        {"algorithm.lr": 0.5},
        {"algorithm.l2_penalty": 0.0},
        {"algorithm.fitness_shaping": "raw"},
        {"algorithm.deterministic": False},
        {"algorithm.action_noise_stddev": 0.1},
        {"algorithm.max_grad_norm": 0.1},
        {"algorithm.optimizer": {"_target_": "maze_train.SGD"}},
        {"algorithm.policy_wrapper": {"_target_": "torch.nn.Identity"}},
    ],
    ids=str,
)
def test_settings_that_change_numbers_stay(tmp_path, one_epoch, change):
    """Other noise, or another way to use it, is another run."""
    run_dir = shutil.copytree(one_epoch, tmp_path / "run")
    (key,) = change
    with pytest.raises(ConfigError, match=rf"{re.escape(key)}\S* = .*changes its numbers"):
        train(trust=OWN, resume=run_dir, **change, **{"algorithm.n_epochs": 2})


@pytest.fixture(scope="module")
def one_epoch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch."""
    run_dir: Path = tmp_path_factory.mktemp("one") / "run"
    start(run_dir, **{"algorithm.n_epochs": 1})
    return run_dir


# -- killed --------------------------------------------------------------------------------------

PLAYING = {"playing": ("maze_train.training.interruption:Interruption", "check")}
PLAYING_CALLS = {"playing": 20, "update": 3, "evaluation": 10}
"""The trainer looks for signals again and again while members play, here or elsewhere."""


def train_es_here(settings: dict[str, Any], output: str, moment: str, call: int) -> None:
    """Train in this process, which may be killed while members play."""
    MOMENTS.update(PLAYING)
    train_here(settings, output, moment, call)


def run_in_child(settings: dict[str, Any], moment: str = "", call: int = 0) -> int:
    """Train in a child; returns its exit code, which is -9 after SIGKILL."""
    output = f"{settings['run_dir']}.txt"
    child = CONTEXT.Process(target=train_es_here, args=(settings, output, moment, call))
    child.start()
    child.join(120)
    assert child.exitcode in (0, -9), f"exit code {child.exitcode}:\n{Path(output).read_text()}"
    return child.exitcode


@pytest.mark.slow
@pytest.mark.exhaustive
def test_killed_runs_equal_undisturbed_ones(tmp_path):
    """Killed in each phase, continued on dev and local in turn: every number is the same."""
    adam = {"algorithm.optimizer": {"_target_": "maze_train.Adam"}}

    def settings(name: str, place: dict[str, Any]) -> dict[str, Any]:
        own = {**SMALL, **CASES["more steps"], **adam, **place}
        return {**own, "run_dir": str(tmp_path / name), "resume": "auto"}

    assert run_in_child(settings("straight", {})) == 0
    moments = {**PLAYING, **MOMENTS}
    del moments["rollout"]  # that of a collector
    for i, moment in enumerate(moments):
        call = {**CALLS, **PLAYING_CALLS}[moment]
        code = run_in_child(settings("killed", (FORK, {})[i % 2]), moment, call)
        assert code == -9, f"the run was over before it could be killed ({moment})"
    assert run_in_child(settings("killed", FORK)) == 0
    assert_same_training(tmp_path / "killed", tmp_path / "straight")


@pytest.mark.slow
def test_ctrl_c_while_members_play(tmp_path):
    """An episode takes two minutes: the run does not wait for it, saves, and leaves no process."""
    settings = {**SMALL, **FORK, "run_dir": tmp_path / "run", "evaluation.n_episodes": 0}
    marker = tmp_path / "slow"
    del settings["env"]
    settings |= {
        "env._target_": "test_impala_resume.SlowEnv",
        "+env.kwargs.quick": 25,
        "+env.kwargs.marker": marker,
        "model.hidden_sizes": "[6]",
    }
    argv = [f"{key}={value}" for key, value in settings.items()]
    child = CONTEXT.Process(target=command, args=(argv, str(tmp_path / "output.txt")))
    child.start()
    deadline = time.monotonic() + 60
    while not marker.exists() and child.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert child.is_alive(), (tmp_path / "output.txt").read_text()
    os.killpg(child.pid or 0, signal.SIGINT)
    child.join(30)
    output = (tmp_path / "output.txt").read_text()
    assert child.exitcode == 130, output
    assert "maze-run: interrupted" in output
    assert "Traceback" not in output
    assert left_in(child.pid or 0) == {}
    outcome = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert outcome["stop_reason"] == "interrupted"
    assert final_state(tmp_path / "run")["progress"]["env_steps"] == outcome["env_steps"] > 0
