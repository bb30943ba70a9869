"""Runs of SAC that are continued: checkpoints of the replay buffer, and what is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from killed_runs import CONTEXT, assert_equal_runs
from leftovers import left_in

import maze_train.data.replay_memory as replay_memory
from maze_train import Trajectory, UniformReplayBuffer, train
from maze_train.errors import ConfigError, EnvError

if TYPE_CHECKING:
    from pathlib import Path

OWN = ["test_sac_resume"]
SMALL: dict[str, Any] = {
    "env": "CartPole-v1",
    "algorithm": "sac",
    "algorithm.epoch_length": 16,
    "algorithm.n_rollout_steps": 2,
    "algorithm.batch_size": 8,
    "algorithm.initial_buffer_size": 40,
    "algorithm.replay_buffer_size": 200,  # it wraps
    "algorithm.update_to_data_ratio": 0.3,
    "runner.concurrency": 2,
    "evaluation.n_episodes": 2,
    "evaluation.max_episode_steps": 20,
    "model.hidden_sizes": [8],
    "seed": 1,
    "total_steps": 4 * 64,
    "tracking.progress": "quiet",
    "tracking.plot": False,
    "tracking.tensorboard": False,
}
LOCAL = {"runner": "local", "runner.n_workers": 2}
TWO_EPOCHS, ALL_EPOCHS = {"algorithm.n_epochs": 2}, {"algorithm.n_epochs": 0}


def demonstrations(path: str = "") -> list[Trajectory]:
    """One demonstration on CartPole."""
    rng = np.random.default_rng(0)
    obs, actions = rng.normal(size=(8, 4)).astype(np.float32), rng.integers(0, 2, 7)
    return [Trajectory(obs, actions, np.ones(7), terminated=True, truncated=False)]


CASES: dict[str, dict[str, Any]] = {
    "uniform": {},
    "disk": {"algorithm.replay_buffer_storage": "disk"},
    "prioritised": {
        "algorithm.replay_buffer": {"_target_": "maze_train.PrioritizedReplayBuffer"},
        "algorithm.n_step_returns": 3,
    },
    "initial phase": {"algorithm.initial_buffer_size": 150, "algorithm.initial_action_repeat": 7},
    "demonstrations": {
        "algorithm.initial_demonstration_trajectories": {
            "_target_": "test_sac_resume.demonstrations"
        },
        "model.normalization.mode": "running",
        "model.normalization.n_steps": 100,
    },
}


class KeptReplay(UniformReplayBuffer):
    """A replay buffer that can be looked at after a run."""

    last: ClassVar[Any] = None

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        KeptReplay.last = self


KEPT = {"algorithm.replay_buffer": {"_target_": "test_sac_resume.KeptReplay"}}


def start(run_dir: Path, **changes: Any) -> Any:
    """A run of four epochs, or of as many as `changes` says."""
    return train(**{**SMALL, "run_dir": run_dir, **changes})


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings of a case."""
    return CASES[request.param]


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_a_run_that_is_continued(tmp_path, case, epoch):
    """From each of its checkpoints, as if it had not been interrupted."""
    start(tmp_path / "whole", **case, **{"checkpoint.keep_last": 4})
    run_dir = shutil.copytree(tmp_path / "whole", tmp_path / "run")
    result = train(trust=OWN, resume=run_dir / "checkpoints" / f"epoch_{epoch:06d}")
    assert result.summary.env_steps == 256
    assert_equal_runs(run_dir, tmp_path / "whole")
    before, after = (final_parts(path) for path in (tmp_path / "whole", run_dir))
    assert len(after) > 0
    assert after.keys() == before.keys()  # named after their content


@pytest.mark.slow
def test_dev_to_local_and_back(tmp_path):
    """Where the environments are stepped makes no difference."""
    start(tmp_path / "whole")
    start(tmp_path / "run", **LOCAL, **{"algorithm.n_epochs": 1})
    train(trust=OWN, resume=tmp_path / "run", runner="dev", **TWO_EPOCHS)
    train(trust=OWN, resume=tmp_path / "run", **LOCAL, **ALL_EPOCHS)
    assert_equal_runs(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("size", [200, 1000])
def test_a_finished_run_is_extended(tmp_path, size):
    """With more steps it goes on as a run that had as many from the beginning.

    Also where the buffer had room for the steps of the first part only.
    """
    more = {"algorithm.replay_buffer_size": size}
    start(tmp_path / "whole", **more)
    start(tmp_path / "run", total_steps=128, **more)
    assert train(trust=OWN, resume=tmp_path / "run", total_steps=256).summary.env_steps == 256
    assert_equal_runs(tmp_path / "run", tmp_path / "whole")


def test_before_the_first_checkpoint_a_run_begins_again(tmp_path, case):
    """With all that it began with, demonstrations included."""
    start(tmp_path / "whole", **case)
    start(tmp_path / "run", **case, **{"algorithm.n_epochs": 1})
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    train(trust=OWN, resume=tmp_path / "run", **ALL_EPOCHS)
    assert_equal_runs(tmp_path / "run", tmp_path / "whole")


def final_parts(run_dir: Path) -> dict[str, int]:
    """The parts of the last checkpoint of a run."""
    return parts(run_dir / "checkpoints" / "epoch_000004")


# -- files ---------------------------------------------------------------------------------------


def parts(checkpoint: Path) -> dict[str, int]:
    """The inodes of the parts of a checkpoint by name."""
    return {path.name: path.stat().st_ino for path in checkpoint.glob("part_*")}


@pytest.mark.parametrize("is_continued", [False, True])
def test_parts_that_did_not_change_are_shared(tmp_path, monkeypatch, is_continued):
    """They are the same files in both checkpoints, also in a run that is continued."""
    monkeypatch.setattr(replay_memory, "SEGMENT_NBYTES", 8 * 2 * (16 + 8 + 4 + 1))  # 8 rows
    more = {"algorithm.replay_buffer_size": 1000, "checkpoint.keep_last": 4}
    epochs = {"algorithm.n_epochs": 3}
    if is_continued:
        start(tmp_path / "run", **more, **TWO_EPOCHS)
        train(trust=OWN, resume=tmp_path / "run", **epochs)
    else:
        start(tmp_path / "run", **more, **epochs)
    found = [parts(path) for path in sorted((tmp_path / "run" / "checkpoints").glob("epoch_*"))]
    # 32 rows an epoch, and the newest observation in one more.
    assert [len(names) for names in found] == [5, 9, 13]
    for before, after in pairwise(found):
        # Of the segment that was written on, and of the row before it.
        assert len(set(before.values()) & set(after.values())) == len(before) - 2


def test_without_checkpoints_no_buffer_is_written(tmp_path):
    """`checkpoint.interval=0`: nothing of the buffer is on disk, wherever it lies."""
    for storage in ("memory", "disk"):
        more = {"checkpoint.interval": 0, "algorithm.replay_buffer_storage": storage}
        start(tmp_path / storage, **more, **TWO_EPOCHS)
        files = {path.name for path in (tmp_path / storage).rglob("*") if path.is_file()}
        assert files == {
            ".lock", "config.yaml", "metrics.csv", "policy.pt", "score.json", "spaces.json",
            "summary.json",
        }  # fmt: skip


def test_how_large_checkpoints_become_is_told(tmp_path, capsys):
    """Where a run starts, and only if it has any."""
    start(tmp_path / "a", **TWO_EPOCHS)
    assert "checkpoints hold the replay buffer, which grows to " in capsys.readouterr().err
    start(tmp_path / "b", **TWO_EPOCHS, **{"checkpoint.interval": 0})
    assert "replay buffer" not in capsys.readouterr().err


def test_a_buffer_of_another_size_is_refused(tmp_path):
    """By its setting, also if somebody edits the configuration."""
    start(tmp_path / "run", **TWO_EPOCHS)
    with pytest.raises(ConfigError, match=r"replay_buffer_size = 300: checkpoint .* has 200"):
        train(trust=OWN, resume=tmp_path / "run", **{"algorithm.replay_buffer_size": 300})
    config = tmp_path / "run" / "config.yaml"
    config.write_text(
        config.read_text().replace("replay_buffer_size: 200", "replay_buffer_size: 300")
    )
    with pytest.raises(ConfigError, match=r"replay_buffer_size = 300: checkpoint .* has 200"):
        train(trust=OWN, resume=tmp_path / "run")


# -- environments that can not be put back -------------------------------------------------------

NATIVE = {"env": {"id": "CartPole-v1", "backend": "native"}}
CHANCE = {"env": {"_target_": "test_sac_resume.ChanceEnv"}}


class ChanceEnv(gymnasium.Env[Any, Any]):
    """Observations that no seed repeats, and ends that are known: episodes have 7 steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def observe(self) -> Any:
        return np.random.default_rng().standard_normal(2).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.observe(), 1.0, self.t == 7, False, {}


def samples_by_obs(buffer: Any) -> dict[tuple[float, ...], Any]:
    """All samples that a buffer can give, by observation."""
    batch = buffer.sample_batch(60 * len(buffer))
    columns = (batch.obs, batch.rewards, batch.discounts, batch.next_obs)
    found = {}
    for obs, reward, discount, next_obs in zip(*(x.tolist() for x in columns), strict=True):
        found[tuple(obs)] = (reward, discount, next_obs if discount else None)
    return found


@pytest.mark.parametrize("env", [NATIVE, CHANCE], ids=["native", "chance"])
def test_new_episodes_are_not_joined_with_lost_ones(tmp_path, env):
    """What was stored stays as it was: no sample over several steps reaches over the gap."""
    more = {
        **KEPT,
        **env,
        "algorithm.n_step_returns": 3,
        "algorithm.replay_buffer_size": 1000,
        "evaluation.n_episodes": 0,
    }
    start(tmp_path / "run", **more, **TWO_EPOCHS)
    before = samples_by_obs(KeptReplay.last)
    with pytest.raises(EnvError, match=r"checkpoint\.allow_new_episodes=true"):
        train(trust=OWN, resume=tmp_path / "run", **ALL_EPOCHS)
    train(
        trust=OWN, resume=tmp_path / "run", **ALL_EPOCHS, **{"checkpoint.allow_new_episodes": True}
    )
    after = samples_by_obs(KeptReplay.last)
    assert len(before) > 100
    assert len(after) == len(KeptReplay.last) >= 256 > len(before)
    assert {obs: after[obs] for obs in before} == before
    # Episodes end terminal here: only what was the newest row is cut after one step.
    assert sum(discount > 0.985 for _, discount, _ in before.values()) == 2


# -- Ctrl-C --------------------------------------------------------------------------------------


def interrupted_run(argv: list[str], output: str) -> None:
    """`maze-run` in a group of its own, which gets Ctrl-C in the middle of a gradient step."""
    os.setsid()
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    from maze_train.algorithms.sac.learner import SACLearner
    from maze_train.cli import main

    original, calls = SACLearner.compute_loss_for_module, []

    def counted(*args: Any) -> Any:
        calls.append(None)
        if len(calls) == 20:
            print("asked to end", flush=True)
            os.killpg(0, signal.SIGINT)
        return original(*args)

    SACLearner.compute_loss_for_module = counted  # type: ignore[method-assign]
    sys.exit(main(argv))


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["dev", "local"])
def test_ctrl_c_in_a_gradient_step(tmp_path, runner):
    """The update comes to its end and is saved, no process is left, and the run can go on."""
    start(tmp_path / "whole")
    where = LOCAL if runner == "local" else {}
    settings = {**SMALL, "run_dir": tmp_path / "run", "runner": "dev", **where}
    settings["model.hidden_sizes"] = "[8]"
    argv = [f"{key}={value}" for key, value in settings.items()]
    child = CONTEXT.Process(target=interrupted_run, args=(argv, str(tmp_path / "output.txt")))
    child.start()
    child.join(120)
    output = (tmp_path / "output.txt").read_text()
    assert child.exitcode == 130, output
    assert output.count("asked to end") == 1
    assert "maze-run: interrupted" in output
    assert "Traceback" not in output
    assert left_in(child.pid or 0) == {}
    outcome = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert outcome["stop_reason"] == "interrupted"
    assert 0 < outcome["env_steps"] < 256
    train(trust=OWN, resume=tmp_path / "run", runner="dev")
    assert_equal_runs(tmp_path / "run", tmp_path / "whole")
