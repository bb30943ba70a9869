"""Small problems with known answers, solved from fixed seeds in seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import pytest
from cases import everyday
from gymnasium import spaces

from maze_train import train

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.learning

PPO: dict[str, Any] = {"name": "ppo", "n_rollout_steps": 64, "batch_size": 128, "lr": 3e-3}
A2C: dict[str, Any] = {"name": "a2c", "n_rollout_steps": 16, "lr": 3e-3, "epoch_length": 25}
SAC: dict[str, Any] = {
    "name": "sac",
    "n_rollout_steps": 8,
    "batch_size": 64,
    "initial_buffer_size": 256,
    "update_to_data_ratio": 0.5,
    "lr": 3e-3,
    "epoch_length": 25,
}
BOTH = pytest.mark.parametrize("algorithm", [PPO, A2C], ids=["ppo", "a2c"])
PPO_EVERYDAY = pytest.mark.parametrize("algorithm", everyday(1, [PPO, A2C]), ids=["ppo", "a2c"])


class Imitation(gymnasium.Env[Any, Any]):
    """One step: the reward is the share of the parts of the observation that the action repeats.

    With a Discrete space this is a contextual bandit. Optimum: 1.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.observation_space = self.action_space = space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.wanted = self.observation_space.sample()
        return self.wanted, {}

    def step(self, action: Any) -> Any:
        return self.wanted, float(np.mean(action == self.wanted)), True, False, {}


class Target(gymnasium.Env[Any, Any]):
    """One step towards a target: the reward is minus the squared distance. Optimum: 0."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.target = self.np_random.uniform(-0.8, 0.8, 1).astype(np.float32)
        return self.target, {}

    def step(self, action: Any) -> Any:
        return self.target, -float((action[0] - self.target[0]) ** 2), True, False, {}


class HybridTarget(Target):
    """One step: a number is to be reached and its sign to be named, 0 or 1. Optimum: 1."""

    action_space = spaces.Tuple((spaces.Discrete(2), Target.action_space))

    def step(self, action: Any) -> Any:
        obs, distance, *ends = super().step(action[1])
        return obs, float(action[0] == (self.target[0] > 0)) + distance, *ends


class Chain(gymnasium.Env[Any, Any]):
    """Five states: left ends the episode with 0.1, four times right with 1. Optimum: 1."""

    observation_space = spaces.Discrete(5)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.state = 0
        return self.state, {}

    def step(self, action: Any) -> Any:
        if action == 0:
            return self.state, 0.1, True, False, {}
        self.state += 1
        has_arrived = self.state == 4
        return self.state, float(has_arrived), has_arrived, False, {}


class Endless(gymnasium.Env[Any, Any]):
    """A reward of 1 in every step, cut off after 10 steps; if not, the value is 1 / (1 - gamma)."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, terminates: bool = False) -> None:
        self.terminates = terminates

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        ended = self.t >= 10
        observation = np.zeros(1, np.float32)
        return observation, 1.0, ended and self.terminates, ended and not self.terminates, {}


def learn(tmp_path: Path, env: Any, algorithm: dict[str, Any], **overrides: Any) -> Any:
    """Train on an environment with a fixed seed."""
    settings: dict[str, Any] = {
        "evaluation": {"n_episodes": 100, "concurrency": 50, "interval": 4},
        "model": {"hidden_sizes": [32]},
        "tracking": {"progress": "quiet", "plot": False, "tensorboard": False},
        "total_steps": 25_000,
        "seed": 0,
    }
    return train(
        env=env, algorithm=algorithm, run_dir=str(tmp_path / "run"), **{**settings, **overrides}
    )


@BOTH
def test_a_contextual_bandit(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    """The action that each of six contexts rewards is found."""
    result = learn(tmp_path, lambda: Imitation(spaces.Discrete(6)), algorithm)
    assert result.best_metric == 1.0


@PPO_EVERYDAY
def test_an_action_of_several_parts(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    """Each part of a MultiDiscrete action learns from the reward that they share."""
    result = learn(tmp_path, lambda: Imitation(spaces.MultiDiscrete([2, 3, 4])), algorithm)
    assert result.best_metric == 1.0


@PPO_EVERYDAY
def test_a_continuous_target(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    """The mean of a Gaussian policy reaches targets to within about 0.1."""
    result = learn(tmp_path, Target, algorithm, total_steps=50_000)
    assert result.best_metric > -0.01


@PPO_EVERYDAY
def test_credit_over_time(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    """A late large reward is preferred to a small one that every step offers."""
    result = learn(tmp_path, Chain, algorithm)
    assert result.best_metric == 1.0


@PPO_EVERYDAY
@pytest.mark.parametrize(
    ("terminates", "value"),
    [(False, 10.0), (True, np.mean([(1 - 0.9**k) / 0.1 for k in range(1, 11)]))],
    ids=["truncated", "terminated"],
)
def test_the_value_at_a_time_limit(
    tmp_path: Path, algorithm: dict[str, Any], terminates: bool, value: float
) -> None:
    """After a truncation the world goes on: 1 / (1 - gamma); after a termination it does not.

    The observation says nothing about time, so the critic learns the mean over the ten steps.
    """
    result = learn(
        tmp_path,
        lambda: Endless(terminates),
        {**algorithm, "gamma": 0.9, "gae_lambda": 1.0},
        evaluation={"n_episodes": 0},
        total_steps=40_000,
    )
    assert result.history[-1]["train/values_mean"] == pytest.approx(value, rel=0.03)


def test_ppo_balances_the_pole(tmp_path: Path) -> None:
    """PPO with its default settings reaches a mean return of 475 on CartPole-v1 in 60k steps."""
    result = train(
        env="CartPole-v1",
        algorithm="ppo",
        total_steps=60_000,
        seed=0,
        tracking={"progress": "quiet", "plot": False},
        run_dir=str(tmp_path / "run"),
    )
    assert result.best_metric >= 475


# -- SAC -----------------------------------------------------------------------------------------


def sac_learn(tmp_path: Path, env: Any, steps: int = 4_000, **settings: Any) -> Any:
    """Train SAC with one gradient step for two transitions."""
    return learn(tmp_path, env, {**SAC, **settings}, total_steps=steps)


def test_sac_reaches_a_continuous_target(tmp_path: Path) -> None:
    """The mean of the squashed Gaussian reaches targets to within about 0.1."""
    assert sac_learn(tmp_path, Target).best_metric > -0.01


def test_sac_solves_a_contextual_bandit(tmp_path: Path) -> None:
    """The action that each of six contexts rewards is found."""
    result = sac_learn(tmp_path, lambda: Imitation(spaces.Discrete(6)))
    assert result.best_metric == 1.0


@pytest.mark.exhaustive
def test_sac_learns_an_action_of_both_kinds(tmp_path: Path) -> None:
    """A choice and a number learn from the reward that they share."""
    assert sac_learn(tmp_path, HybridTarget).best_metric > 0.98


@pytest.mark.exhaustive
def test_sac_gives_credit_over_time(tmp_path: Path) -> None:
    """A late large reward is preferred to a small one that every step offers."""
    result = sac_learn(tmp_path, Chain, target_entropy_multiplier=0.3)
    assert result.best_metric == 1.0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("env", "target"),
    [(Target, -0.5), (lambda: Imitation(spaces.Discrete(6)), 0.5 * 0.98 * np.log(6))],
    ids=["continuous", "discrete"],
)
def test_the_entropy_follows_its_target(tmp_path: Path, env: Any, target: float) -> None:
    """By the temperature, from above and although rewards are against it."""
    result = sac_learn(tmp_path, env, steps=8_000, target_entropy_multiplier=0.5)
    rows = [row for row in result.history if "train/policy_entropy" in row]
    assert rows[0]["train/policy_entropy"] > target + 0.2
    assert rows[-1]["train/target_entropy"] == pytest.approx(target)
    assert rows[-1]["train/policy_entropy"] == pytest.approx(target, abs=0.1)


# -- IMPALA --------------------------------------------------------------------------------------


def test_impala_balances_the_pole(tmp_path: Path) -> None:
    """IMPALA reaches a mean return of 475 on CartPole-v1 in 60k steps."""
    result = train(
        env="CartPole-v1",
        algorithm={"name": "impala", "lr": 3e-3},
        total_steps=60_000,
        seed=0,
        tracking={"progress": "quiet", "plot": False, "tensorboard": False},
        run_dir=str(tmp_path / "run"),
    )
    assert result.best_metric >= 475


# -- ES ------------------------------------------------------------------------------------------


def es_learn(tmp_path: Path, env: Any, steps: int, **settings: Any) -> Any:
    """Train ES with 64 episodes an update."""
    return learn(tmp_path, env, {"name": "es", **settings}, total_steps=steps)


@pytest.mark.exhaustive
def test_es_balances_the_pole(tmp_path: Path) -> None:
    """ES with its default settings solves CartPole-v1 in 300k steps: 500 in every episode."""
    result = train(
        env="CartPole-v1",
        algorithm="es",
        total_steps=300_000,
        seed=1,
        tracking={"progress": "quiet", "plot": False, "tensorboard": False},
        run_dir=str(tmp_path / "run"),
    )
    assert result.best_metric == 500


@pytest.mark.parametrize("deterministic", [True, False], ids=["mode", "sampled"])
def test_es_reaches_a_continuous_target(tmp_path: Path, deterministic: bool) -> None:
    """The most likely action reaches targets to within about 0.1."""
    result = es_learn(tmp_path, Target, 16_000, deterministic=deterministic)
    assert result.best_metric > -0.01


def test_es_learns_an_action_of_both_kinds(tmp_path: Path) -> None:
    """A choice and a number learn from the reward that they share."""
    assert es_learn(tmp_path, HybridTarget, 25_000).best_metric > 0.97


def test_es_gives_credit_over_time(tmp_path: Path) -> None:
    """Only the sum of the rewards counts: a late large one is preferred to a small one."""
    assert es_learn(tmp_path, Chain, 15_000).best_metric == 1.0
