"""Runs of IMPALA that are continued: exactly in one process, with new episodes where actors are."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from killed_runs import (
    CALLS,
    CONTEXT,
    MOMENTS,
    assert_equal_runs,
    final_state,
    maze_run,
    run_in_child,
)
from leftovers import left_in

from maze_train import train
from maze_train.errors import ConfigError

OWN = ["own_envs", "own_parts", "test_impala_resume"]
SMALL: dict[str, Any] = {
    "env": "CartPole-v1",
    "algorithm": "impala",
    "algorithm.epoch_length": 3,
    "algorithm.n_rollout_steps": 8,
    "algorithm.num_actors": 2,
    "algorithm.actors_batch_size": 3,  # epochs begin with either actor
    "algorithm.lr": 0.005,  # a schedule depends on where training ends
    "runner": "dev",
    "runner.concurrency": 4,
    "evaluation.n_episodes": 2,
    "evaluation.max_episode_steps": 20,
    "model.hidden_sizes": [8],
    "seed": 1,
    "total_steps": 4 * 3 * 48,
    "tracking.progress": "quiet",
    "tracking.plot": False,
    "tracking.tensorboard": False,
}
EPOCH = 3 * 48
ROOM = 2 * 3 * 16
"""Steps that the two actors can make before the learner takes them: three rollouts each."""

FORK = {"runner": "local", "runner.start_method": "fork"}
ONE_EPOCH, TWO_EPOCHS, ALL_EPOCHS = ({"algorithm.n_epochs": n} for n in (1, 2, 0))
DICT_ENV = {"_target_": "own_envs.SpacesEnv", "kwargs": {"obs": "dict", "action": "tuple"}}

CASES: dict[str, dict[str, Any]] = {
    "CartPole": {},
    "Dict, old weights": {"env": DICT_ENV, "algorithm.broadcast_interval": 2},
    "memory": {"model": "vector_rnn", "model.memory.size": 8, "algorithm.broadcast_interval": 2},
    "normalised": {
        "env": {"id": "Pendulum-v1", "max_episode_steps": 20},
        "model.normalization.mode": "running",
        "model.normalization.n_steps": 48,
        "algorithm.broadcast_interval": 5,
    },
    "replay": {
        "env": DICT_ENV,
        "model": "vector_rnn",
        "model.memory.size": 8,
        "algorithm.replay_size": 5,
        "algorithm.broadcast_interval": 2,
    },
    "replay of stacks": {
        "env": {
            "_target_": "own_envs.SpacesEnv",
            "wrappers": [{"_target_": "maze_train.ObservationStackWrapper", "n": 3}],
        },
        "algorithm.replay_size": 4,
        "algorithm.replay_proportion": 0.4,
    },
}


@pytest.fixture(autouse=True)
def _own_envs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments of the tests of runners."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "runners")


def start(run_dir: Path, **changes: Any) -> Any:
    """A run of four epochs, or of as many as `changes` says."""
    return train(**{**SMALL, "run_dir": run_dir, **changes})


# -- dev -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_continued(tmp_path, case):
    """From each of its checkpoints, as if it had not been interrupted."""
    start(tmp_path / "whole", **CASES[case], **{"checkpoint.keep_last": 4})
    for epoch in (1, 2, 3):
        run_dir = shutil.copytree(tmp_path / "whole", tmp_path / f"run{epoch}")
        result = train(trust=OWN, resume=run_dir / "checkpoints" / f"epoch_{epoch:06d}")
        assert result.summary.env_steps == 4 * EPOCH
        assert_equal_runs(run_dir, tmp_path / "whole")


def test_a_finished_run_is_extended(tmp_path):
    """With more steps it goes on as a run that had as many from the beginning."""
    start(tmp_path / "whole", **CASES["replay"])
    start(tmp_path / "run", **CASES["replay"], total_steps=2 * EPOCH)
    train(trust=OWN, resume=tmp_path / "run", total_steps=4 * EPOCH)
    assert_equal_runs(tmp_path / "run", tmp_path / "whole")


def test_before_the_first_checkpoint_a_run_begins_again(tmp_path):
    """There is nothing to go on from, so it does all that it did."""
    start(tmp_path / "whole", **CASES["normalised"])
    start(tmp_path / "run", **CASES["normalised"], **ONE_EPOCH)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    train(trust=OWN, resume=tmp_path / "run", **ALL_EPOCHS)
    assert_equal_runs(tmp_path / "run", tmp_path / "whole")


def test_kept_rollouts_are_files_that_checkpoints_share(tmp_path):
    """Each is written once, however many checkpoints hold it, and goes when none does."""
    more = {**CASES["replay"], "algorithm.replay_size": 15, "checkpoint.keep_last": 2}
    start(tmp_path / "run", **more, total_steps=3 * EPOCH)
    found = [
        {path.name: path.stat().st_ino for path in checkpoint.glob("part_*")}
        for checkpoint in sorted((tmp_path / "run" / "checkpoints").glob("epoch_*"))
    ]
    # Nine rollouts an epoch: the oldest nine of the fifteen are others.
    assert [len(parts) for parts in found] == [15, 15]
    assert len(set(found[0].values()) & set(found[1].values())) == 6


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm.num_actors": 4},
        {"algorithm.replay_size": 9},
        {"algorithm.actors_batch_size": 2},
        {"algorithm.vtrace_clip_rho_threshold": None},
    ],
    ids=str,
)
def test_settings_that_change_numbers_stay(tmp_path, change):
    """Another division of the work is another run."""
    start(tmp_path / "run", **ONE_EPOCH)
    (key,) = change
    with pytest.raises(ConfigError, match=rf"{re.escape(key)} = .*changes its numbers"):
        train(trust=OWN, resume=tmp_path / "run", **change, **ALL_EPOCHS)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_killed_runs_equal_undisturbed_ones(tmp_path):
    """Killed in each phase and continued, with memory, replay and old weights: equal bit by bit."""

    def settings(name):
        return {**SMALL, **CASES["replay"], "run_dir": str(tmp_path / name), "resume": "auto"}

    assert run_in_child(settings("straight")) == 0
    for moment in MOMENTS:
        code = run_in_child(settings("killed"), moment, CALLS[moment])
        assert code == -9, f"the run was over before it could be killed ({moment})"
    assert run_in_child(settings("killed")) == 0
    assert_equal_runs(tmp_path / "killed", tmp_path / "straight")


# -- local ---------------------------------------------------------------------------------------


def assert_counted(history: list[dict[str, Any]]) -> None:
    """In every row: what was made was learned from, dropped, or is on its way."""
    for row in history:
        made, dropped = row["actors/steps_made"], row["actors/steps_dropped"]
        assert made == row["env_steps"] + dropped + row["actors/steps_in_flight"]
        assert 0 <= row["actors/steps_in_flight"] <= ROOM


def in_flight_of(run_dir: Path) -> int:
    """The steps that actors had made, and the learner had not got, when a run was saved."""
    counts = final_state(run_dir)["actors"]["counts"]
    return int(counts["made"] - counts["trained"] - counts["dropped"])


def beginnings(directory: Path) -> dict[str, list[float]]:
    """The first observation of each environment that was reset, by file."""
    texts = {path.name: path.read_text() for path in directory.iterdir()}
    return {name: json.loads(text.splitlines()[0])["obs"] for name, text in texts.items() if text}


@pytest.mark.slow
def test_actors_begin_anew(tmp_path, capsys):
    """What was in flight is told and counted, steps go on, and no episode is one of before."""
    from own_parts import diaries  # found there by the fixture of this file

    (tmp_path / "diaries").mkdir()
    env = {"_target_": "own_parts.DiaryEnv", "kwargs": {"directory": str(tmp_path / "diaries")}}
    first = start(tmp_path / "run", env=env, **FORK, **TWO_EPOCHS, **{"evaluation.n_episodes": 0})
    assert first.summary.env_steps == 2 * EPOCH
    in_flight = in_flight_of(tmp_path / "run")
    before = beginnings(tmp_path / "diaries")
    capsys.readouterr()
    result = train(trust=OWN, resume=tmp_path / "run", **ALL_EPOCHS)
    told = re.search(r"and (\d+) steps that were in flight are dropped", capsys.readouterr().err)
    assert told is not None
    assert int(told[1]) == in_flight
    assert [row["epoch"] for row in result.history] == [1, 2, 3, 4]
    assert [row["env_steps"] for row in result.history] == [EPOCH, 2 * EPOCH, 3 * EPOCH, 4 * EPOCH]
    assert_counted(result.history)
    dropped = [row["actors/steps_dropped"] for row in result.history]
    assert dropped == [0, 0, in_flight, in_flight]
    # By the word of the environments themselves.
    happened = sum(count for count, _ in diaries(tmp_path / "diaries"))
    assert 0 <= happened - result.history[-1]["actors/steps_made"] <= 2 * ROOM  # of both runs
    lost = [row.get("train/lost_episodes", 0) for row in result.history]
    after = beginnings(tmp_path / "diaries")
    assert lost == [0, 0, 4, 0]
    assert len(before) == 4
    assert len({tuple(obs) for obs in after.values()}) == len(after) == 8
    # The same seed gives the same episodes in another run, where nothing was resumed.
    other = {"_target_": "own_parts.DiaryEnv", "kwargs": {"directory": str(tmp_path / "other")}}
    (tmp_path / "other").mkdir()
    start(tmp_path / "again", env=other, **ONE_EPOCH, **{"evaluation.n_episodes": 0})
    again = {tuple(obs) for obs in beginnings(tmp_path / "other").values()}
    assert again == {tuple(obs) for obs in before.values()}


@pytest.mark.slow
def test_dev_to_local_and_back(tmp_path, capsys):
    """Steps, counts, learning rate, kept rollouts and weights go on, wherever the actors are."""
    start(tmp_path / "run", **CASES["replay"], **ONE_EPOCH)
    state = final_state(tmp_path / "run")
    result = train(trust=OWN, resume=tmp_path / "run", **FORK, **TWO_EPOCHS)
    assert "the actors begin new episodes\n" in capsys.readouterr().err
    assert_counted(result.history)
    on_local = final_state(tmp_path / "run")
    assert on_local["replay"]["added"] == state["replay"]["added"] + 9
    in_flight = in_flight_of(tmp_path / "run")
    result = train(trust=OWN, resume=tmp_path / "run", runner="dev", **ALL_EPOCHS)
    assert [row["env_steps"] for row in result.history] == [EPOCH, 2 * EPOCH, 3 * EPOCH, 4 * EPOCH]
    assert_counted(result.history)
    assert result.summary.updates == 12
    final = final_state(tmp_path / "run")
    assert final["replay"]["added"] == 4 * 9
    generations = [s["actors"]["generations"] for s in (state, on_local, final)]
    assert generations == [[0, 0], [1, 1], [2, 2]]
    # Nothing is in flight in one process: what was dropped is what local had begun.
    flying = [row["actors/steps_in_flight"] for row in result.history]
    assert flying[0] == flying[2] == flying[3] == 0
    assert result.history[3]["actors/steps_dropped"] == in_flight


class SlowEnv(gymnasium.Env[Any, Any]):
    """Some quick steps; then each takes ten seconds, and a file says that it is under way."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, quick: int, marker: str) -> None:
        self.quick, self.marker = quick, Path(marker)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.quick -= 1
        if self.quick < 0:
            self.marker.touch()
            time.sleep(10.0)
        return np.zeros(2, np.float32), 1.0, self.quick % 5 == 0, False, {}


def command(argv: list[str], output: str) -> None:
    """`maze-run` in a group of processes of its own."""
    os.setsid()
    sys.path[:0] = [str(Path(__file__).parent)]
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    from maze_train.cli import main

    sys.exit(main(argv))


@pytest.mark.slow
def test_ctrl_c_while_the_learner_waits(tmp_path):
    """A rollout takes two minutes: the run does not wait for it, saves, and leaves no process."""
    settings = {**SMALL, **FORK, "run_dir": tmp_path / "run", "evaluation.n_episodes": 0}
    marker = tmp_path / "slow"
    del settings["env"]
    settings |= {
        "env._target_": "test_impala_resume.SlowEnv",
        "+env.kwargs.quick": 25,
        "+env.kwargs.marker": marker,
        "algorithm.epoch_length": 2,
        "algorithm.actors_batch_size": 2,
        "model.hidden_sizes": "[8]",
    }
    argv = [f"{key}={value}" for key, value in settings.items()]
    child = CONTEXT.Process(target=command, args=(argv, str(tmp_path / "output.txt")))
    child.start()
    deadline = time.monotonic() + 60
    while not marker.exists() and child.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    # The learner is done with what came before, and waits.
    time.sleep(1.0)
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
    assert outcome["env_steps"] in (32, 64, 96)
    counts = final_state(tmp_path / "run")["actors"]["counts"]
    assert counts["trained"] == outcome["env_steps"] <= counts["made"]


@pytest.mark.slow
def test_an_environment_that_raises_ends_the_run(tmp_path):
    """With the traceback of the actor, the exit code of a failure, and no process."""
    settings = {**SMALL, **FORK, "run_dir": tmp_path / "run", "model.hidden_sizes": "[8]"}
    del settings["env"]
    settings |= {"env._target_": "own_envs.FaultyEnv", "+env.kwargs.at": 40}
    argv = [f"{key}={value}" for key, value in settings.items()]
    code, output = maze_run(tmp_path / "output.txt", *argv)
    assert code == 1
    assert "RuntimeError: the wheel came off" in output
    assert "own_envs.py" in output
    outcome = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert outcome["stop_reason"] == "error"
