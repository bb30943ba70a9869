"""Parts that a user writes and names by `_target_`; importable by worker processes."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from maze_train import (
    Categorical,
    Evaluator,
    MetricsWriter,
    PPOAlgorithmConfig,
    PPOLearner,
    ValueTransform,
)

OBSERVATION_SPACES: dict[str, Any] = {
    "box": lambda: spaces.Box(-1.0, 1.0, (3,), np.float32),
    "discrete": lambda: spaces.Discrete(4, start=1),
    "multi_discrete": lambda: spaces.MultiDiscrete([2, 3]),
    "multi_binary": lambda: spaces.MultiBinary(3),
    "dict": lambda: spaces.Dict(
        {"place": spaces.Discrete(3), "speed": spaces.Box(-1.0, 1.0, (2,), np.float32)}
    ),
    "tuple": lambda: spaces.Tuple((spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,), np.float32))),
}
ACTION_SPACES: dict[str, Any] = {
    "discrete": lambda: spaces.Discrete(3, start=-1),
    "multi_discrete": lambda: spaces.MultiDiscrete([2, 3]),
    "box": lambda: spaces.Box(-2.0, 1.0, (2,), np.float32),
    "tuple": lambda: spaces.Tuple((spaces.Discrete(2), spaces.Box(-1.0, 1.0, (1,), np.float32))),
}


class SpacesEnv(gymnasium.Env[Any, Any]):
    """Random observations of a named space; refuses actions that are not in its action space.

    The reward is the sum of the action. A class attribute counts the environments that are open.
    """

    open_envs: ClassVar[int] = 0

    def __init__(self, obs: str = "box", action: str = "discrete", length: int = 5) -> None:
        self.observation_space = OBSERVATION_SPACES[obs]()
        self.action_space = ACTION_SPACES[action]()
        self.length = length
        self.t = 0
        SpacesEnv.open_envs += 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.t += 1
        parts = action if isinstance(action, tuple) else (action,)
        reward = float(sum(np.sum(part) for part in parts))
        return self.observation_space.sample(), reward, self.t >= self.length, False, {}

    def close(self) -> None:
        SpacesEnv.open_envs -= 1


class FaultyEnv(SpacesEnv):
    """Goes wrong at a step, counted over all episodes of one environment."""

    def __init__(self, fault: str = "raise", at: int = 50) -> None:
        super().__init__()
        self.fault = fault
        self.at = at
        self.total = 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        self.total += 1
        if self.total >= self.at:
            if self.fault == "raise":
                raise RuntimeError("the wheel came off")
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "nan_reward":
                reward = float("nan")
            if self.fault == "nan_observation":
                obs = np.full(3, np.nan, np.float32)
        return obs, reward, terminated, truncated, info


def make_env(length: int = 3) -> SpacesEnv:
    """A factory of environments."""
    return SpacesEnv(length=length)


class Scaled(gymnasium.RewardWrapper[Any, Any]):
    """Multiplies rewards."""

    def __init__(self, env: gymnasium.Env[Any, Any], factor: float = 2.0) -> None:
        super().__init__(env)
        self.factor = factor

    def reward(self, reward: Any) -> float:
        return float(reward) * self.factor


class OwnNet(torch.nn.Module):
    """A network of one's own, for policy, critic or trunk."""

    def __init__(self, observation_space: Any, output_size: int, width: int = 7) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(observation_space.shape[0], width),
            torch.nn.ReLU(),
            torch.nn.Linear(width, output_size),
        )

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(obs)
        return output


class NarrowNet(OwnNet):
    """A network with a wrong number of outputs."""

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return super().forward(obs)[..., :1]


class LastAction(Categorical):
    """A distribution whose most likely action is always the last one."""

    def mode(self, params: torch.Tensor) -> torch.Tensor:
        return torch.full(params.shape[:-1], params.shape[-1] - 1)


class Halved(ValueTransform):
    """h(x) = x / 2; counts how often it is asked."""

    calls: ClassVar[int] = 0

    def transform_value(self, x: Any) -> torch.Tensor:
        Halved.calls += 1
        return torch.as_tensor(x) / 2

    def transform_value_inv(self, x: Any) -> torch.Tensor:
        return torch.as_tensor(x) * 2


class CountingEvaluator(Evaluator):
    """Reports how often it was called."""

    closed: ClassVar[int] = 0

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.calls = 0

    def evaluate(self, policy: Any) -> dict[str, float]:
        self.calls += 1
        return {"own/calls": self.scale * self.calls}

    def close(self) -> None:
        CountingEvaluator.closed += 1


class LineWriter(MetricsWriter):
    """Appends the number of the epoch to a file."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def write(self, row: Any) -> None:
        with self.path.open("a") as file:
            file.write(f"{row['epoch']}\n")


@dataclass(kw_only=True)
class OwnPPOConfig(PPOAlgorithmConfig):
    """PPO with a setting of its own."""

    name: ClassVar[str] = "own_ppo"
    learner_class: ClassVar[str] = "own_parts.OwnPPOLearner"

    penalty: float = 0.1
    """Something that the learner reads."""


class OwnPPOLearner(PPOLearner):
    """Notes its setting in each update."""

    seen: ClassVar[list[float]] = []

    def before_gradient_based_update(self, progress: Any, statistics: Any) -> None:
        super().before_gradient_based_update(progress, statistics)
        OwnPPOLearner.seen.append(self.config.penalty)  # type: ignore[attr-defined]  # OwnPPOConfig
