"""Rollouts that end early or cannot start: kept episodes, messages, clean-up."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import own_envs
import pytest
from rollouts import RANDOM, numbers, play
from short_runs import PPO, SMALL, summary

from maze_train import load_policy, train
from maze_train.core.errors import ConfigError, EnvError
from maze_train.core.signals import Interrupted
from maze_train.data import trajectory_files as trajectory_writer
from maze_train.data.datasets import open_dataset
from maze_train.run.rollout_report import RolloutProgress

pytestmark = pytest.mark.usefixtures("empty_directory")


def test_signal_while_recording_loses_no_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The episode is in all files, and the rollout ends."""
    add = trajectory_writer.TrajectoryWriter.add

    def interrupted(self: Any, trajectory: Any) -> None:
        add(self, trajectory)
        if trajectory.seed == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(trajectory_writer.TrajectoryWriter, "add", interrupted)
    with pytest.raises(Interrupted):
        play(**RANDOM, record=True, **{"runner.concurrency": 1})
    assert list(open_dataset("out/trajectories").seeds) == numbers() == [0, 1]
    assert summary("out")["stop_reason"] == "interrupted"


class FirstIsLong(own_envs.SpacesEnv):
    """Environment whose episode of seed 0 does not terminate, unlike other episodes."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode and store its seed."""
        self.seed = seed
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        """Step; do not terminate the episode of seed 0."""
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated and self.seed != 0, truncated, info


@pytest.mark.parametrize("how", ["signal", "error"])
def test_waiting_episodes_are_written_once_in_order(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and recordings are written once, in order."""
    made = []

    def end(self: RolloutProgress, count: int) -> None:
        before = sum(made)
        made.append(count)
        if before < 400 <= sum(made):  # when all other episodes are done
            if how == "error":
                raise EnvError("enough")
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(RolloutProgress, "steps", end)
    with pytest.raises(EnvError if how == "error" else Interrupted):
        play(policy="random", env=FirstIsLong, n_episodes=17, record=True)
    assert numbers() == list(open_dataset("out/trajectories").seeds) == list(range(1, 16))
    assert summary("out")["episodes"] == 15
    assert summary("out")["stop_reason"] == ("error" if how == "error" else "interrupted")


def test_output_directory_with_results_raises() -> None:
    """Output directories with episodes or videos raise an error."""
    for name in ("trajectories", "videos"):
        Path("out", name).mkdir(parents=True)
        with pytest.raises(ConfigError, match=rf"out': already contains results \({name}\)"):
            play(**RANDOM)
        Path("out", name).rmdir()
    for place in ("first", "out"):
        play(**RANDOM, record=True, record_dir="out/trajectories", output_dir=place)
    assert len(open_dataset("out/trajectories")) == 10


def test_load_policy_function_plays_like_the_run() -> None:
    """`deterministic` and space checks apply to policies from `load_policy`."""
    train(env="CartPole-v1", **{**SMALL, **PPO}, run_dir="run")
    targets = {
        "policy": {"_target_": "maze_train.load_policy", "run_dir": "run"},
        "model": {"_target_": "test_rollout_ends.load_model", "run_dir": "run"},
    }
    for deterministic in (True, False):
        play(run="run", deterministic=deterministic, output_dir=f"run{deterministic}")
        for name, policy in targets.items():
            where = f"{name}{deterministic}"
            chance = {"deterministic": deterministic, "output_dir": where}
            play(policy=policy, env="CartPole-v1", **chance)
            files = [Path(x, "evaluation.csv").read_bytes() for x in (where, f"run{deterministic}")]
            assert files[0] == files[1]
            assert summary(where)["deterministic"] is deterministic
    with pytest.raises(ConfigError, match="its observation_space is"):
        play(policy=targets["policy"], env="Acrobot-v1")
    assert not Path("out").exists()


def load_model(run_dir: str) -> Any:
    """Return the model of a run, without spaces."""
    return load_policy(run_dir).model
