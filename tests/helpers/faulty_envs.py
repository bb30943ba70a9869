"""Environments that fail once or repeatedly."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class FaultyEnv(gymnasium.Env[Any, Any]):
    """Environment that fails at a step, only once if a marker file is given.

    Args:
        fault: Kind of fault: raise, kill, hang, nan_observation, inf_reward, constructor, chance,
            or nothing.
        at: Step of the episode at which the fault occurs.
        marker: File created at the first fault; it prevents further faults.
        length: Number of steps of an episode.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, fault: str = "", at: int = 3, marker: str = "", length: int = 7) -> None:
        self.fault, self.at, self.length = fault, at, length
        self.marker = Path(marker) if marker else None
        self.t = 0
        if fault == "constructor" and self.is_due():
            raise RuntimeError("the model file is missing")

    def is_due(self) -> bool:
        """Return whether the fault occurs now; create the marker."""
        if self.marker is None:
            return True
        try:
            self.marker.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def observe(self) -> Any:
        offset = time.monotonic() if self.fault == "chance" else 0.0
        return np.array([self.start + offset, self.t / 10], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        self.start = self.np_random.standard_normal()
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.t += 1
        obs, reward = self.observe(), float(action) + self.start
        if self.t == self.at and self.fault not in ("", "chance", "constructor") and self.is_due():
            if self.fault == "raise":
                raise RuntimeError("the wheel came off")
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "hang":
                time.sleep(1000)
            if self.fault == "nan_observation":
                obs[1] = np.nan
            if self.fault == "inf_reward":
                reward = np.inf
        return obs, reward, self.t >= self.length, False, {}
