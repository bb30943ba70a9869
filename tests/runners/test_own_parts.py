"""Everything that a user may replace is named by `_target_`, without registration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_envs import SpacesEnv
from own_parts import CountingEvaluator, Halved, LastAction, OwnNet, OwnPPOLearner

from maze_train import load_policy, train
from maze_train.cli import main
from maze_train.errors import ConfigError


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are written to an empty directory."""
    monkeypatch.chdir(tmp_path)


def run(**overrides: Any) -> Any:
    """A short run with some part replaced."""
    settings: dict[str, Any] = {
        "env": {"_target_": "own_envs.SpacesEnv"},
        "algorithm": {"name": "ppo", "n_rollout_steps": 16, "batch_size": 16, "epoch_length": 2},
        "runner.concurrency": 2,
        "evaluation.n_episodes": 2,
        "tracking": {"progress": "quiet", "plot": False, "tensorboard": False},
        "total_steps": 128,
        "seed": 0,
        "run_dir": "run",
    }
    return train(**{**settings, **overrides})


@pytest.mark.parametrize("name", ["dev", "local"])
@pytest.mark.parametrize(
    ("env", "length"),
    [
        ({"_target_": "own_envs.SpacesEnv", "kwargs": {"length": 4}}, 4),
        ({"_target_": "own_envs.make_env"}, 3),
        ({"_target_": "own_envs.make_env", "kwargs": {"length": 6}, "max_episode_steps": 2}, 2),
    ],
)
def test_an_environment_of_ones_own(name: str, env: dict[str, Any], length: int) -> None:
    """`env._target_` names a class or a factory; its arguments and a time limit hold."""
    result = run(env=env, runner={"name": name, "concurrency": 2})
    assert result.history[-1]["eval/episode_length_mean"] == length
    assert result.history[-1]["train/episode_length_mean"] == length


@pytest.mark.parametrize(
    "name",
    [
        "dev",
        pytest.param(
            "local",
        ),
    ],
)
def test_a_wrong_name_is_an_error_of_the_configuration(name: str) -> None:
    """Also where worker processes find it out."""
    with pytest.raises(ConfigError, match="did you mean SpacesEnv"):
        run(env={"_target_": "own_envs.SpacesEn"}, runner={"name": name})
    assert not Path("run").exists()


def test_wrappers_are_put_around_it_from_the_inside_out() -> None:
    """`env.wrappers` names wrappers with their arguments."""
    env = {"_target_": "own_envs.SpacesEnv"}
    plain = run(env=env, run_dir="plain").history[0]
    env = {
        **env,
        "wrappers": [
            {"_target_": "own_envs.Scaled", "factor": 3.0},
            {"_target_": "gymnasium.wrappers.ClipReward", "min_reward": 0, "max_reward": 2},
            {"_target_": "own_envs.Scaled"},
        ],
    }
    wrapped = run(env=env).history[0]
    assert wrapped["train/episode_return_min"] >= 0 > plain["train/episode_return_min"]
    assert wrapped["train/episode_return_max"] % 4 == 0  # 3 is clipped to 2, and doubled


def test_networks_of_ones_own() -> None:
    """`model.policy` and `model.critic` name networks, and a saved policy finds them again."""
    node = {"_target_": "own_parts.OwnNet", "width": 5}
    result = run(model={"policy": node, "critic": node})
    assert isinstance(result.policy.model.policy.net, OwnNet)
    assert result.policy.model.critic.layers[0].out_features == 5
    obs = np.ones((4, 3), np.float32)
    np.testing.assert_array_equal(
        load_policy("run", ["own_parts"]).act(obs), result.policy.act(obs)
    )


def test_a_trunk_of_ones_own() -> None:
    """`model.trunk` names the layers that policy and critic share."""
    model = {"shared_trunk": True, "hidden_sizes": [9], "trunk": {"_target_": "own_parts.OwnNet"}}
    assert isinstance(run(model=model).policy.model.trunk, OwnNet)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"policy": {"_target_": "own_parts.NarrowNet"}}, r"model\.policy.*expected outputs of sh"),
        ({"policy": {"_target_": "own_parts.OwnNet", "widht": 5}}, "model.policy.*'widht'"),
        ({"critic": {"_target_": "own_parts.OwnNit"}}, "did you mean OwnNet"),
        ({"distributions": {"Discrete": {"_target_": "own_parts.OwnNet"}}}, "Discrete"),
    ],
)
def test_a_part_that_does_not_fit_is_refused(model: dict[str, Any], message: str) -> None:
    """The message names the setting; nothing is written."""
    with pytest.raises(ConfigError, match=message):
        run(model=model)
    assert not Path("run").exists()


def test_a_distribution_of_ones_own() -> None:
    """`model.distributions` names a family for a type of space."""
    node = {"Discrete": {"_target_": "own_parts.LastAction"}}
    result = run(model={"distributions": node})
    assert isinstance(result.policy.model.distribution, LastAction)
    assert result.policy.act(np.zeros(3)) == 1  # the last one of -1, 0, 1
    assert result.history[-1]["eval/episode_return_mean"] == 5.0


def test_a_value_transform_of_ones_own() -> None:
    """`model.value_transform` names the transform of the critic's targets."""
    Halved.calls = 0
    plain = run(run_dir="plain").history[0]
    node = {"_target_": "own_parts.Halved"}
    transformed = run(model={"value_transform": node}).history[0]
    assert Halved.calls > 0
    assert transformed["train/value_loss"] < 0.5 * plain["train/value_loss"]


def test_an_evaluator_of_ones_own() -> None:
    """`evaluation.evaluators` adds metrics, one of which may select the best policy."""
    CountingEvaluator.closed = 0
    result = run(
        evaluation={
            "n_episodes": 1,
            "evaluators": [{"_target_": "own_parts.CountingEvaluator", "scale": 10}],
            "metric": "own/calls",
            "mode": "min",
        }
    )
    assert [row["own/calls"] for row in result.history] == [10.0, 20.0]
    assert "eval/episode_return_mean" in result.history[0]
    assert (result.best_metric, result.summary.best_epoch) == (10.0, 1)
    assert CountingEvaluator.closed > 0


def test_a_writer_of_ones_own() -> None:
    """`tracking.writers` gets every row."""
    tracking = {
        "progress": "quiet",
        "plot": False,
        "writers": [{"_target_": "own_parts.LineWriter", "path": "epochs.txt"}],
    }
    run(tracking=tracking)
    assert Path("epochs.txt").read_text() == "1\n2\n"


def test_an_algorithm_of_ones_own() -> None:
    """A subclass of a config names its learner; the run and its saved files know it."""
    OwnPPOLearner.seen.clear()
    own = {"_target_": "own_parts.OwnPPOConfig", "penalty": 0.7, "n_rollout_steps": 8}
    result = run(algorithm={**own, "batch_size": 16, "epoch_length": 2})
    assert OwnPPOLearner.seen == [0.7] * result.summary.updates
    assert load_policy("run", ["own_parts"]).act(np.zeros(3)) in (-1, 0, 1)


def test_an_algorithm_of_ones_own_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """An option in a folder of the user names the config; its own settings are checked as ours."""
    OwnPPOLearner.seen.clear()
    Path("my_conf/algorithm").mkdir(parents=True)
    Path("my_conf/algorithm/mine.yaml").write_text(
        "_target_: own_parts.OwnPPOConfig\nn_rollout_steps: 8\nbatch_size: 16\nepoch_length: 2\n"
    )
    argv = ["--config-dir", "my_conf", "algorithm=mine", "env._target_=own_envs.SpacesEnv"]
    argv += ["total_steps=64", "tracking.progress=quiet", "tracking.plot=false", "run_dir=run"]
    assert main([*argv, "algorithm.penalty=0.5"]) == 0
    assert OwnPPOLearner.seen[0] == 0.5
    assert main([*argv, "algorithm.penalti=1"]) == 2
    assert "did you mean algorithm.penalty?" in capsys.readouterr().err


def test_environments_are_closed() -> None:
    """After all these runs no environment of this process is open."""
    SpacesEnv.open_envs = 0
    run()
    assert SpacesEnv.open_envs == 0
