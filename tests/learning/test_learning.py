"""Small problems with known answers, solved from fixed seeds in seconds."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import pytest
import torch
from cases import everyday
from goal_envs import PointToGoal
from gymnasium import spaces
from own_callbacks import StopAtReturn

from maze_train import Callback, MultiAgentEnv, Turn, train

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


class Hints(MultiAgentEnv):
    """The speaker says what it sees, the listener hears that alone: 1 for both if it repeats it.

    So they have to agree on a language, and the reward of the speaker comes in the turn of another.
    Optimum: 1.
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


class Rochambeau(MultiAgentEnv):
    """Rock, paper, scissors, in which a rock that wins gets two points: 1/4, 1/2, 1/4 is best."""

    possible_agents = ("left", "right")

    gains = np.array([[0, -1, 2], [1, 0, -1], [-2, 1, 0]])

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(0.0, 1.0, (1,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Turn:
        return Turn({agent: np.ones(1, np.float32) for agent in self.possible_agents})

    def step(self, actions: dict[str, Any]) -> Turn:
        gain = float(self.gains[int(actions["left"]), int(actions["right"])])
        obs = self.reset().obs
        return Turn(obs, {"left": gain, "right": -gain}, terminated=self.possible_agents)


class Probabilities(Callback):
    """Notes the policy `main` after each update."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_update_end(self, run: Any) -> None:
        with torch.no_grad():
            logits = run.model.by_policy["main"].policy_params(torch.ones(1, 1))
        self.seen.append(logits.softmax(-1)[0].numpy())


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
several_parts = partial(Imitation, spaces.MultiDiscrete([2, 3, 4]))


def problem(
    name: str, env: Any, algorithm: dict[str, Any], least: float, steps: int, everyday: bool = True
) -> Any:
    """A problem, its algorithm, the least return that solves it, and steps to get there."""
    marks = () if everyday else pytest.mark.exhaustive
    case = f"{algorithm['name']} {name}"
    return pytest.param(env, algorithm, least, steps, id=case, marks=marks)


PATIENT_SAC = {**SAC, "target_entropy_multiplier": 0.3}
SAMPLED_ES = {**ES, "deterministic": False}


@pytest.mark.parametrize(
    ("env", "algorithm", "least", "steps"),
    [
        problem("bandit", bandit, A2C, 1.0, 25_000),
        problem("parts", several_parts, A2C, 1.0, 25_000, everyday=False),
        # Targets are reached to within about 0.1.
        problem("target", Target, PPO, -0.01, 50_000, everyday=False),
        problem("target", Target, SAC, -0.01, 4_000, everyday=False),
        problem("target", Target, TD3, -0.01, 4_000),
        problem("target", Target, ES, -0.01, 16_000, everyday=False),
        problem("target, sampled", Target, SAMPLED_ES, -0.01, 16_000, everyday=False),
        # A late large reward is preferred to a small one that every step offers.
        problem("chain", Chain, PPO, 1.0, 25_000),
        problem("chain", Chain, PATIENT_SAC, 1.0, 4_000, everyday=False),
        problem("chain", Chain, DQN, 1.0, 4_000),
        problem("chain", Chain, ES, 1.0, 15_000, everyday=False),
        problem("both kinds", HybridTarget, SAC, 0.98, 4_000, everyday=False),
        problem("both kinds", HybridTarget, ES, 0.97, 25_000, everyday=False),
    ],
)
def test_small_problems_are_solved(
    tmp_path: Path, env: Any, algorithm: dict[str, Any], least: float, steps: int
) -> None:
    """The best return, or nearly."""
    enough = [StopAtReturn(least)]
    result = learn(tmp_path, env, algorithm, total_steps=steps, callbacks=enough)
    assert result.best_metric >= least


@pytest.mark.parametrize(("algorithm", "steps"), [(PPO, 25_000), (DQN, 6_000)], ids=["ppo", "dqn"])
@pytest.mark.exhaustive
def test_agents_find_a_language(tmp_path: Path, algorithm: dict[str, Any], steps: int) -> None:
    """Two independent learners, one of which hears nothing but the other."""
    policies = {agent: {"agents": [agent]} for agent in Hints.possible_agents}
    enough = [StopAtReturn(1.0)]
    result = learn(
        tmp_path, Hints, algorithm, total_steps=steps, policies=policies, callbacks=enough
    )
    assert result.best_metric == 1.0


@pytest.mark.exhaustive
def test_self_play_is_an_equilibrium_on_average(tmp_path: Path) -> None:
    """Each policy can be exploited, and is; over all updates they play the best mixture."""
    policies = Probabilities()
    learn(
        tmp_path,
        Rochambeau,
        {**PPO, "n_rollout_steps": 16, "batch_size": 64, "entropy_coef": 0.1, "epoch_length": 2},
        policies={
            "main": {"agents": ["left", "right"], "opponents": {"add_every": 1, "keep": 1000}}
        },
        evaluation={"n_episodes": 0},
        callbacks=[policies],
        model={"hidden_sizes": [8]},
        total_steps=12_000,
    )
    found, equilibrium = np.stack(policies.seen), [0.25, 0.5, 0.25]
    assert (found.max(0) > equilibrium + np.full(3, 0.2)).all()
    np.testing.assert_allclose(found.mean(0), equilibrium, atol=0.06)


@pytest.mark.parametrize(
    ("replay_buffer", "least", "most"),
    [
        ("her", -8.0, 0.0),
        pytest.param("uniform", -20.0, -16.0, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.exhaustive
def test_goals_are_reached_with_hindsight_alone(
    tmp_path: Path, replay_buffer: str, least: float, most: float
) -> None:
    """-1 in each of 20 steps that does not reach the goal: a random walk hardly ever does."""
    algorithm = {**SAC, "replay_buffer": replay_buffer, "gamma": 0.9, "tau": 0.05}
    algorithm |= {"epoch_length": 10, "lr": 1e-3, "update_to_data_ratio": 1.0, "batch_size": 256}
    result = learn(tmp_path, PointToGoal, algorithm, total_steps=3_000)
    assert least <= result.best_metric <= most


@pytest.mark.parametrize(
    ("algorithm", "seed", "steps", "least"),
    [
        ({"name": "ppo"}, 0, 60_000, 475),
        pytest.param({"name": "impala", "lr": 3e-3}, 0, 60_000, 475, marks=pytest.mark.exhaustive),
        pytest.param(ES, 1, 300_000, 500, marks=pytest.mark.exhaustive),
    ],
    ids=["ppo", "impala", "es"],
)
def test_the_pole_is_balanced(
    tmp_path: Path, algorithm: dict[str, Any], seed: int, steps: int, least: float
) -> None:
    """CartPole-v1 is solved with the default settings of networks and evaluations."""
    result = train(
        env="CartPole-v1",
        algorithm=algorithm,
        total_steps=steps,
        seed=seed,
        callbacks=[StopAtReturn(least)],
        tracking={"progress": "quiet", "plot": False, "tensorboard": False},
        run_dir=str(tmp_path / "run"),
    )
    assert result.best_metric >= least


@pytest.mark.parametrize(
    ("terminates", "value"),
    everyday(
        1,
        [(False, 10.0), (True, np.mean([(1 - 0.9**k) / 0.1 for k in range(1, 11)]))],
        are_rows=True,
    ),
    ids=["truncated", "terminated"],
)
def test_the_value_at_a_time_limit(tmp_path: Path, terminates: bool, value: float) -> None:
    """After a truncation the world continues: 1 / (1 - gamma); after a termination it does not.

    The observation says nothing about time, so the critic learns the mean over the ten steps.
    """
    result = learn(
        tmp_path,
        lambda: Endless(terminates),
        {**PPO, "gamma": 0.9, "gae_lambda": 1.0},
        evaluation={"n_episodes": 0},
        total_steps=40_000,
    )
    assert result.history[-1]["train/values_mean"] == pytest.approx(value, rel=0.03)


@pytest.mark.exhaustive
def test_the_entropy_follows_its_target(tmp_path: Path) -> None:
    """By the temperature, from above and although rewards are against it."""
    target = 0.5 * 0.98 * np.log(6)
    result = learn(tmp_path, bandit, {**SAC, "target_entropy_multiplier": 0.5}, total_steps=8_000)
    rows = [row for row in result.history if "train/policy_entropy" in row]
    assert rows[0]["train/policy_entropy"] > target + 0.2
    assert rows[-1]["train/target_entropy"] == pytest.approx(target)
    assert rows[-1]["train/policy_entropy"] == pytest.approx(target, abs=0.1)
