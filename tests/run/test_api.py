"""Training and acting from Python: `train` and `load_policy`."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from omegaconf import OmegaConf
from own_envs import SpacesEnv
from own_parts import CountingEvaluator, OwnNet
from short_runs import PPO, SMALL, short_run, written_config
from torch import nn

import maze_train
from maze_train import (
    EnvConfig,
    EnvFactory,
    Evaluator,
    PPOAlgorithmConfig,
    RolloutEvaluator,
    SequentialVectorEnv,
    TrainConfig,
    TrainedPolicy,
    ValueTransform,
    compare_runs,
    evaluate,
    load_config,
    load_policy,
    make_env,
    run_rollout,
    search,
    train,
)
from maze_train.core.errors import ConfigError, RunDirectoryError
from maze_train.run.saved_policies import load_weights
from maze_train.run.train import TrainingRunner

pytestmark = pytest.mark.usefixtures("empty_directory")


@pytest.mark.parametrize(
    ("env", "length"),
    [
        ({"id": "CartPole-v1", "max_episode_steps": 4}, 4),
        (SpacesEnv, 5),
        (lambda: SpacesEnv(length=3), 3),
        (EnvConfig(id="CartPole-v1", max_episode_steps=6), 6),
        ("CartPole-v1", None),
        ({"_target_": "own_envs.make_env", "kwargs": {"length": 6}, "max_episode_steps": 2}, 2),
    ],
    ids=["mapping", "class", "lambda", "EnvConfig", "id", "factory"],
)
def test_train_accepts_environments_in_all_forms(env: Any, length: int | None) -> None:
    """A mapping, a class, a function, a config and an id all name an environment."""
    result = short_run(env=env, total_steps=64)
    assert length in (None, result.history[-1]["eval/episode_length_mean"])
    assert result.policy.act(result.policy.observation_space.sample()) in (-1, 0, 1)


@pytest.mark.parametrize(
    "call",
    [
        train,
        lambda config: train(**config),
        lambda config: train(config, config.algorithm),
        lambda config: train(config, model={"critic_hidden_sizes": None}),
        lambda config: train(load_config(config)),
        lambda config: TrainingRunner(load_config(config)).run(),
        lambda config: instantiate({"_target_": "maze_train.train", **config}, _recursive_=False),
    ],
    ids=["whole", "sections", "name", "changes", "TrainConfig", "runner", "instantiate"],
)
def test_train_accepts_composed_configurations(call: Callable[[Any], Any]) -> None:
    """Configurations are accepted as a whole or by section; further arguments override values."""
    with initialize_config_module("maze_train.conf", version_base="1.3"):
        config = compose("train", ["algorithm=ppo", "env.id=CartPole-v1"])
    for key, value in {**SMALL, **PPO, "run_dir": "run"}.items():
        if key != "algorithm":
            OmegaConf.update(config, key, value)
    config.total_steps = "${seed}28"  # 128
    assert call(config).summary.env_steps == 128
    model = written_config("run")["model"]
    assert (model["hidden_sizes"], model["critic_hidden_sizes"]) == ([8], None)


@pytest.mark.parametrize(
    "call",
    [
        lambda node: compare_runs(node.runs, bounds=node.bounds),
        lambda node: run_rollout(policy=node.policy, env=node.env, n_episodes=2),
        lambda node: evaluate("random", node.env, 2),
        lambda node: train(resume="run", **node.changes),
        pytest.param(
            lambda node: search(node.env, node.algorithm, node.search, study="s", **node.changes),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["compare", "rollout", "evaluate", "resume", "search"],
)
def test_functions_accept_omegaconf_containers(call: Callable[[Any], Any]) -> None:
    """OmegaConf lists of paths, sections and nested settings are accepted."""
    short_run(env="CartPole-v1", total_steps=64)
    node = {
        "runs": ["run"],
        "bounds": {"CartPole-v1": [0, 500]},
        "policy": {"_target_": "own_policies.Counting"},
        "env": {"_target_": "own_envs.SpacesEnv", "max_episode_steps": 3},
        "changes": {"callbacks": [], "total_steps": 128},
        "algorithm": {"name": "ppo", "n_rollout_steps": 16, "batch_size": 16},
        "search": {"algorithm": {"lr": [1e-3, 1e-2]}},
    }
    assert call(OmegaConf.create(node)) is not None


@pytest.mark.parametrize("env", ["CartPole-v1", EnvConfig(id="CartPole-v1")], ids=["id", "config"])
def test_resume_with_an_environment_keeps_other_settings(env: Any) -> None:
    """On resume, only settings that are passed again change."""
    short_run(env="CartPole-v1", **{"algorithm.lr": 0.02}, total_steps=128)
    told = train(env, resume="run", total_steps=192)
    assert [row["env_steps"] for row in told.history] == [64, 128, 192]
    assert written_config("run")["algorithm"]["lr"] == 0.02
    assert written_config("run")["algorithm"]["_target_"].endswith("PPOAlgorithmConfig")


def test_result_policy_is_the_saved_best_policy() -> None:
    """`result.policy` and `load_policy` have the weights of the best epoch."""
    result = short_run(env="CartPole-v1")
    obs = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    loaded = load_policy("run")
    params = (policy.model.state_dict() for policy in (result.policy, loaded))
    for one, other in zip(*(state.values() for state in params), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(result.policy.act(obs), loaded.act(obs))
    np.testing.assert_array_equal(load_policy(Path("run/best")).act(obs), loaded.act(obs))
    assert len(repr(result)) < 1_000  # excludes the rows of metrics


def test_saved_policy_acts_like_the_policy_of_the_result(tmp_path: Path) -> None:
    """Saving works after training and after loading; the printed result fits ten lines."""
    result = short_run()
    obs = np.zeros((3, *result.policy.observation_space.shape), np.float32)
    first = load_policy(result.policy.save(tmp_path / "a"), ["own_envs"])
    second = load_policy(first.save(tmp_path / "b"), ["own_envs"])
    wanted = result.policy.act(obs).tolist()
    assert first.act(obs).tolist() == second.act(obs).tolist() == wanted
    assert len(repr(result).splitlines()) <= 10
    with pytest.raises(ConfigError, match="without the settings of its run"):
        TrainedPolicy(first.model, first.observation_space, first.action_space).save(tmp_path / "c")


class Cubes(ValueTransform):
    """Value transform that is passed as an object."""

    def transform_value(self, x: Any) -> Any:
        """Return the signed cube root."""
        return x.sign() * x.abs() ** (1 / 3)

    def transform_value_inv(self, x: Any) -> Any:
        """Return the cube."""
        return x**3


@pytest.mark.parametrize("agents", [False, True], ids=["one agent", "agents"])
def test_policies_load_to_act_without_their_value_transform(agents: bool) -> None:
    """A transform that was an object in Python is only needed for values."""
    env = {"_target_": "agent_envs.Heaps"} if agents else {"_target_": "own_envs.SpacesEnv"}
    result = short_run(env=env, **{"model.value_transform": Cubes()})
    policy = load_policy("run", ["agent_envs", "own_envs"])
    with closing(make_env("run", ["agent_envs", "own_envs"])) as made:
        obs, _ = made.reset(seed=0)
    assert str(policy.act(obs)) == str(result.policy.act(obs))
    with pytest.raises(ConfigError, match=r"^model\.value_transform: .* Pass it again"):
        policy.values(obs)


def test_resumed_finished_run_says_how_to_continue(capsys: pytest.CaptureFixture[str]) -> None:
    """The note names the limit; a run that continues prints none."""
    short_run()
    for steps, is_told in ((192, True), (256, False)):
        capsys.readouterr()
        train(resume="run", total_steps=steps, trust=["own_envs"])
        told = "already ended (total_steps); set a larger total_steps; to continue: maze-run"
        assert (told in capsys.readouterr().err) is is_told


def test_train_accepts_sections_and_dotted_names() -> None:
    """Sections, dotted names, config objects and numpy numbers set values."""
    result = train(
        SpacesEnv,
        PPOAlgorithmConfig(n_rollout_steps=10, batch_size=20, gamma=0.5),
        runner={"concurrency": 2},
        total_steps=np.int64(80),  # common in notebooks
        tracking={"progress": "quiet", "plot": False},
        overrides={"model.hidden_sizes": [3]},
        **{"env.kwargs.length": np.int64(2)},
    )
    assert (result.summary.env_steps, result.summary.updates) == (80, 4)
    assert written_config(str(result.run_dir))["model"]["hidden_sizes"] == [3]
    assert result.history[-1]["eval/episode_length_mean"] == 2


@pytest.mark.parametrize(
    ("name", "arguments", "settings", "line"),
    [
        ("PPO", ("MlpPolicy", "Acrobot-v1"), {}, 'train("Acrobot-v1", "ppo", total_steps=100_000)'),
        ("SAC", (nn.Linear,), {"env": "Pendulum-v1"}, 'train("Pendulum-v1", "sac", '),
        ("ESTrainer", ("MlpPolicy",), {}, 'train("CartPole-v1", "es", '),
    ],
)
def test_arguments_of_other_libraries_suggest_the_call(
    name: str, arguments: Any, settings: Any, line: str
) -> None:
    """The error contains the equivalent call."""
    with pytest.raises(TypeError, match=re.escape(line)):
        getattr(maze_train, name)(*arguments, **settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env": 3}, "expected an id"),
        ({"env": SpacesEnv()}, r"env = .*a single instance cannot be shared"),
        ({"env": gymnasium.make("CartPole-v1")}, r"env = .*: pass the id, env='CartPole-v1', or a"),
        ({"env": None}, "env: choose one: env=<registered id>"),
        ({"env.kwargs.length": abs}, r"env\.kwargs\.length"),  # config.yaml cannot represent it
        ({"evaluation": {"n_episode": 5}}, "did you mean evaluation.n_episodes"),
        ({"evaluators": [OwnNet]}, r"evaluators\[0\]\._target_ = .*: expected a subclass of maze_"),
        ({"evaluators": [3]}, r"evaluators\[0\] = 3: expected a mapping"),
        ({"evaluators": CountingEvaluator}, "expected a list"),
        ({"algorithm.n_epochs": abs}, "expected an integer"),
    ],
)
def test_invalid_arguments_raise_before_anything_is_written(
    arguments: dict[str, Any], message: str
) -> None:
    """The message suggests the nearest name; no file is created."""
    with pytest.raises(ConfigError, match=message):
        short_run(**arguments)
    assert list(Path().iterdir()) == []


def test_load_policy_without_policy_raises() -> None:
    """The message names the directory."""
    with pytest.raises(RunDirectoryError, match="nowhere contains no saved policy"):
        load_policy("nowhere")


@pytest.mark.parametrize(
    ("name", "number", "text"),
    [("weight", math.nan, "weight is not finite"), ("weight", -math.inf, "weight is not finite"),
     ("mask", math.nan, "mask is not finite"), ("mask", -math.inf, "")],
)  # fmt: skip
def test_loading_non_finite_weights_raises(name: str, number: float, text: str) -> None:
    """The error names the weight; infinite masks of custom networks are allowed."""
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.zeros(2))
    weights = {**model.state_dict(), name: torch.full_like(model.state_dict()[name], number)}
    told = pytest.raises(RunDirectoryError, match=f"x are damaged: {text}")
    with told if text else nullcontext():
        load_weights(model, weights, Path("x"))


def test_run_can_be_built_from_dataclasses() -> None:
    """A run requires only dataclasses and a runner."""
    config = TrainConfig(
        env=EnvConfig(id="CartPole-v1"), algorithm=PPOAlgorithmConfig(), total_steps=1024, seed=0
    )
    config.tracking.progress = "quiet"
    config.tracking.plot = False
    assert TrainingRunner(config).run().summary.updates == 1
    assert config.run_dir is None


def test_evaluate_equals_a_rollout_of_the_run() -> None:
    """`evaluate` in the environment of the run equals a rollout of the run."""
    wrapper = {"_target_": "own_envs.Scaled", "factor": 3.0}
    short_run(**{"env.wrappers": [wrapper], "env.training_wrappers": [wrapper]})
    played = run_rollout(run="run", n_episodes=7, seed=3, progress="quiet")
    policy = load_policy("run")
    found = evaluate(policy, lambda: make_env("run"), n_episodes=7, seed=3)
    # Compared as strings, since NaN success rates are unequal on Python 3.13.
    assert repr(found) == repr(played.summary)
    others = evaluate(policy, lambda: make_env("run"), n_episodes=7, seed=4)
    assert found.return_mean != others.return_mean
    assert evaluate(lambda obs: 1, lambda: make_env("run", length=4)).return_mean == 12.0
    with make_env("run", training=True, length=2) as env:  # scaled again
        env.reset(seed=0)
        assert [env.step(1)[1] for _ in range(2)] == [9.0, 9.0]
    short = {"id": "CartPole-v1", "max_episode_steps": 4}
    assert evaluate("random", short).length_mean == 4.0
    with pytest.raises(ConfigError, match=r"did you mean env\.max_episode_steps"):
        evaluate("random", {"id": "CartPole-v1", "max_episode_step": 4})
    with pytest.raises(ConfigError, match="n_episodes = 0: expected a number >= 1"):
        evaluate(policy, "CartPole-v1", n_episodes=0)


def test_evaluate_plays_one_episode_at_a_time_in_an_environment_object(capsys: Any) -> None:
    """The results equal those of a class; the environment stays open."""
    with gymnasium.make("CartPole-v1") as env:
        found = evaluate(lambda obs: 1, env, n_episodes=4)
        assert repr(found) == repr(evaluate(lambda obs: 1, "CartPole-v1", n_episodes=4))
        assert env.reset(seed=0)[0].shape == (4,)
    assert capsys.readouterr().err.count("plays one episode at a time") == 1


class Judge(Evaluator):
    """Evaluator that uses every method available to custom evaluators."""

    def __init__(self) -> None:
        self._rollouts = RolloutEvaluator(self.make, n_episodes=3, concurrency=2, prefix="same")

    @staticmethod
    def make(num_envs: int) -> SequentialVectorEnv:
        return SequentialVectorEnv([EnvFactory.from_any("CartPole-v1")] * num_envs)

    def evaluate(self, policy: TrainedPolicy) -> dict[str, float]:
        """Return metrics of the trained policy."""
        obs = np.ones((4, 4), np.float32)
        assert policy.act(obs[0]) == policy.act(obs)[0] == copy.deepcopy(policy).act(obs)[3]
        assert policy.values(obs).shape == (4,)
        assert np.allclose(policy.probabilities(obs).sum(axis=1), 1.0)
        size = sum(x.abs().sum().item() for x in policy.parameters())  # type: ignore[attr-defined]
        played = evaluate(policy, "CartPole-v1", n_episodes=3).return_mean
        with pytest.raises(AttributeError, match="no_such_name"):
            policy.no_such_name  # type: ignore[attr-defined]  # noqa: B018
        return {"own/size": size, "own/played": played, **self._rollouts.evaluate(policy)}

    def close(self) -> None:
        self._rollouts.close()


def test_custom_evaluator_gets_an_acting_policy() -> None:
    """Custom evaluators are called with the trained policy and do not affect training."""
    result = short_run(env="CartPole-v1", evaluators=[Judge()])
    plain = short_run("plain", env="CartPole-v1")
    for row, without in zip(result.history, plain.history, strict=True):
        assert all(row[name] == without[name] for name in without if not name.startswith("time/"))
    sizes = [row["own/size"] for row in result.history]
    assert len(set(sizes)) == len(sizes)
    weights = load_policy("run@final").model.parameters()  # type: ignore[attr-defined]
    assert sizes[-1] == sum(x.abs().sum().item() for x in weights)
    last = result.history[-1]
    played = evaluate(load_policy("run@final"), "CartPole-v1", n_episodes=3)
    assert last["own/played"] == played.return_mean
    same = Judge()._rollouts.evaluate(load_policy("run@final").model)
    assert {name: last[name] for name in same} == same
