"""Training and acting from Python: `train` and `load_policy`."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import maze_train
from maze_train import EnvConfig, PPOAlgorithmConfig, TrainConfig, load_policy, train
from maze_train.errors import ConfigError, RunDirectoryError, SpaceError
from maze_train.runners.base import TrainingRunner
from maze_train.runners.saved_policies import load_weights


class Steps(gymnasium.Env[Any, Any]):
    """Ends after some steps; the reward is the action."""

    def __init__(self, length: int = 3, observation_space: Any = None) -> None:
        self.observation_space = observation_space or spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.length = length

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.observation_space.sample(), float(action), self.t >= self.length, False, {}


NESTED = spaces.Dict(
    {
        "robot": spaces.Tuple((spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,), np.float32))),
        "goal": spaces.Discrete(2),
    }
)


@pytest.fixture(autouse=True)
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are written to an empty directory."""
    monkeypatch.chdir(tmp_path)


def short(env: Any = Steps, algorithm: Any = "a2c", **overrides: Any) -> Any:
    """A run of a moment."""
    settings: dict[str, Any] = {
        "total_steps": 80,
        "seed": 0,
        "evaluation": {"n_episodes": 2},
        "tracking": {"progress": "quiet", "plot": False, "tensorboard": False},
        "run_dir": "run",
    }
    return train(env=env, algorithm=algorithm, **{**settings, **overrides})


@pytest.mark.parametrize(
    ("env", "length"),
    [
        ({"id": "CartPole-v1", "max_episode_steps": 4}, 4),
        (Steps, 3),
        (lambda: Steps(5), 5),
        (EnvConfig(id="CartPole-v1", max_episode_steps=6), 6),
        ("CartPole-v1", None),
    ],
    ids=["mapping", "class", "lambda", "EnvConfig", "id"],
)
def test_an_environment_is_named_in_many_ways(env: Any, length: int | None) -> None:
    """A mapping, a class, a function, a config and an id all name an environment."""
    result = short(env)
    assert length in (None, result.history[-1]["eval/episode_length_mean"])
    assert result.summary.env_steps >= 80
    assert result.policy.act(result.policy.observation_space.sample()) in (0, 1)


def test_the_result_tells_what_happened() -> None:
    """History, summary, run directory and policy belong to the run."""
    result = short(algorithm={"name": "a2c", "epoch_length": 1})
    assert [row["epoch"] for row in result.history] == [1, 2]
    assert result.summary.stop_reason == "total_steps"
    assert result.run_dir == Path("run").absolute()
    assert result.best_metric == max(row["eval/episode_return_mean"] for row in result.history)
    assert json.loads(Path("run/summary.json").read_text())["best_metric"] == result.best_metric


def test_the_policy_of_the_result_is_the_best_one_and_the_saved_one() -> None:
    """`result.policy` and `load_policy` act equally, with the weights of the best epoch."""
    result = short("CartPole-v1", total_steps=400)
    obs = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    loaded = load_policy("run")
    params = (policy.model.state_dict() for policy in (result.policy, loaded))
    for one, other in zip(*(state.values() for state in params), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(result.policy.act(obs), loaded.act(obs))
    np.testing.assert_array_equal(load_policy(Path("run/best")).act(obs), loaded.act(obs))


def test_a_policy_acts_on_one_observation_and_on_a_batch() -> None:
    """A batch gets a batch of actions, equal to those of its rows; sampling is reproducible."""
    short("Pendulum-v1")
    policy, again = load_policy("run"), load_policy("run")
    obs = np.random.default_rng(1).uniform(-1, 1, (6, 3)).astype(np.float32)
    actions = policy.act(obs)
    assert actions.shape == (6, 1)
    np.testing.assert_allclose([policy.act(row) for row in obs], actions, rtol=1e-5)
    sampled = policy.act(obs, deterministic=False)
    assert not np.array_equal(sampled, actions)
    np.testing.assert_array_equal(sampled, again.act(obs, deterministic=False))
    assert policy.action_space.contains(policy.act(obs[0], deterministic=False))


def test_a_policy_acts_on_nested_observations_as_the_environment_gives_them() -> None:
    """Observations of Dict and Tuple spaces need no flattening, single or batched."""
    result = short(lambda: Steps(observation_space=NESTED))
    for policy in (result.policy, load_policy("run")):
        assert policy.observation_space == NESTED
        assert policy.act(NESTED.sample()) in (0, 1)
        batch = {
            "robot": (np.array([0, 2]), np.zeros((2, 2), np.float32)),
            "goal": np.array([1, 0]),
        }
        assert policy.act(batch).shape == (2,)


@pytest.mark.parametrize("shape", [(), (3,), (1, 1, 2)])
def test_a_wrong_observation_is_refused(shape: tuple[int, ...]) -> None:
    """What is neither an observation nor a batch of them is named with its shape."""
    policy = short().policy
    with pytest.raises(SpaceError, match="neither one observation"):
        policy.act(np.zeros(shape, np.float32))


def test_settings_are_given_by_section_and_by_dotted_name() -> None:
    """Sections, dotted names, ready-made configs and numbers of numpy all set values."""
    result = short(
        algorithm=PPOAlgorithmConfig(n_rollout_steps=10, batch_size=20, gamma=0.5),
        runner={"concurrency": 2},
        total_steps=np.int64(80),  # numbers of a notebook are often numpy's
        **{"model.hidden_sizes": [3], "env.kwargs.length": np.int64(2)},
    )
    assert result.summary.env_steps == 80
    assert result.summary.updates == 4
    assert result.policy.model.policy.net is not None
    assert result.history[-1]["eval/episode_length_mean"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env": "CratPole-v1"}, "CartPole-v1"),
        ({"env": 3}, "expected an id"),
        ({"env": Steps()}, "expected an id"),
        ({"env": None}, "env: choose one: env=<registered id>"),
        ({"algorithm": "pp"}, "did you mean ppo"),
        ({"env.kwargs.length": abs}, r"env\.kwargs\.length"),  # config.yaml could not hold it
        ({"algoritm": "ppo"}, "did you mean algorithm"),
        ({"evaluation": {"n_episode": 5}}, "did you mean evaluation.n_episodes"),
        ({"total_steps": "many"}, "expected an integer"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_written(
    arguments: dict[str, Any], message: str
) -> None:
    """The message names the nearest correct name; no file appears."""
    with pytest.raises(ConfigError, match=message):
        short(**arguments)
    assert list(Path().iterdir()) == []


def test_a_directory_without_a_policy_is_an_error() -> None:
    """The message names the directory; so it does when a file is damaged."""
    with pytest.raises(RunDirectoryError, match="nowhere holds no saved policy"):
        load_policy("nowhere")
    short()
    Path("run/best/policy.pt").write_bytes(b"nonsense")
    with pytest.raises(RunDirectoryError, match="damaged"):
        load_policy("run")


@pytest.mark.parametrize(
    ("name", "number", "text"),
    [("weight", math.nan, "weight is not finite"), ("weight", -math.inf, "weight is not finite"),
     ("mask", math.nan, "mask is not finite"), ("mask", -math.inf, "")],
)  # fmt: skip
def test_weights_that_are_not_finite_are_refused(name: str, number: float, text: str) -> None:
    """With their name; a mask of an own network may hold infinities."""
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.zeros(2))
    weights = {**model.state_dict(), name: torch.full_like(model.state_dict()[name], number)}
    told = pytest.raises(RunDirectoryError, match=f"x are damaged: {text}")
    with told if text else nullcontext():
        load_weights(model, weights, Path("x"))


def test_every_part_can_be_built_without_hydra() -> None:
    """Dataclasses and a runner are enough for a run."""
    config = TrainConfig(
        env=EnvConfig(id="CartPole-v1"), algorithm=PPOAlgorithmConfig(), total_steps=1024, seed=0
    )
    config.tracking.progress = "quiet"
    config.tracking.plot = False
    assert TrainingRunner(config).run().summary.updates == 1
    assert config.run_dir is None


def test_a_name_that_is_missing() -> None:
    """The package says so, as modules do."""
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        maze_train.trian  # noqa: B018
