"""Classes, functions and instances in the place of a dotted path, and what becomes of them."""

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
from own_parts import CountingEvaluator, LineWriter, OwnNet, demonstrations, own_loss
from short_runs import FORK, PPO, SMALL, rows, short_run, written_config

from maze_train import load_policy, run_rollout, train
from maze_train.core.errors import ConfigError, EnvError
from maze_train.core.targets import Given, build_target

pytestmark = pytest.mark.usefixtures("empty_directory")

NAMED: dict[str, Any] = {
    "env": {"_target_": "own_envs.SpacesEnv", "kwargs": {"length": 4}},
    "wrappers": [{"_target_": "own_envs.Scaled", "factor": 3.0}],
    "model.policy": {"_target_": "own_parts.OwnNet", "width": 5},
    "evaluators": [{"_target_": "own_parts.CountingEvaluator", "scale": 10}],
    "writers": [{"_target_": "own_parts.LineWriter", "path": "epochs.txt"}],
}


def objects() -> dict[str, Any]:
    """The same parts as functions, classes with settings, and instances."""
    return {
        "env": lambda: SpacesEnv(length=4),
        "wrappers": [{"_target_": Scaled, "factor": 3.0}],
        "model.policy": partial(OwnNet, width=5),
        "evaluators": [CountingEvaluator(scale=10)],
        "writers": [LineWriter("epochs.txt")],
    }


def test_objects_make_the_same_run_as_their_names() -> None:
    """Wherever a name is taken; in worker processes as well."""
    short_run("named", **NAMED)
    assert [row["own/calls"] for row in rows("named")] == ["10", "20", "30"]
    for name, place in (("dev", {}), ("local", FORK)):
        assert Path("epochs.txt").read_text() == "1\n2\n3\n"
        Path("epochs.txt").unlink()
        short_run(name, **objects(), **place)
        assert rows(name) == rows("named")
    assert Path("epochs.txt").read_text() == "1\n2\n3\n"


def test_the_file_names_them_and_going_on_asks_for_them_again() -> None:
    """All in one message, with the arguments; given again, the run continues as it would have."""
    constant = {"algorithm.lr": 1e-3}
    short_run("whole", **objects(), **constant)
    given = objects()
    short_run("run", **given, **constant, **{"algorithm.n_epochs": 2})
    written = written_config("run")
    assert written["env"]["_target_"] == "test_python_objects.objects.<locals>.<lambda>"
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


def test_an_object_with_a_name_is_the_one_that_is_named() -> None:
    """`config.yaml` has its dotted path; another object in its place is another setting."""
    short_run(env=SpacesEnv, **{"algorithm.n_epochs": 1})
    assert written_config("run")["env"]["_target_"] == "own_envs.SpacesEnv"
    again: dict[str, Any] = {"resume": "run", "algorithm.n_epochs": 2}
    with pytest.raises(ConfigError, match=r"env = .*this setting changes its numbers"):
        train(lambda: SpacesEnv(), **again)
    assert train(trust=["own_envs"], **again).summary.epochs == 2


def test_a_network_that_is_given_is_where_training_begins() -> None:
    """It stays as it is; the policy needs it again."""
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
    """A vector environment of CartPole."""
    return gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="vector_entry_point")


def test_vector_environments() -> None:
    """One that exists, or a function that makes them: as the one that is registered."""
    alone = {**SMALL, "algorithm": "a2c", "evaluation.n_episodes": 0}
    del alone["runner.concurrency"]
    native = {"backend": "native"}
    both: dict[str, Any] = {"runner.concurrency": 3, **alone}
    train({"id": "CartPole-v1", **native}, run_dir="id", **both)
    train({"_target_": vector_env, **native}, run_dir="function", **both)
    train(vector_env(3), run_dir="object", **alone)
    more = {**alone, "runner.concurrency": 4, "algorithm": {"name": "impala", "num_actors": 2}}
    assert rows("id") == rows("function") == rows("object")
    with pytest.raises(EnvError, match="is in use already, or closed"):
        train(vector_env(2), run_dir="impala", **more)
    with pytest.raises(ConfigError, match=r"evaluation\.n_episodes = 2: .* for training alone"):
        train(vector_env(3), **{**alone, "evaluation.n_episodes": 2})
    with pytest.raises(EnvError, match="has 3 environments, expected 2"):
        train(vector_env(3), runner={"concurrency": 2}, **alone)


def test_functions_and_lists_of_episodes() -> None:
    """A loss, data to imitate, an environment in a section: given again where a run continues."""
    bare = {key: value for key, value in SMALL.items() if key.startswith(("tracking", "eval"))}
    small = {**SMALL, **PPO}
    loss: dict[str, Any] = {"algorithm.loss_function": lambda *args: own_loss(*args)}
    data: dict[str, Any] = {"runner.dataset": demonstrations(10)}
    bc = {**bare, "algorithm.batch_size": 4, "algorithm": "bc"}
    section = {"_target_": lambda length: SpacesEnv(length=length), "kwargs": {"length": 4}}
    env: dict[str, Any] = {"env": section}
    for name, parts, more in (("loss", loss, small), ("data", data, bc), ("env", env, small)):
        place = {"env": SpacesEnv, **more, **parts, "seed": 0}
        for run, n_epochs in ((name, 2), (f"{name}_whole", 3)):
            epochs = {"total_steps": None, "algorithm.n_epochs": n_epochs, "algorithm.lr": 1e-3}
            train(**{**place, **epochs, "run_dir": run})
        again = {"resume": name, "trust": ["own_envs"], "algorithm.n_epochs": 3}
        with pytest.raises(ConfigError, match=r"pass it again, as in train\("):
            train(**again)
        train(**again, **parts)
        assert rows(name) == rows(f"{name}_whole")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env": SpacesEnv()}, r"env = .*one environment cannot be many"),
        ({"evaluators": [OwnNet]}, r"evaluators\[0\]\._target_ = .*: expected a subclass of maze_"),
        ({"evaluators": [3]}, r"evaluators\[0\] = 3: expected a mapping"),
        ({"evaluators": CountingEvaluator}, "expected a list"),
        ({"algorithm.n_epochs": abs}, "expected an integer"),
    ],
)
def test_objects_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    """Refused with the key, before anything is written."""
    with pytest.raises(ConfigError, match=message):
        short_run(**arguments)
    assert list(Path().iterdir()) == []


def test_an_instance_takes_no_settings() -> None:
    """It is used as it is."""
    evaluator = CountingEvaluator()
    node = {"_target_": Given(evaluator)}
    assert build_target(copy.deepcopy(node), kind=CountingEvaluator) is evaluator
    with pytest.raises(ConfigError, match="made already, and takes no settings"):
        build_target({**node, "scale": 3}, kind=CountingEvaluator)


def test_a_rollout_names_its_policy() -> None:
    """In its files and in its directory."""
    result = run_rollout(policy=lambda obs: 0, env="CartPole-v1", n_episodes=1, progress="quiet")
    text = (result.output_dir / "rollout.yaml").read_text()
    assert "_target_: test_python_objects.test_a_rollout_names_its_policy.<locals>.<lambda>" in text
