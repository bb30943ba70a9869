"""Small environments with known behaviour."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class CountingEnv(gymnasium.Env[Any, Any]):
    """Observes (episode seed mod 1000, step); reward is the step; ends as it is told."""

    def __init__(self, length: int = 5, truncate: bool = False) -> None:
        self.observation_space = spaces.Box(-1.0, 1e6, (2,), np.float32)
        self.action_space = spaces.Discrete(3)
        self.length = length
        self.truncate = truncate
        self.seeds: list[int | None] = []
        self.t = 0

    def observe(self) -> Any:
        return np.array([(self.seeds[-1] or 0) % 1000, self.t], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.t = 0
        return self.observe(), {"options": str(options)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        ended = self.t >= self.length
        info = {"t": self.t, "half": 0.5 * self.t}
        return (
            self.observe(),
            float(self.t),
            ended and not self.truncate,
            ended and self.truncate,
            info,
        )


class AwkwardEnv(CountingEnv):
    """Reuses one read-only float64 buffer for its observations."""

    def observe(self) -> Any:
        if not hasattr(self, "buffer"):
            self.buffer = np.zeros(2, np.float64)
        self.buffer.flags.writeable = True
        self.buffer[:] = super().observe()
        self.buffer.flags.writeable = False
        return self.buffer


class NestedEnv(gymnasium.Env[Any, Any]):
    """Nested random observations, and nested actions that come back in the reward."""

    def __init__(self, length: int = 7) -> None:
        self.observation_space = spaces.Dict(
            {
                "robot": spaces.Tuple(
                    (spaces.Box(0.0, 1.0, (2, 2), np.float64), spaces.Discrete(10))
                ),
                "image": spaces.Box(0, 255, (3, 4, 1), np.uint8),
            }
        )
        self.action_space = spaces.Tuple(
            (spaces.Discrete(3), spaces.Dict({"force": spaces.Box(-1.0, 1.0, (2,), np.float32)}))
        )
        self.length = length
        self.t = 0

    def observe(self) -> Any:
        return {
            "robot": (self.np_random.random((2, 2)), int(self.np_random.integers(10))),
            "image": self.np_random.integers(0, 256, (3, 4, 1), dtype=np.uint8),
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        gear, arm = action
        self.t += 1
        reward = float(gear) + float(arm["force"].sum())
        arm["force"] += 100.0  # An environment may spoil the action that it was given.
        return self.observe(), reward, self.t >= self.length, False, {"t": self.t}


class FailingEnv(CountingEnv):
    """Fails in the way and at the step of the first episode that it is told."""

    def __init__(self, how: str = "raise", at: int = 3) -> None:
        super().__init__(length=100)
        self.how = how
        self.at = at
        if how == "constructor":
            raise ValueError("no such level")
        if how == "spaces":
            self.observation_space = spaces.Box(-1.0, 1e6, (3,), np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        if self.t == self.at:
            obs, info = self.fail(obs, info)
        return obs, reward, terminated, truncated, info

    def fail(self, obs: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self.how == "raise":
            raise RuntimeError("the wheel came off")
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "exit":
            os._exit(7)
        if self.how == "sys.exit":
            sys.exit(0)
        if self.how == "hang":
            time.sleep(60.0)
        if self.how == "shape":
            obs = np.zeros((1, 2), np.float32)
        return obs, info


class OddInfoEnv(CountingEnv):
    """Returns infos whose types and shapes differ between environments."""

    def __init__(self, index: int) -> None:
        super().__init__(length=1)
        self.index = index

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = super().step(action)
        score = [0, 0.5, 2][self.index]
        return (
            obs,
            reward,
            terminated,
            truncated,
            {"score": score, "path": np.zeros(self.index + 1)},
        )


class SpoiltEnv(gymnasium.Env[Any, Any]):
    """Observes a dict; spoils a part of it, or the reward, at a step of its first episodes."""

    def __init__(
        self,
        where: str = "",
        at: int = 3,
        value: float = float("nan"),
        episodes: int = 1,
        length: int = 5,
        truncate: bool = True,
    ) -> None:
        self.observation_space = spaces.Dict(
            {
                "count": spaces.Discrete(1000),
                "speed": spaces.Box(-np.inf, np.inf, (2, 3), np.float32),
                "temperature": spaces.Box(-np.inf, np.inf, (), np.float64),
            }
        )
        self.action_space = spaces.Discrete(2)
        self.where, self.at, self.value, self.episodes = where, at, value, episodes
        self.length, self.truncate = length, truncate
        self.t = self.begun = 0

    def observe(self) -> Any:
        speed = np.full((2, 3), self.t, np.float32)
        temperature = np.float64(self.t)
        if self.t == self.at and self.begun <= self.episodes:
            if self.where == "speed":
                speed[1, 2] = self.value
            if self.where == "temperature":
                temperature = np.float64(self.value)
        return {"count": self.t, "speed": speed, "temperature": temperature}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        self.begun += 1
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        spoilt = self.where == "reward" and self.t == self.at and self.begun <= self.episodes
        ended = self.t >= self.length
        return (
            self.observe(),
            self.value if spoilt else 1.0,
            ended and not self.truncate,
            ended and self.truncate,
            {},
        )


class AddOne(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Adds a number to every observation."""

    def __init__(self, env: gymnasium.Env[Any, Any], amount: float = 1.0) -> None:
        super().__init__(env)
        self.amount = amount

    def observation(self, observation: Any) -> Any:
        return observation + np.float32(self.amount)


def not_an_env() -> str:
    """A factory that returns something else."""
    return "hello"


class ThreadCountingEnv(CountingEnv):
    """Imports torch when it is built, and observes how many threads torch then uses."""

    def __init__(self) -> None:
        super().__init__()
        import torch

        self.torch = torch

    def observe(self) -> Any:
        return np.full(2, self.torch.get_num_threads(), np.float32)
