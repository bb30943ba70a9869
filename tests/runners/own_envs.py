"""Environments that a user writes; importable by worker processes, and quickly so."""

from __future__ import annotations

import os
import signal
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

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
