"""Custom components, named by `_target_` or passed as objects."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from own_envs import Scaled, SpacesEnv
from own_parts import CountingEvaluator, LineWriter, Numbers, OwnNet
from short_runs import FORK, SMALL, rows, short_run, written_config

from maze_train import CallbackError, ConfigError, EnvError, load_policy, run_rollout, train
from maze_train.core.targets import InlineObject, build_target

pytestmark = pytest.mark.usefixtures("empty_directory")


def test_custom_networks_are_used_and_saved() -> None:
    """`model.policy`, `model.critic` and `model.trunk` name networks, also of saved policies.

    `model.trunk` names the layers shared by policy and critic.
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


def test_custom_evaluator_adds_selection_metrics() -> None:
    """`evaluation.evaluators` adds metrics, one of which may select the best policy."""
    CountingEvaluator.closed = 0
    node = {"_target_": "own_parts.CountingEvaluator", "scale": 10}
    selection = {"metric": "own/calls", "mode": "min"}
    result = short_run(evaluation={"evaluators": [node], **selection})
    assert [row["own/calls"] for row in result.history] == [10.0, 20.0, 30.0]
    assert "eval/episode_return_mean" in result.history[0]
    assert (result.best_metric, result.summary.best_epoch) == (10.0, 1)
    assert CountingEvaluator.closed > 0


def test_custom_evaluator_values_become_python_numbers() -> None:
    """Scalars are converted to Python numbers; other values raise ConfigError."""
    given = {"own/a": np.float32(0.5), "own/b": torch.ones(1), "own/c": np.array(3), "own/d": True}
    (row, *_) = short_run(evaluators=[Numbers(given)], total_steps=64).history
    found = [row[name] for name in given]
    assert found == [0.5, 1.0, 3.0, 1.0]
    assert [type(value) for value in found] == [float, float, int, float]
    message = r"evaluation\.evaluators\[0\]: evaluate\(\) returned .* for own/x; expected a number"
    for value in (None, np.ones(2), torch.ones(2)):
        with pytest.raises(ConfigError, match=message):
            short_run(None, evaluators=[Numbers({"own/x": value})])


def test_run_resumes_after_a_failed_custom_evaluator() -> None:
    """The error names the evaluator, and the resumed run equals an uninterrupted run."""

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
    with pytest.raises(ConfigError, match=r"\[0\]: evaluate\(\) returned 3; expected a"):
        short_run(None, evaluators=[Numbers(3)])


# -- objects in the place of a name ---------------------------------------------------------------

NAMED: dict[str, Any] = {
    "env": {"_target_": "own_envs.SpacesEnv", "kwargs": {"length": 4}},
    "wrappers": [{"_target_": "own_envs.Scaled", "factor": 3.0}],
    "model.policy": {"_target_": "own_parts.OwnNet", "width": 5},
    "evaluators": [{"_target_": "own_parts.CountingEvaluator", "scale": 10}],
    "writers": [{"_target_": "own_parts.LineWriter", "path": "epochs.txt"}],
}


def objects() -> dict[str, Any]:
    """Return the same components as functions, classes with settings, and instances."""
    return {
        "env": lambda: SpacesEnv(length=4),
        "wrappers": [{"_target_": Scaled, "factor": 3.0}],
        "model.policy": partial(OwnNet, width=5),
        "evaluators": [CountingEvaluator(scale=10)],
        "writers": [LineWriter("epochs.txt")],
    }


def test_objects_equal_their_names() -> None:
    """Objects and names give identical results, also in worker processes."""
    short_run("named", **NAMED)
    assert [row["own/calls"] for row in rows("named")] == ["10", "20", "30"]
    for name, place in (("dev", {}), ("local", FORK)):
        assert Path("epochs.txt").read_text() == "1\n2\n3\n"
        Path("epochs.txt").unlink()
        short_run(name, **objects(), **place)
        assert rows(name) == rows("named")
    assert Path("epochs.txt").read_text() == "1\n2\n3\n"


def test_resuming_requires_the_objects_again() -> None:
    """Resuming lists all objects that must be passed again; with them, results are identical."""
    constant = {"algorithm.lr": 1e-3}
    short_run("whole", **objects(), **constant)
    given = objects()
    short_run("run", **given, **constant, **{"algorithm.n_epochs": 2})
    written = written_config("run")
    assert written["env"]["_target_"] == "test_own_parts.objects.<locals>.<lambda>"
    assert written["env"]["wrappers"] == [{"_target_": "own_envs.Scaled", "factor": 3.0}]
    assert written["model"]["policy"] == {"_target_": "functools.<partial>"}
    assert written["evaluation"]["evaluators"] == [{"_target_": "own_parts.<CountingEvaluator>"}]
    again = {"resume": "run", "algorithm.n_epochs": 0, "trust": ["own_envs", "own_parts"]}
    message = (
        r"train\(env=..., \*\*{'model.policy': ...}, \*\*{'evaluation.evaluators': ...}, "
        r"\*\*{'tracking.writers': ...}, resume=...\)"
    )
    with pytest.raises(ConfigError, match=message):
        train(**again)
    given["evaluators"][0].calls = 2
    train(**again, **given)
    assert rows("run") == rows("whole")


def test_importable_objects_are_stored_by_name() -> None:
    """`config.yaml` contains the dotted path; another object is another setting."""
    short_run(env=SpacesEnv, **{"algorithm.n_epochs": 1})
    assert written_config("run")["env"]["_target_"] == "own_envs.SpacesEnv"
    again: dict[str, Any] = {"resume": "run", "algorithm.n_epochs": 2}
    with pytest.raises(ConfigError, match=r"env = .*this setting affects the results"):
        train(lambda: SpacesEnv(), **again)
    assert train(trust=["own_envs"], **again).summary.epochs == 2


def test_given_network_is_the_start_of_training() -> None:
    """The given network is not modified, and must be passed again to load the policy."""
    torch.manual_seed(0)
    net = OwnNet(gymnasium.spaces.Box(-1, 1, (3,)), 3)
    before = net.layers[0].weight.clone()
    result = short_run(**{"model.policy": net, "algorithm.lr": 1e-3})
    assert torch.equal(net.layers[0].weight, before)
    trained = result.policy.model.policy.net.layers[0].weight
    assert 0 < (trained - before).abs().max() < 0.2
    with pytest.raises(
        ConfigError, match=r"model\.policy.*pass it again.* or load_policy\(run_dir, \*\*"
    ):
        load_policy("run", ["own_parts"])
    loaded = load_policy("run", ["own_parts"], **{"model.policy": net})
    assert load_policy("run@final", ["own_parts"], **{"model.policy": net}).act(np.zeros(3)) < 2
    obs = np.ones((4, 3), np.float32)
    np.testing.assert_array_equal(loaded.act(obs), result.policy.act(obs))


def vector_env(num_envs: int) -> Any:
    """Return a vector environment of CartPole."""
    return gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="vector_entry_point")


def test_vector_environment_instance_function_and_id_are_equal() -> None:
    """An instance, a function and a registered id give identical results."""
    alone = {**SMALL, "algorithm": "a2c", "evaluation.n_episodes": 0}
    del alone["runner.concurrency"]
    native = {"backend": "native"}
    both: dict[str, Any] = {"runner.concurrency": 3, **alone}
    train({"id": "CartPole-v1", **native}, run_dir="id", **both)
    train({"_target_": vector_env, **native}, run_dir="function", **both)
    train(vector_env(3), run_dir="object", **alone)
    more = {**alone, "runner.concurrency": 4, "algorithm": {"name": "impala", "num_actors": 2}}
    assert rows("id") == rows("function") == rows("object")
    with pytest.raises(EnvError, match="is already in use, or closed"):
        train(vector_env(2), run_dir="impala", **more)
    with pytest.raises(ConfigError, match=r"evaluation\.n_episodes = 2: .* only used for training"):
        train(vector_env(3), **{**alone, "evaluation.n_episodes": 2})
    with pytest.raises(EnvError, match="has 3 environments, expected 2"):
        train(vector_env(3), runner={"concurrency": 2}, **alone)


def test_instances_take_no_arguments() -> None:
    """An instance is used unchanged; arguments raise ConfigError."""
    evaluator = CountingEvaluator()
    node = {"_target_": InlineObject(evaluator)}
    assert build_target(copy.deepcopy(node), kind=CountingEvaluator) is evaluator
    with pytest.raises(ConfigError, match="is an instance and takes no arguments"):
        build_target({**node, "scale": 3}, kind=CountingEvaluator)


def test_rollout_file_names_the_policy() -> None:
    """Files and directory of a rollout contain the name of the policy."""
    result = run_rollout(policy=lambda obs: 0, env="CartPole-v1", n_episodes=1, progress="quiet")
    text = (result.output_dir / "rollout.yaml").read_text()
    assert "_target_: test_own_parts.test_rollout_file_names_the_policy.<locals>.<lambda>" in text
