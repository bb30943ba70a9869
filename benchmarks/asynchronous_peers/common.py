"""Shared code of the peer scripts: workloads, environments, and timing."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass, field
from typing import Any

# Must be set before PyTorch is imported; inherited by processes that the peers start.
os.environ["OMP_NUM_THREADS"] = "1"

import gymnasium
import numpy as np
import numpy.typing as npt

UNROLL = 20
WARM_UP_UPDATES = 20
WARM_UP_SECONDS = 3.0


@dataclass(frozen=True)
class Workload:
    """Environment, number of environments per actor, and steps per update."""

    env: str
    envs_per_actor: int
    batch_size: int


WORKLOADS = {"cartpole": Workload("CartPole-v1", 16, 640), "pong": Workload("ALE/Pong-v5", 8, 320)}

PPO = {"rollout": 128, "envs": 8, "minibatch": 256, "passes": 4}
"""PPO: rollout steps, total number of environments, minibatch size, epochs."""
PPO_ENVS = {"cartpole": "CartPole-v1", "cheetah": "HalfCheetah-v5", "pong": "ALE/Pong-v5"}


class StackWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Stacks the last four frames; gymnasium's wrapper differs between versions."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
        self.screens = np.zeros((4, 84, 84), np.uint8)

    def reset(self, **kwargs: Any) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
        """Reset, and repeat the first frame four times."""
        screen, info = self.env.reset(**kwargs)
        self.screens[:] = screen
        return self.screens.copy(), info

    def step(self, action: Any) -> tuple[npt.NDArray[np.uint8], Any, bool, bool, dict[str, Any]]:
        """Step, and drop the oldest frame."""
        screen, reward, terminated, truncated, info = self.env.step(action)
        self.screens = np.concatenate([self.screens[1:], screen[None]])
        return self.screens.copy(), reward, terminated, truncated, info


def make_env(env_id: str) -> gymnasium.Env[Any, Any]:
    """Create the environment, with standard preprocessing for Atari games."""
    if not env_id.startswith("ALE/"):
        return gymnasium.make(env_id, disable_env_checker=True)
    import ale_py
    import cv2

    cv2.setNumThreads(1)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    if env_id not in gymnasium.registry:
        gymnasium.register_envs(ale_py)
    game = gymnasium.make(env_id, frameskip=1, disable_env_checker=True)
    return StackWrapper(gymnasium.wrappers.AtariPreprocessing(game))


@dataclass
class Window:
    """Counts updates from the end of the warm-up until `seconds` have passed.

    The window starts and ends at the end of an update, so that whole updates are counted, with
    their time including waiting.

    Args:
        seconds: Duration, > 0.
    """

    seconds: float
    warm_up: list[float] = field(default_factory=list)
    opened: float = 0.0
    closed: float = 0.0
    busy: float = 0.0
    steps: int = 0
    updates: int = 0

    @property
    def is_over(self) -> bool:
        """Whether the measurement is complete."""
        return self.closed - self.opened >= self.seconds

    def add(self, began: float, ended: float, steps: int) -> None:
        """Count an update on `steps` transitions between two time stamps."""
        if self.is_over:
            return
        if not self.opened:
            self.warm_up.append(ended)
            passed = ended - self.warm_up[0]
            if len(self.warm_up) >= WARM_UP_UPDATES and passed >= WARM_UP_SECONDS:
                self.opened = self.closed = ended
            return
        self.closed = ended
        self.busy += ended - began
        self.steps += steps
        self.updates += 1

    def print(self) -> None:
        """Print the result as a line of JSON."""
        elapsed = self.closed - self.opened
        result = {
            "rate": self.steps / elapsed,
            "learner_wait": 1.0 - self.busy / elapsed,
            "steps": self.steps,
            "updates": self.updates,
        }
        print(json.dumps(result), flush=True)


def parse_arguments() -> argparse.Namespace:
    """Parse the arguments common to all peers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--algorithm", choices=["impala", "ppo"], default="impala")
    parser.add_argument("--env", choices=list(PPO_ENVS), required=True)
    parser.add_argument("--actors", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=20.0)
    return parser.parse_args()
