"""SAC that begins with recorded episodes in its replay buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import pytest
from recorded import record

from maze_train import train
from maze_train.data.trajectory_store import open_dataset
from maze_train.errors import ConfigError

if TYPE_CHECKING:
    from maze_train.data.trajectory_store import TrajectoryDataset

QUIET: dict[str, Any] = {
    "tracking.progress": "quiet",
    "tracking.plot": False,
    "tracking.tensorboard": False,
    "seed": 3,
}


def test_demonstrations_from_a_data_set(tmp_path):
    """SAC begins with recorded transitions in its buffer: `algorithm=sacfd`."""
    data = record(tmp_path / "data", gymnasium.make("Pendulum-v1"), n_episodes=4)
    given: dict[str, Any] = {
        "algorithm": "sacfd",
        "algorithm.initial_demonstration_trajectories": str(data),
        "algorithm.initial_buffer_size": 64,
        "algorithm.batch_size": 8,
        "algorithm.replay_buffer_size": 1000,
        "model.hidden_sizes": [8],
        "runner.concurrency": 2,
        "evaluation.n_episodes": 0,
        "total_steps": 40,
    }
    result = train(env="Pendulum-v1", run_dir=tmp_path / "run", **given, **QUIET)
    assert result.history[0]["train/gradient_steps"] > 0  # the buffer was full enough at once
    with pytest.raises(
        ConfigError, match=r"has the observation space Box\(shape=\[3\], dtype=float32\), the env"
    ):
        train(env="MountainCarContinuous-v0", run_dir=tmp_path / "no", **given, **QUIET)
    del given["algorithm.initial_demonstration_trajectories"]
    with pytest.raises(ConfigError, match="initial_demonstration_trajectories"):
        train(env="Pendulum-v1", run_dir=tmp_path / "no", **given, **QUIET)
    assert np.isfinite(result.history[-1]["train/critic_loss"])


def given_dataset(directory: str) -> TrajectoryDataset:
    """What a setting may name: a data set."""
    return open_dataset(directory)


def no_dataset() -> int:
    """What a setting may name by mistake."""
    return 3


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            {"_target_": "test_recorded_demonstrations.given_dataset"},
            "it has the observation space Box",
        ),
        (
            {"_target_": "test_recorded_demonstrations.no_dataset"},
            "returned int: expected a TrajectoryData",
        ),
        ("nowhere", "nowhere"),
        ({"_target_": "test_recorded_demonstrations.no_such"}, r"\._target_ = .*has no 'no_such'"),
    ],
)
def test_demonstrations_that_are_none(tmp_path, node, message):
    """Errors have the key of the setting, and other spaces are told in short."""
    if isinstance(node, dict) and "given" in node["_target_"]:
        data = record(tmp_path / "data", gymnasium.make("Pendulum-v1"), n_episodes=1)
        node = {**node, "directory": str(data)}
    key = "algorithm.initial_demonstration_trajectories"
    given = {"algorithm": "sacfd", key: node, "run_dir": tmp_path / "run", **QUIET}
    with pytest.raises(ConfigError, match=message) as caught:
        train(env="MountainCarContinuous-v0", **given)
    assert str(caught.value).startswith(key)
    assert not (tmp_path / "run").exists()
