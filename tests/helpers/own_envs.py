"""Custom environments that worker processes can import quickly."""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces


def newest(name: str) -> str:
    """Return the id of the latest version of an environment of Gymnasium."""
    known = gymnasium.registry.values()
    own = [spec for spec in known if spec.name == name and spec.namespace is None]
    return max(own, key=lambda spec: spec.version or 0).id


def vector(low: float = -1.0, size: int = 3) -> spaces.Box:
    """Return a vector space; each environment seeds its spaces, so they are not shared."""
    return spaces.Box(low, 1.0, (size,), np.float32)


OBSERVATION_SPACES: dict[str, Any] = {
    "box": vector,
    "dict": lambda: spaces.Dict({"place": spaces.Discrete(3), "speed": vector()}),
    "counts": lambda: spaces.Tuple(
        (spaces.Discrete(4, start=1), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3))
    ),
    "image": lambda: spaces.Box(0, 255, (3, 16, 16), np.uint8),
    "mask": lambda: spaces.Dict({"obs": vector(), "action_mask": spaces.MultiBinary(4)}),
    "part mask": lambda: spaces.Dict(
        {"obs": vector(), "action_mask": spaces.Dict({"choice": spaces.MultiBinary(4)})}
    ),
}
ACTION_SPACES: dict[str, Any] = {
    "discrete": lambda: spaces.Discrete(3, start=-1),
    "multi_discrete": lambda: spaces.MultiDiscrete([2, 3]),
    "multi_binary": lambda: spaces.MultiBinary(3),
    "box": lambda: vector(-2.0, 2),
    "tuple": lambda: spaces.Tuple((spaces.Discrete(2), spaces.Box(-1.0, 1.0, (1,), np.float32))),
    "dict": lambda: spaces.Dict(
        {
            "gear": spaces.Discrete(3),
            "arm": spaces.Dict({"force": vector(-2.0, 2), "on": spaces.MultiBinary(2)}),
        }
    ),
    "boxes": lambda: spaces.Tuple(
        (vector(-2.0, 2), spaces.Dict({"turn": spaces.Box(-1.0, 1.0, (1, 2), np.float32)}))
    ),
    "choice": lambda: spaces.Discrete(4),
    "choice and number": lambda: spaces.Dict(
        {"choice": spaces.Discrete(4), "number": spaces.Box(-200.0, 200.0, (1,), np.float32)}
    ),
}


class SpacesEnv(gymnasium.Env[Any, Any]):
    """Environment with random observations of a named space; raises on invalid or illegal actions.

    The reward is the sum of the action. A class attribute counts the open environments.
    """

    open_envs: ClassVar[int] = 0

    def __init__(self, obs: str = "box", action: str = "discrete", length: int = 5) -> None:
        self.observation_space = OBSERVATION_SPACES[obs]()
        self.action_space = ACTION_SPACES[action]()
        self.length = length
        self.t = 0
        SpacesEnv.open_envs += 1

    def observe(self) -> Any:
        self.obs = self.observation_space.sample()
        if (mask := mask_of(self.obs)) is not None:
            legal = self.np_random.integers(4)
            mask[legal], mask[legal - 1] = 1, 0
        return self.obs

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        if (mask := mask_of(self.obs)) is not None:
            assert mask[action["choice"] if isinstance(action, dict) else action] == 1
        self.t += 1
        return self.observe(), total(action), self.t >= self.length, False, {}

    def close(self) -> None:
        SpacesEnv.open_envs -= 1


def mask_of(obs: Any) -> Any:
    """Return the mask of legal choices in an observation, or None."""
    mask = obs.get("action_mask") if isinstance(obs, dict) else None
    return mask["choice"] if isinstance(mask, dict) else mask


def total(action: Any) -> float:
    """Return the sum of all values of an action."""
    if isinstance(action, dict):
        return total(tuple(action.values()))
    return sum(map(total, action)) if isinstance(action, tuple) else float(np.sum(action))


class FaultyEnv(SpacesEnv):
    """Environment that fails at a step, counted over all episodes."""

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


class DiesOnce(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that kills the first worker process that makes `at` steps in one environment.

    The marker is a file that exists until then.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], marker: str, at: int = 13) -> None:
        super().__init__(env)
        self.marker, self.at = Path(marker), at

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, or kill the process."""
        self.at -= 1
        if self.at == 0 and multiprocessing.parent_process() is not None:
            with suppress(FileNotFoundError):
                self.marker.unlink()  # by one process only
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def make_env(length: int = 3) -> SpacesEnv:
    """Create an environment."""
    return SpacesEnv(length=length)


class Scaled(gymnasium.RewardWrapper[Any, Any]):
    """Wrapper that scales rewards."""

    def __init__(self, env: gymnasium.Env[Any, Any], factor: float = 2.0) -> None:
        super().__init__(env)
        self.factor = factor

    def reward(self, reward: Any) -> float:
        return float(reward) * self.factor


class Curriculum(SpacesEnv):
    """Environment with state whose rewards increase with each episode."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.stage = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.stage += 1
        self.seed = seed
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        obs, reward, *ends = super().step(action)
        return obs, reward + self.stage, *ends

    def state_dict(self) -> dict[str, Any]:
        return {"stage": self.stage, "seed": self.seed, "t": self.t}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reset(seed=state["seed"])
        for _ in range(state["t"]):
            self.observe()
        self.stage, self.t = state["stage"], state["t"]
