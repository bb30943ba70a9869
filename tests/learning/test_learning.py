"""Small problems with known solutions are solved within seconds from fixed seeds."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import pytest
from cases import everyday
from goal_envs import PointToGoal
from gymnasium import spaces
from own_callbacks import StopAtReturn

from maze_train import MultiAgentEnv, Turn, train

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
TD3: dict[str, Any] = {**SAC, "name": "td3", "lr": 1e-3}
DQN: dict[str, Any] = {**SAC, "name": "dqn", "target_update_interval": 50}
ES: dict[str, Any] = {"name": "es"}


class Imitation(gymnasium.Env[Any, Any]):
    """Single-step environment; the reward is the fraction of entries that the action repeats.

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
    """Single-step environment whose reward is minus the squared distance. Optimum: 0."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.target = self.np_random.uniform(-0.8, 0.8, 1).astype(np.float32)
        return self.target, {}

    def step(self, action: Any) -> Any:
        return self.target, -float((action[0] - self.target[0]) ** 2), True, False, {}


class HybridTarget(Target):
    """Single-step environment with a target value and its sign, 0 or 1, as action. Optimum: 1."""

    action_space = spaces.Tuple((spaces.Discrete(2), Target.action_space))

    def step(self, action: Any) -> Any:
        obs, distance, *ends = super().step(action[1])
        return obs, float(action[0] == (self.target[0] > 0)) + distance, *ends


class Chain(gymnasium.Env[Any, Any]):
    """Five states: left ends the episode with 0.1, right reaches 1 after four steps. Optimum: 1."""

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
    """Environment with a reward of 1 in every step, truncated after 10 steps."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.zeros(1, np.float32), 1.0, False, self.t >= 10, {}


class Hints(MultiAgentEnv):
    """The listener only observes the speaker's action and must name what the speaker observes.

    Both get a reward of 1 for a correct answer, so they have to agree on a language. The speaker is
    rewarded in the listener's turn. Optimum: 1.
    """

    possible_agents = ("speaker", "listener")

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3)

    action_space = observation_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Turn:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.wanted = int(self.rng.integers(3))
        return Turn({"speaker": self.wanted})

    def step(self, actions: dict[str, Any]) -> Turn:
        if "speaker" in actions:
            return Turn({"listener": actions["speaker"]})
        reward = float(actions["listener"] == self.wanted)
        both = dict.fromkeys(self.possible_agents, reward)
        return Turn({}, both, terminated=self.possible_agents)


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


bandit = partial(Imitation, spaces.Discrete(6))


def problem(
    name: str, env: Any, algorithm: dict[str, Any], least: float, steps: int, everyday: bool = True
) -> Any:
    """Return a test case: problem, algorithm, minimum return, and number of steps."""
    marks = () if everyday else pytest.mark.exhaustive
    case = f"{algorithm['name']} {name}"
    return pytest.param(env, algorithm, least, steps, id=case, marks=marks)


SAMPLED_ES = {**ES, "deterministic": False}


@pytest.mark.parametrize(
    ("env", "algorithm", "least", "steps"),
    [
        problem("bandit", bandit, A2C, 1.0, 25_000),
        # Targets are reached to within about 0.1.
        problem("target", Target, SAC, -0.01, 4_000, everyday=False),
        problem("target", Target, TD3, -0.01, 4_000),
        problem("target, sampled", Target, SAMPLED_ES, -0.01, 16_000, everyday=False),
        # A large late reward is preferred to a small immediate one.
        problem("chain", Chain, PPO, 1.0, 25_000),
        problem("chain", Chain, DQN, 1.0, 4_000),
        problem("chain", Chain, ES, 1.0, 15_000, everyday=False),
        problem("both kinds", HybridTarget, SAC, 0.98, 4_000, everyday=False),
    ],
)
def test_algorithms_solve_small_problems(
    tmp_path: Path, env: Any, algorithm: dict[str, Any], least: float, steps: int
) -> None:
    """The best evaluation reaches the minimum return."""
    enough = [StopAtReturn(least)]
    result = learn(tmp_path, env, algorithm, total_steps=steps, callbacks=enough)
    assert result.best_metric >= least


@pytest.mark.exhaustive
def test_agents_learn_to_communicate(tmp_path: Path) -> None:
    """Two independent policies learn to communicate."""
    policies = {agent: {"agents": [agent]} for agent in Hints.possible_agents}
    enough = [StopAtReturn(1.0)]
    result = learn(tmp_path, Hints, DQN, total_steps=6_000, policies=policies, callbacks=enough)
    assert result.best_metric == 1.0


@pytest.mark.exhaustive
def test_hindsight_replay_reaches_goals(tmp_path: Path) -> None:
    """Each of 20 steps without reaching the goal costs 1; without HER, returns are below -16."""
    algorithm = {**SAC, "replay_buffer": "her", "gamma": 0.9, "tau": 0.05}
    algorithm |= {"epoch_length": 10, "lr": 1e-3, "update_to_data_ratio": 1.0, "batch_size": 256}
    result = learn(tmp_path, PointToGoal, algorithm, total_steps=3_000)
    assert result.best_metric >= -8.0


@pytest.mark.parametrize(
    "algorithm", everyday(1, [{"name": "ppo"}, {"name": "impala", "lr": 3e-3}])
)
def test_ppo_solves_cartpole(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    """CartPole-v1 is solved with default networks and evaluations."""
    result = train(
        env="CartPole-v1",
        algorithm=algorithm,
        total_steps=60_000,
        seed=0,
        callbacks=[StopAtReturn(475)],
        tracking={"progress": "quiet", "plot": False, "tensorboard": False},
        run_dir=str(tmp_path / "run"),
    )
    assert result.best_metric >= 475


def test_value_is_bootstrapped_at_time_limits(tmp_path: Path) -> None:
    """Values are bootstrapped after a truncation: the value is 1 / (1 - gamma)."""
    result = learn(
        tmp_path,
        Endless,
        {**PPO, "gamma": 0.9, "gae_lambda": 1.0},
        evaluation={"n_episodes": 0},
        total_steps=25_000,
    )
    assert result.history[-1]["train/values_mean"] == pytest.approx(10.0, rel=0.03)
