"""Runs of behavioral cloning that are continued: exactly, with the next minibatch."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from killed_runs import assert_equal_runs, rows_of, run_in_child

sys.path.insert(0, str(Path(__file__).parents[1] / "runners"))
from recorded import cartpole_heuristic, record

from maze_train import train
from maze_train.errors import ConfigError

SMALL: dict[str, Any] = {
    "algorithm": "bc",
    "env": "CartPole-v1",
    "algorithm.n_epochs": 4,
    "algorithm.epoch_length": 7,
    "algorithm.batch_size": 16,
    "model.hidden_sizes": [8],
    "model.normalization.mode": "running",
    "evaluation.n_episodes": 2,
    "evaluation.max_episode_steps": 20,
    "checkpoint.keep_last": 4,
    "seed": 1,
    "tracking.progress": "quiet",
    "tracking.plot": False,
    "tracking.tensorboard": False,
}
CASES: dict[str, dict[str, Any]] = {
    "updates that do not divide a pass": {},
    "whole passes, validation only": {"algorithm.epoch_length": 0, "evaluation.n_episodes": 0},
    "schedule, entropy, balanced": {
        "algorithm.lr": "linear_0.01",
        "algorithm.entropy_coef": 0.1,
        "algorithm.class_weights": "balanced",
    },
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten episodes of a heuristic."""
    directory = tmp_path_factory.mktemp("data") / "cartpole"
    return record(directory, gymnasium.make("CartPole-v1"), cartpole_heuristic)


def start(run_dir: Path, data: Path, **changes: Any) -> Any:
    """A run of four epochs."""
    return train(**{**SMALL, "runner.dataset": str(data), "run_dir": run_dir, **changes})


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_continued(tmp_path, data, case):
    """From each of its checkpoints, as if it had not been interrupted."""
    start(tmp_path / "whole", data, **CASES[case])
    assert len(rows_of(tmp_path / "whole")) == 4
    for epoch in range(1, 4):
        run_dir = shutil.copytree(tmp_path / "whole", tmp_path / f"run{epoch}")
        train(resume=run_dir / "checkpoints" / f"epoch_{epoch:06d}")
        assert_equal_runs(run_dir, tmp_path / "whole")


@pytest.mark.parametrize("runners", [("dev", "local"), ("local", "dev")])
def test_on_another_runner(tmp_path, data, runners):
    """Threads that read ahead have read more than was learned from: that does not count."""
    start(tmp_path / "whole", data)
    local = {"runner.n_workers": 2, "algorithm.storage": "disk"}
    changes = {"runner": runners[0], **(local if runners[0] == "local" else {})}
    start(tmp_path / "run", data, **{**changes, "algorithm.n_epochs": 2})
    train(resume=tmp_path / "run", runner=runners[1], **{"algorithm.n_epochs": 4})
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "call"), [("update", 10), ("saving", 2), ("evaluation", 10)])
def test_a_run_that_is_killed(tmp_path, data, moment, call):
    """SIGKILL in the middle: it goes on from its checkpoint to the same end."""
    given = {**SMALL, "runner.dataset": str(data)}
    assert run_in_child({**given, "run_dir": str(tmp_path / "run")}, moment, call) == -9
    again = {**given, "run_dir": str(tmp_path / "run"), "resume": "auto"}
    assert run_in_child(again) == 0
    start(tmp_path / "whole", data)
    assert_equal_runs(tmp_path / "run", tmp_path / "whole")


def test_data_that_moved_and_data_that_changed(tmp_path, data):
    """The same data in another place are fine; others are refused."""
    start(tmp_path / "whole", data)
    start(tmp_path / "run", data, **{"algorithm.n_epochs": 2})
    moved = shutil.copytree(data, tmp_path / "moved")
    more = {"algorithm.n_epochs": 4}
    other = record(tmp_path / "other", gymnasium.make("CartPole-v1"), cartpole_heuristic, 9)
    with pytest.raises(ConfigError, match=r"runner\.dataset.* parts that this run learned from"):
        train(resume=tmp_path / "run", **{**more, "runner.dataset": str(other)})
    train(resume=tmp_path / "run", **{**more, "runner.dataset": str(moved)})
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")


def test_episodes_that_were_added(tmp_path, data, capsys):
    """A run goes on with those that it began with, and says so."""
    own = shutil.copytree(data, tmp_path / "data")
    start(tmp_path / "whole", own)
    start(tmp_path / "run", own, **{"algorithm.n_epochs": 2})
    record(own, gymnasium.make("CartPole-v1"), lambda obs: 0, 5)
    train(resume=tmp_path / "run", **{"algorithm.n_epochs": 4})
    assert_equal_runs(tmp_path / "run", tmp_path / "whole")
    assert "5 episodes were added to the data set since" in capsys.readouterr().err


def test_settings_that_change_numbers(tmp_path, data):
    """They are refused; those that do not are free."""
    start(tmp_path / "run", data, **{"algorithm.n_epochs": 2})
    with pytest.raises(ConfigError, match=r"algorithm\.batch_size"):
        train(resume=tmp_path / "run", **{"algorithm.batch_size": 8})
    free = {"algorithm.storage": "disk", "algorithm.on_damaged": "skip", "algorithm.n_epochs": 3}
    assert train(resume=tmp_path / "run", **free).summary.epochs == 3
