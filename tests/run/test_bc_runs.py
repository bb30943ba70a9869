"""Runs of behavioral cloning: spaces, model selection, datasets, errors."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from own_envs import ACTION_SPACES, SpacesEnv, mask_of
from recorded import cartpole_heuristic, record
from short_runs import QUIET, rows
from torch import nn

from maze_train import load_policy, train
from maze_train.algorithms.bc.config import BCAlgorithmConfig
from maze_train.core.errors import ConfigError, DatasetError
from maze_train.data.trajectory_dataset import TrajectoryDataset
from maze_train.nets.policy_model import build_policy
from maze_train.training.config import EvaluationConfig

SMALL: dict[str, Any] = {
    "algorithm": "bc",
    "algorithm.n_epochs": 3,
    "algorithm.batch_size": 16,
    "model.hidden_sizes": [8],
    "evaluation.n_episodes": 2,
    "evaluation.max_episode_steps": 20,
    "seed": 1,
    **QUIET,
}


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record ten episodes of a heuristic; return their directory."""
    directory = tmp_path_factory.mktemp("data") / "cartpole"
    return record(directory, gymnasium.make("CartPole-v1"), cartpole_heuristic)


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """Return the rows of metrics.csv as numbers."""
    return [{k: float(v) for k, v in row.items() if v != ""} for row in rows(run_dir)]


def start(run_dir: Path, dataset: Any, env: Any = None, **changes: Any) -> Any:
    """Train for three epochs on a dataset."""
    dataset = str(dataset) if isinstance(dataset, Path) else dataset
    given = {"runner.dataset": dataset, "run_dir": run_dir, **SMALL, **changes}
    if env is not None:
        given["env"] = env
    return train(**given)


def same_weights(run_dir: Path, other: Path) -> bool:
    """Return whether the policies of two runs are bit-for-bit identical."""
    one, two = (load_policy(path).model.state_dict() for path in (run_dir, other))
    return all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("action", [name for name in ACTION_SPACES if "choice" not in name])
def test_bc_learns_every_action_space(tmp_path, action):
    """All action spaces, with Dict observations, validation and rollouts."""
    data = record(tmp_path / "data", SpacesEnv(obs="dict", action=action))
    env = {"_target_": "own_envs.SpacesEnv", "kwargs": {"obs": "dict", "action": action}}
    result = start(tmp_path / "run", data, env, **{"model.normalization.mode": "running"})
    row = read_metrics(tmp_path / "run")[-1]
    assert row["eval/episodes"] == 2
    assert np.isfinite(row["validation/loss"])
    assert row["env_steps"] == 3 * 8 * 5  # 20 % of ten episodes of five steps are held out
    assert int(result.policy.model.normalizer.count) == 8 * 5
    obs = SpacesEnv(obs="dict").observation_space.sample()
    assert SpacesEnv(action=action).action_space.contains(result.policy.act(obs))
    own, again = result.policy.model.state_dict(), load_policy(tmp_path / "run").model.state_dict()
    assert all(torch.equal(own[key], again[key]) for key in own)


def test_validation_loss_selects_without_environment(tmp_path, cartpole):
    """Without an environment, the smallest validation loss is selected."""
    result = start(tmp_path / "run", cartpole)
    rows = read_metrics(tmp_path / "run")
    assert not [name for name in rows[-1] if name.startswith("eval/")]
    losses = [row["validation/loss"] for row in rows]
    assert result.summary.best_metric == pytest.approx(min(losses))
    assert losses[-1] < losses[0]
    assert result.policy.act(np.zeros(4, np.float32)) in (0, 1)


def test_return_selects_with_environment(tmp_path, cartpole):
    """With an environment, the return selects by default."""
    result = start(tmp_path / "run", cartpole, "CartPole-v1")
    rows = read_metrics(tmp_path / "run")
    assert result.summary.best_metric == max(row["eval/episode_return_mean"] for row in rows)
    changes = {"evaluation.metric": "validation/discrete_accuracy"}
    result = start(tmp_path / "other", cartpole, "CartPole-v1", **changes)
    assert result.summary.best_metric == max(row["validation/discrete_accuracy"] for row in rows)


def test_training_loss_selects_without_validation(tmp_path, cartpole):
    """With 0 % validation data, the training loss selects."""
    result = start(tmp_path / "run", cartpole, **{"algorithm.validation_percentage": 0})
    rows = read_metrics(tmp_path / "run")
    assert not [name for name in rows[-1] if name.startswith("validation/")]
    assert rows[-1]["env_steps"] == 3 * TrajectoryDataset.open(cartpole).num_steps
    assert result.summary.best_metric == pytest.approx(
        min(row["train/policy_loss"] for row in rows)
    )


def test_single_episode_is_not_split(tmp_path, capsys):
    """A dataset with one episode is not split, and a note is printed."""
    data = record(tmp_path / "data", SpacesEnv(), n_episodes=1)
    start(tmp_path / "run", data)
    assert "so there is no validation" in capsys.readouterr().err


def test_early_stopping(tmp_path, cartpole):
    """Patience counts evaluations without improvement of the validation loss."""
    changes = {"algorithm.n_epochs": 500, "algorithm.patience": 2, "algorithm.lr": 0.3}
    result = start(tmp_path / "run", cartpole, **changes)
    assert result.summary.stop_reason == "patience"
    losses = [row["validation/loss"] for row in read_metrics(tmp_path / "run")]
    assert result.summary.epochs == int(np.argmin(losses)) + 1 + 2
    assert result.summary.best_epoch == int(np.argmin(losses)) + 1


def test_passes_or_epoch_length_define_epochs(tmp_path, cartpole):
    """An epoch is a pass or `epoch_length` updates; steps are samples."""
    changes = {"algorithm.epoch_length": 2, "algorithm.n_epochs": 0, "total_steps": 100}
    result = start(tmp_path / "run", cartpole, **changes)
    assert (result.summary.stop_reason, result.summary.updates) == ("total_steps", 7)
    assert result.summary.env_steps == 7 * 16


def test_dataset_function_is_accepted(tmp_path, cartpole, monkeypatch):
    """Datasets from a function, with and without an environment."""
    monkeypatch.setenv("RECORDED", str(cartpole))
    node = {"_target_": "test_bc_runs.own_trajectories"}
    start(tmp_path / "own", node, "CartPole-v1")
    start(tmp_path / "run", cartpole, "CartPole-v1")
    assert same_weights(tmp_path / "own", tmp_path / "run")
    start(tmp_path / "set", {"_target_": "test_bc_runs.own_dataset"})


def own_trajectories() -> Any:
    """Return trajectories without spaces."""
    return list(own_dataset())


def own_dataset() -> TrajectoryDataset:
    """Return a dataset."""
    import os

    return TrajectoryDataset.open(os.environ["RECORDED"])


def test_balanced_class_weights_change_the_policy(tmp_path):
    """Class weights change the policy if classes have different frequencies."""
    env = gymnasium.make("CartPole-v1")
    data = record(tmp_path / "data", env, lambda obs: int(obs[3] > 0.5))
    start(tmp_path / "plain", data)
    start(tmp_path / "balanced", data, **{"algorithm.class_weights": "balanced"})
    assert not same_weights(tmp_path / "plain", tmp_path / "balanced")


def test_estimated_statistics_are_frozen(tmp_path, cartpole):
    """Statistics equal the training data and are part of the policy."""
    result = start(tmp_path / "run", cartpole, **{"model.normalization.mode": "estimated"})
    normalizer = result.policy.model.normalizer
    assert bool(normalizer.frozen)
    dataset = TrajectoryDataset.open(cartpole)
    everything = np.concatenate([episode.obs[:-1] for episode in dataset])
    assert int(normalizer.count) < len(everything)
    np.testing.assert_allclose(normalizer.mean, everything.mean(0), atol=0.1)


class OtherModel(BCAlgorithmConfig):
    """Settings with a model that is not a `PolicyModel`."""

    model_builder: ClassVar[str] = f"{__name__}.build_other"


def build_other(*given: Any, **settings: Any) -> nn.Module:
    """Return a module that wraps the default model."""
    return nn.Sequential(build_policy(*given, **settings))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"algorithm": {"_target_": f"{__name__}.OtherModel"}},
            "build_other': returned a Sequential for the policy 'default'; expected a maze_train.P",
        ),
        ({"runner.dataset": None}, "runner.dataset: bc learns from recorded episodes"),
        ({"runner.dataset": "nowhere"}, "runner.dataset = "),
        pytest.param(
            {"runner.dataset": "minari:no/such-v0"},
            "runner.dataset = 'minari:no/",
            marks=pytest.mark.skipif(find_spec("minari") is None, reason="needs Minari"),
        ),
        ({"runner.dataset": {"_target_": "no.such"}}, "runner.dataset._target_"),
        ({"env": "Pendulum-v1"}, "env = 'Pendulum-v1': has the observation space"),
        ({"model.rnn.size": 4}, "model.rnn"),
        ({"evaluation.final_episodes": 5}, "evaluation.final_episodes = 5: "),
        ({"algorithm.class_weight": "balanced"}, "did you mean algorithm.class_weights"),
        (
            {"algorithm.loss": {"_target_": "own_parts.OwnPPOConfig"}},
            "expected a subclass of maze_train.BCLoss",
        ),
    ],
)
def test_invalid_bc_settings_raise(tmp_path, cartpole, changes, message):
    """Errors contain the key, allowed values and the remedy."""
    given = {"runner.dataset": str(cartpole), "run_dir": tmp_path / "run", **SMALL, **changes}
    if "model.rnn.size" in changes:
        given["model"] = "vector_rnn"
    with pytest.raises(ConfigError) as caught:
        train(**given)
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"evaluation.metric": "validation/accurcy"}, "validation/discrete_accuracy"),
        ({"evaluation.metric": "eval/episode_return_mean"}, "not reported"),
        (
            {"evaluation.metric": "validation/loss", "algorithm.validation_percentage": 0},
            "not reported",
        ),
    ],
)
def test_metric_that_bc_does_not_report_raises(tmp_path, cartpole, settings, message):
    """The error is raised at the first evaluation."""
    with pytest.raises(ConfigError, match=message):
        start(tmp_path / "run", cartpole, **settings)


def test_damaged_dataset_raises_or_is_skipped(tmp_path, capsys, cartpole):
    """A damaged file of the dataset raises an error or, with `on_damaged=skip`, is skipped."""
    data = shutil.copytree(cartpole, tmp_path / "data")
    victim = sorted(data.glob("part-*"))[0]
    victim.write_bytes(victim.read_bytes()[:-3])
    with pytest.raises(DatasetError, match=victim.name):
        start(tmp_path / "run", data)
    start(tmp_path / "run", data, **{"algorithm.on_damaged": "skip"})
    assert victim.name in capsys.readouterr().err


class AnyChoice(SpacesEnv):
    """Environment that accepts actions excluded by its mask."""

    def step(self, action: Any) -> Any:
        self.obs = None
        return super().step(action)


def test_recorded_illegal_actions_raise(tmp_path):
    """Recorded illegal actions raise an error."""
    env = AnyChoice("mask", "choice", length=6)
    data = record(tmp_path / "data", env, lambda obs: int(np.argmax(mask_of(obs))))
    result = start(tmp_path / "run", data)
    assert result.policy.act(env.reset(seed=3)[0]) in range(4)
    for k in range(10):  # the episode may be in the training or validation split
        seen = []

        def act(obs: Any, seen: list[Any] = seen, wrong: int = 6 * k + 2) -> int:
            seen.append(obs)
            choose = np.argmin if len(seen) - 1 == wrong else np.argmax
            return int(choose(mask_of(obs)))

        data = record(tmp_path / f"wrong{k}", env, act)
        with pytest.raises(DatasetError, match=f"episode {k}, step 2 of the dataset: the mask"):
            start(tmp_path / "bad", data)


def test_unmasked_components_need_not_be_legal(tmp_path):
    """Box actions outside a mask are not checked."""
    env = SpacesEnv("part mask", "choice and number")
    number = np.array([150.0], np.float32)
    data = record(
        tmp_path / "data", env, lambda obs: {"choice": np.argmax(mask_of(obs)), "number": number}
    )
    assert start(tmp_path / "run", data).summary.epochs == 3


def test_validation_uses_other_episodes(tmp_path, cartpole, monkeypatch):
    """Trap 51: training and validation use different episodes, split by the seed."""
    from maze_train.algorithms.bc import trainer as bc

    seen = []
    original = bc.split_episodes

    def noted(*args: Any) -> Any:
        seen.append(original(*args))
        return seen[-1]

    monkeypatch.setattr(bc, "split_episodes", noted)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        start(tmp_path / name, cartpole, seed=seed, **{"algorithm.validation_percentage": 50})
    splits = [[side.tolist() for side in split] for split in seen]
    assert splits[0] == splits[1] != splits[2]
    for training, validation in splits:
        assert sorted(training + validation) == list(range(10))


def test_large_datasets_stay_in_files(tmp_path, cartpole, monkeypatch):
    """Large datasets stay in files; `storage=memory` raises an error."""
    from maze_train.algorithms.bc import trainer as bc

    start(tmp_path / "memory", cartpole)
    monkeypatch.setattr(bc, "available_memory", lambda device: 1000)
    with pytest.raises(ConfigError, match=r"algorithm\.storage = 'memory': the data require .* kB"):
        start(tmp_path / "refused", cartpole, **{"algorithm.storage": "memory"})
    assert not (tmp_path / "refused").exists()
    start(tmp_path / "auto", cartpole)
    assert same_weights(tmp_path / "auto", tmp_path / "memory")


def test_actions_of_another_scale_are_noted(tmp_path, capsys):
    """A note suggests a remedy if actions are far from the initial distribution."""
    env = ScaledEnv(1000.0)
    data = record(tmp_path / "data", env)
    start(tmp_path / "run", data)
    assert "squashed_gaussian" in capsys.readouterr().err
    start(tmp_path / "squashed", data, **{"model.distributions": {"Box": "squashed_gaussian"}})
    start(tmp_path / "small", record(tmp_path / "one", ScaledEnv(1.0)))
    assert "squashed_gaussian" not in capsys.readouterr().err


class ScaledEnv(SpacesEnv):
    """Environment whose actions are within `bound`."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.action_space = gymnasium.spaces.Box(-bound, bound, (2,), np.float32)


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        ("eval/episode_return_mean", "max"),
        ("validation/loss", "min"),
        ("train/policy_loss", "min"),
        ("validation/discrete_accuracy", "max"),
        ("validation/box_mean_abs_deviation", "min"),
        ("validation/box_mean_abs_deviation/arm", "min"),
        ("validation/discrete_action_rank", "min"),
        ("validation/wolf/loss", "min"),
        ("train/wolf/policy_loss", "min"),
        ("validation/wolf/discrete_accuracy", "max"),
        ("eval/wolf/episode_return_mean", "max"),
    ],
)
def test_losses_and_errors_are_minimized(metric, mode):
    """Losses, errors and ranks are minimised."""
    assert EvaluationConfig().selection_mode(metric) == mode
    assert EvaluationConfig(mode="max").selection_mode(metric) == "max"
