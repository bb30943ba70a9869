"""Everything that a user may replace is named by `_target_`, without registration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_parts import CountingEvaluator, Halved, LastAction, Numbers, OwnNet, OwnPPOLearner
from short_runs import rows, settings, short_run

from maze_train import load_policy, train
from maze_train.cli import main
from maze_train.core.errors import CallbackError, ConfigError

pytestmark = pytest.mark.usefixtures("empty_directory")


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
    result = short_run(env=env, runner=name)
    assert result.history[-1]["eval/episode_length_mean"] == length
    assert result.history[-1]["train/episode_length_mean"] == length


def test_wrappers_are_put_around_it_from_the_inside_out() -> None:
    """`env.wrappers` names wrappers with their arguments."""
    wrappers = [
        {"_target_": "own_envs.Scaled", "factor": 3.0},
        {"_target_": "gymnasium.wrappers.ClipReward", "min_reward": 0, "max_reward": 2},
        {"_target_": "own_envs.Scaled"},
    ]
    plain = short_run("plain").history[0]
    wrapped = short_run(**{"env.wrappers": wrappers}).history[0]
    assert wrapped["train/episode_return_min"] >= 0 > plain["train/episode_return_min"]
    assert wrapped["train/episode_return_max"] % 4 == 0  # 3 is clipped to 2, and doubled


def test_networks_of_ones_own() -> None:
    """`model.policy` and `model.critic` name networks, and a saved policy finds them again.

    `model.trunk` names the layers that both share.
    """
    node = {"_target_": "own_parts.OwnNet", "width": 5}
    shared = {"model.shared_trunk": True, "model.trunk": {"_target_": "own_parts.OwnNet"}}
    assert isinstance(short_run("shared", **shared).policy.model.trunk, OwnNet)
    result = short_run(**{"model.policy": node, "model.critic": node})
    assert isinstance(result.policy.model.policy.net, OwnNet)
    assert result.policy.model.critic.layers[0].out_features == 5
    obs = np.ones((4, 3), np.float32)
    loaded = load_policy("run", ["own_parts"])
    np.testing.assert_array_equal(loaded.act(obs), result.policy.act(obs))


def test_a_distribution_of_ones_own() -> None:
    """`model.distributions` names a family for a type of space."""
    node = {"Discrete": {"_target_": "own_parts.LastAction"}}
    result = short_run(**{"model.distributions": node})
    assert isinstance(result.policy.model.distribution, LastAction)
    assert result.policy.act(np.zeros(3)) == 1  # the last one of -1, 0, 1
    assert result.history[-1]["eval/episode_return_mean"] == 5.0


def test_a_value_transform_of_ones_own() -> None:
    """`model.value_transform` names the transform of the critic's targets."""
    Halved.calls = 0
    plain = short_run("plain").history[0]
    transformed = short_run(**{"model.value_transform": {"_target_": "own_parts.Halved"}}).history[
        0
    ]
    assert Halved.calls > 0
    assert transformed["train/value_loss"] < 0.5 * plain["train/value_loss"]


def test_an_evaluator_of_ones_own() -> None:
    """`evaluation.evaluators` adds metrics, one of which may select the best policy."""
    CountingEvaluator.closed = 0
    node = {"_target_": "own_parts.CountingEvaluator", "scale": 10}
    selection = {"metric": "own/calls", "mode": "min"}
    result = short_run(evaluation={"evaluators": [node], **selection})
    assert [row["own/calls"] for row in result.history] == [10.0, 20.0, 30.0]
    assert "eval/episode_return_mean" in result.history[0]
    assert (result.best_metric, result.summary.best_epoch) == (10.0, 1)
    assert CountingEvaluator.closed > 0


def test_numbers_of_an_evaluator_of_ones_own() -> None:
    """They become plain ones, of which checkpoints and files consist; others are named."""
    given = {"own/a": np.float32(0.5), "own/b": torch.ones(1), "own/c": np.array(3), "own/d": True}
    (row, *_) = short_run(evaluators=[Numbers(given)], total_steps=64).history
    found = [row[name] for name in given]
    assert found == [0.5, 1.0, 3.0, 1.0]
    assert [type(value) for value in found] == [float, float, int, float]
    message = r"evaluation\.evaluators\[0\]: evaluate\(\) gave .* for own/x; expected a number"
    for value in (None, np.ones(2), torch.ones(2)):
        with pytest.raises(ConfigError, match=message):
            short_run(None, evaluators=[Numbers({"own/x": value})])


def test_an_evaluator_of_ones_own_that_fails_loses_nothing() -> None:
    """It is named, and the run continues at a checkpoint as one that was not disturbed."""

    class Fails(CountingEvaluator):
        def evaluate(self, policy: Any) -> dict[str, float]:
            torch.rand(1)
            if self.calls == self.scale - 1:
                raise ZeroDivisionError("boom")
            self.calls += 1
            return {"own/calls": self.calls}

        def state_dict(self) -> dict[str, Any]:
            return {"calls": self.calls}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.calls = state["calls"]

    constant = {"algorithm.lr": 1e-3, "checkpoint.interval": 100}
    short_run("whole", evaluators=[Fails(9)], **constant)
    problem = r"evaluation\.evaluators\[0\]: .*Fails\.evaluate failed: ZeroDivisionError: boom"
    with pytest.raises(CallbackError, match=problem) as caught:
        short_run(evaluators=[Fails(2)], **constant)
    assert caught.value.checkpoint is not None
    train(resume="run", evaluators=[Fails(9)], trust=["own_envs"])
    assert rows("run") == rows("whole")
    with pytest.raises(ConfigError, match=r"\[0\]: evaluate\(\) gave 3; expected numbers by name"):
        short_run(None, evaluators=[Numbers(3)])


def test_an_algorithm_of_ones_own() -> None:
    """A subclass of a config names its learner; the run and its saved files know it."""
    OwnPPOLearner.seen.clear()
    own = {"_target_": "own_parts.OwnPPOConfig", "penalty": 0.7}
    result = train(**{**settings(), "algorithm": own})
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
