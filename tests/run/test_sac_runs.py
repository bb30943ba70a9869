"""Runs of SAC: stored data, reports and errors."""

from __future__ import annotations

import math
import os
import sys
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import own_parts
import pytest
from own_parts import AlwaysFirst, KeptReplay, diaries
from recorded import record
from short_runs import FORK, QUIET, everything, rows, settings, short_run

import maze_train.algorithms.off_policy.trainer as off_policy
import maze_train.data.replay_memory as replay_columns
from maze_train import Statistics, load_config, train
from maze_train.core.errors import ConfigError, TrainingError
from maze_train.data.datasets import open_dataset
from maze_train.run.build import build_run

if TYPE_CHECKING:
    from pathlib import Path

    from maze_train.data.trajectory_dataset import TrajectoryDataset

PRIORITISED = "maze_train.PrioritizedReplayBuffer"
SHOWN = "algorithm.initial_demonstration_trajectories"
KEPT = {"_target_": "own_parts.KeptReplay"}
SOME = {"_target_": "own_parts.demonstrations"}


pytestmark = pytest.mark.usefixtures("empty_directory")


def sac_run(run_dir: str | None = "run", **overrides: Any) -> Any:
    """Run SAC on a toy environment for a few steps."""
    return short_run(run_dir, "sac", **overrides)


# -- what is stored ------------------------------------------------------------------------------


def env_actions(policy: Any, actions: Any) -> np.ndarray[Any, Any]:
    """Return stored actions as passed to the environment, one row each."""
    given = policy.model.distribution.to_env(actions)
    parts = given.values() if isinstance(given, dict) else [given]
    arrays = [np.asarray(part, np.float64) for part in parts]
    return np.concatenate([array.reshape(len(array), -1) for array in arrays], axis=1)


@pytest.mark.parametrize(
    ("runner", "concurrency", "action", "size"),
    [
        ("dev", 1, "tuple", 60),
        ("dev", 3, "box", 1000),
        pytest.param("local", 3, "box", 60, marks=pytest.mark.exhaustive),
    ],
)
def test_replay_buffer_stores_environment_transitions(
    tmp_path: Path, runner: str, concurrency: int, action: str, size: int
) -> None:
    """Stored transitions equal transitions of the environments."""
    (tmp_path / "diaries").mkdir()
    kwargs = {"directory": str(tmp_path / "diaries"), "action": action}
    workers = {"runner.n_workers": min(concurrency, 2)}
    result = sac_run(
        env={"_target_": "own_parts.DiaryEnv", "kwargs": kwargs},
        **({**FORK, **workers} if runner == "local" else {}),
        **{
            "runner.concurrency": concurrency,
            "algorithm.replay_buffer": KEPT,
            "algorithm.replay_buffer_size": size,
            "algorithm.gamma": 0.9,
            "evaluation.n_episodes": 0,
            "total_steps": 180,
        },
    )
    buffer = KeptReplay.made[-1]
    happened = [diary for count, diary in diaries(tmp_path / "diaries") if count]
    steps = result.summary.env_steps
    assert sum(map(len, happened)) == steps >= 180
    assert len(happened) == concurrency
    assert len(buffer) == min(size, steps)
    # The buffer contains the last transitions of each environment.
    kept = len(buffer) // concurrency
    expected = {obs: told for diary in happened for obs, told in list(diary.items())[-kept:]}
    batch = buffer.sample_batch(40 * len(buffer))
    _, first = np.unique(batch.indices.numpy(), return_index=True)
    assert len(first) == len(expected) == len(buffer)
    actions = env_actions(result.policy, batch.actions)
    found = {tuple(batch.obs[i].tolist()) for i in first}
    assert found == expected.keys()
    for i in first:
        told_action, reward, discount, next_obs = expected[tuple(batch.obs[i].tolist())]
        np.testing.assert_allclose(actions[i], told_action, rtol=1e-5, atol=1e-6)
        assert batch.rewards[i] == np.float32(reward)
        assert batch.discounts[i] == np.float32(discount)
        assert not discount or batch.next_obs[i].tolist() == next_obs
    assert {told[2] for told in expected.values()} == {0.0, 0.9}


# -- the initial phase ---------------------------------------------------------------------------


def test_initial_sampling_policy_acts_first() -> None:
    """`initial_sampling_policy` acts until the buffer is large enough."""
    AlwaysFirst.seen.clear()
    node = {"_target_": "own_parts.AlwaysFirst", "action": 1}
    sac_run(
        **{
            "algorithm.initial_sampling_policy": node,
            "algorithm.initial_buffer_size": 64,
            "algorithm.epoch_length": 8,
            "algorithm.replay_buffer": KEPT,
        }
    )
    assert AlwaysFirst.seen == [2] * 32
    rewards = np.array([float(row["train/episode_return_mean"]) for row in rows("run")])
    assert rewards[0] == 5.0  # five steps of the action 1
    assert (rewards[1:] < 5.0).all()


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"algorithm.initial_buffer_size": 20}, 24),
        ({"algorithm.initial_buffer_size": 1, "algorithm.n_rollout_steps": 64}, 128),
        ({"algorithm.update_to_data_ratio": 0.03125}, 56),
        ({SHOWN: {**SOME, "n_episodes": 3}, "algorithm.initial_buffer_size": 1}, 8),
    ],
)
def test_updates_are_complete_after_few_steps(changes: dict[str, Any], steps: int) -> None:
    """Updates are complete and learn from earlier updates."""
    with pytest.raises(ConfigError, match=rf"total_steps = {steps}: .* after {steps} environment"):
        sac_run(total_steps=steps, **changes)
    result = sac_run(total_steps=steps + 1, **changes)
    assert "train/critic_loss" in result.history[-1]


def loss_of_weights(learner: Any, module_id: str, batch: Any, statistics: Any, after: int) -> Any:
    """Return a loss without TD errors from a gradient step on."""
    if learner.gradient_steps < after:
        return learner.compute_loss_for_module(module_id, batch, statistics)
    return sum(weight.square().sum() for weight in learner.modules[module_id].policy.parameters())


@pytest.mark.parametrize("after", [0, 2])
def test_prioritized_replay_requires_td_errors(after: int) -> None:
    """Prioritized replay raises an error if a loss reports no errors."""
    own = {"_target_": f"{__name__}.loss_of_weights", "after": after}
    with pytest.raises(TrainingError, match=r'keep\("td_errors", .*replay_buffer=uniform'):
        sac_run(**{BUFFER: {"_target_": PRIORITISED}, "algorithm.loss_function": own})


# -- demonstrations ------------------------------------------------------------------------------


def test_partial_demonstration_is_not_joined() -> None:
    """A partial demonstration is not joined with the following steps."""
    shown = {"_target_": "own_parts.demonstrations", "n_episodes": 3}
    config = load_config(
        {**settings("sac"), SHOWN: shown, "algorithm.n_step_returns": 3, "algorithm.gamma": 0.5}
    )
    with build_run(config) as run:
        trainer: Any = run.trainer
        for _ in range(3):
            trainer.update_once(trainer.progress(), Statistics())
        batch = trainer.replay_buffers["default"].sample_batch(3000)
    is_second = (batch.obs == 0.25).all(1)
    assert batch.next_obs[is_second].unique().tolist() == [0.25]
    # Over two steps and one step before the truncation, and one step after it.
    assert batch.rewards[is_second].unique().tolist() == [101.0, 151.5]


def test_resume_does_not_require_demonstrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resuming does not require the demonstrations."""
    shown = {"_target_": "own_parts.demonstrations", "n_episodes": 3}
    sac_run(**{SHOWN: shown})
    monkeypatch.delattr(own_parts, "demonstrations")
    again = train(resume="run", total_steps=224, trust=["own_envs", "own_parts"])
    assert again.summary.env_steps == 224


def test_sacfd_starts_with_recorded_transitions(tmp_path: Path) -> None:
    """`algorithm=sacfd` starts with recorded transitions."""
    data = record(tmp_path / "data", gymnasium.make("Pendulum-v1"), n_episodes=4)
    given: dict[str, Any] = {
        "algorithm": "sacfd",
        SHOWN: str(data),
        "algorithm.initial_buffer_size": 64,
        "algorithm.batch_size": 8,
        "algorithm.replay_buffer_size": 1000,
        "model.hidden_sizes": [8],
        "runner.concurrency": 2,
        "evaluation.n_episodes": 0,
        "total_steps": 40,
    }
    result = train(env="Pendulum-v1", run_dir=tmp_path / "run", **given, **QUIET, seed=3)
    assert result.history[0]["train/gradient_steps"] > 0  # the buffer is large enough at the start
    del given[SHOWN]
    with pytest.raises(ConfigError, match="initial_demonstration_trajectories"):
        train(env="Pendulum-v1", run_dir=tmp_path / "no", **given, **QUIET, seed=3)
    assert np.isfinite(result.history[-1]["train/critic_loss"])


def given_dataset(directory: str) -> TrajectoryDataset:
    """Return a dataset."""
    return open_dataset(directory)


def no_dataset() -> int:
    """Return a value that is not a dataset."""
    return 3


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": "test_sac_runs.given_dataset"}, "the dataset has the observation space Box"),
        ({"_target_": "test_sac_runs.no_dataset"}, "returned int: expected a TrajectoryData"),
        ("nowhere", "nowhere"),
        ({"_target_": "test_sac_runs.no_such"}, r"\._target_ = .*has no 'no_such'"),
    ],
)
def test_invalid_demonstrations_raise(tmp_path: Path, node: Any, message: str) -> None:
    """Errors contain the key of the setting and differences of spaces."""
    if isinstance(node, dict) and "given" in node["_target_"]:
        data = record(tmp_path / "data", gymnasium.make("Pendulum-v1"), n_episodes=1)
        node = {**node, "directory": str(data)}
    given = {"algorithm": "sacfd", SHOWN: node, "run_dir": tmp_path / "run", **QUIET, "seed": 3}
    with pytest.raises(ConfigError, match=message) as caught:
        train(env="MountainCarContinuous-v0", **given)
    assert str(caught.value).startswith(SHOWN)
    assert not (tmp_path / "run").exists()


# -- what is refused -----------------------------------------------------------------------------

BUFFER = "algorithm.replay_buffer"


@pytest.mark.parametrize(
    ("storage", "remedy", "total_steps", "held"),
    [
        ("memory", "storage=disk", 185, 192),
        ("device", "storage=disk", 0, 1000),
        ("disk", "set run_dir", 185, 192),
    ],
)
def test_replay_buffer_beyond_memory_raises(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    storage: str,
    remedy: str,
    total_steps: int,
    held: int,
) -> None:
    """The final size is checked before allocation, to the byte."""
    # Rows of three floats, one action, one reward and flags, plus one row for the newest.
    needed = (held + 2) * (12 + 8 + 4 + 1)
    free = [needed - 1]
    for name in ("available_memory", "available_disk"):
        monkeypatch.setattr(off_policy, name, lambda place, processes: free[0])
    settings: dict[str, Any] = {
        "algorithm.replay_buffer_storage": storage,
        "total_steps": total_steps,
        "algorithm.n_epochs": 3,
    }
    size = rf"algorithm\.replay_buffer_size = 1000: .* {needed / 1000:.1f} kB .*reduce this"
    with pytest.raises(ConfigError, match=f"{size}.*{remedy}"):
        sac_run(**settings)
    assert everything(tmp_path) == []
    free[0] = needed
    assert sac_run(**settings).summary.env_steps == 192


@pytest.mark.skipif(sys.platform != "linux", reason="files may be sparse elsewhere")
def test_replay_buffer_is_limited_by_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size is limited by `total_steps` and demonstrations, and grows on extension."""
    taken: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda file, offset, size: taken.append(size))
    shown = {SHOWN: {"_target_": "own_parts.demonstrations", "n_episodes": 2}}
    expected = {192: ({}, "run"), 192 + 6 + 2: (shown, "shown")}
    for held, (more, run_dir) in expected.items():
        sac_run(run_dir, **{"algorithm.replay_buffer_storage": "disk", **more})
        assert sorted(taken) == [(held + 2) * 8, (held + 2) * 12]  # actions, observations
        taken.clear()
    train(resume="run", total_steps=400, trust=["own_envs", "own_parts"])
    assert sorted(taken) == [402 * 8, 402 * 12]
    taken.clear()
    train(resume="shown", total_steps=400, trust=["own_envs", "own_parts"])
    assert sorted(taken) == [1002 * 8, 1002 * 12]


def test_required_memory_includes_priorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """The required memory includes priorities and is small for short runs."""
    monkeypatch.setattr(off_policy, "available_memory", lambda device, processes: (192 + 2) * 25)
    with pytest.raises(ConfigError, match=r"algorithm\.replay_buffer_size = 1000: .*are free"):
        sac_run("prioritised", **{BUFFER: {"_target_": PRIORITISED}})
    monkeypatch.setattr(off_policy, "available_memory", lambda device, processes: 500)
    settings = {"algorithm.initial_buffer_size": 1, "runner.concurrency": 3}
    settings["algorithm.n_rollout_steps"] = 2
    assert sac_run("short", total_steps=7, **settings).summary.env_steps == 12


def test_disk_errors_name_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the disk name the setting."""

    def refuse(dir: Path) -> Any:
        assert dir == tmp_path
        raise PermissionError("Permission denied")

    monkeypatch.setattr(replay_columns, "TemporaryFile", refuse)
    with pytest.raises(ConfigError, match=r"replay_buffer_storage = 'disk': .*Permission denied"):
        sac_run("some/where", **{"algorithm.replay_buffer_storage": "disk"})
    assert everything(tmp_path) == []


# -- metrics -------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["box", "tuple"])
def test_metrics_are_plausible(action: str) -> None:
    """Metrics of SAC have plausible values."""
    env = {"_target_": "own_envs.SpacesEnv", "kwargs": {"action": action}}
    result = sac_run(env=env, **{"algorithm.replay_buffer_size": 100})
    row = result.history[-1]
    assert row["replay/size"] == 100
    # One gradient step per four transitions after the initial phase.
    steps = sum(float(r.get("train/gradient_steps") or 0) for r in result.history)
    assert steps == (192 - 32) // 4
    assert row["replay/samples_per_transition"] == pytest.approx(steps * 8 / (192 - 8))
    assert row["train/policy_entropy"] <= 2 * math.log(2)  # uniform in [-1, 1] and over 2 choices
    target = {"box": -2.0, "tuple": -1.0 + 0.98 * math.log(2)}[action]
    assert row["train/target_entropy"] == pytest.approx(target, rel=1e-6)
    assert 0.9 < row["train/entropy_coef"] < 1.0  # decreases, since the entropy is above its target
    assert row["train/critic_spread"] > 0
    assert row["train/learning_rate"] == pytest.approx(3e-4)
    assert 0 < row["time/sample_s"] < row["time/update_s"]


def test_warm_up_steps_count_in_total_steps() -> None:
    """Warm-up steps are included in `total_steps`."""
    result = sac_run(total_steps=33)
    assert result.history[-1]["env_steps"] == result.summary.env_steps == 40
