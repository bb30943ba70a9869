"""Environments whose methods callbacks call, and these callbacks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from goal_envs import PointToGoal
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from benchmarks.tensor_cartpole import TensorCartPole
from maze_train import Callback


class LevelEnv(gymnasium.Env[Any, Any]):
    """Environment that observes its level, the effect of calls in the episode, and a noisy step.

    Args:
        length: Minimum episode length; the seed and the level add to it.
        marker: File created when the process exits; if empty, the process does not exit.
        dies_in: Where the process exits: `a call` or `a reset`.
    """

    def __init__(self, length: int = 5, marker: str = "", dies_in: str = "a call") -> None:
        self.observation_space: spaces.Space[Any] = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space: spaces.Space[Any] = spaces.Discrete(2)
        self.length, self.marker, self.dies_in = length, marker, dies_in
        self.level, self.size = 0.0, 1.0
        self.t, self.felt, self.x, self.last = 0, 0.0, 0.0, length
        self.bag: list[Any] = []

    def set_level(self, level: float, *, bonus: float = 0.0) -> None:
        """Set the level; the effect depends on the step at which this is called."""
        self.level = level + bonus
        self.felt += (1 + self.t) * self.level
        if level and self.dies_in != "a reset":
            self.die()

    def die(self) -> None:
        if self.marker and not Path(self.marker).exists():
            Path(self.marker).touch()
            os._exit(7)

    def keep(self, bag: list[Any]) -> None:
        """Append to the given list and keep it."""
        bag.append(len(bag))
        self.bag = bag

    def draw_level(self) -> None:
        self.level = float(self.np_random.random())

    def fail(self) -> None:
        raise ZeroDivisionError("no such floor")

    def observe(self) -> Any:
        return np.array([self.level, self.felt, self.x, self.t], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed and self.dies_in == "a reset":
            self.die()
        self.t, self.felt, self.x = 0, 0.0, float(self.np_random.random())
        self.last = self.length + int(self.np_random.integers(4)) + int(self.level) % 3
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        self.x += self.size * float(self.np_random.normal()) + float(action)
        reward = self.x - self.level + 0.1 * self.felt
        ended = self.t >= self.last
        return self.observe(), reward, ended, False, {"is_success": self.x > 0}


class Louder(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper with an additional method."""

    def louder(self) -> None:
        """Do nothing."""


class InterruptsOnce(LevelEnv):
    """Environment that raises SIGINT in its first step, unless the marker exists."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not Path(self.marker).exists():
            Path(self.marker).touch()
            signal.raise_signal(signal.SIGINT)
        return super().step(action)


class KeptLevelEnv(LevelEnv):
    """Environment that saves its state, except its size."""

    def state_dict(self) -> dict[str, Any]:
        names = ("level", "t", "felt", "x", "last")
        state = {name: getattr(self, name) for name in names}
        return {**state, "generator": repr(self.np_random.bit_generator.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            if name != "generator":
                setattr(self, name, value)
        self.np_random.bit_generator.state = eval(state["generator"])


def level_vector(num_envs: int) -> SyncVectorEnv:
    """Return a vector environment of Gymnasium."""
    return SyncVectorEnv([LevelEnv] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


class Caller(Callback):
    """Callback that calls environments at every update and epoch, depending on the update."""

    def __init__(self, evaluate: bool = True, draws: bool = False) -> None:
        self.evaluate, self.draws = evaluate, draws

    def on_run_start(self, run: Any) -> None:
        if not run.progress.updates:
            run.call_envs("set_level", 0.25, evaluate=self.evaluate)

    def on_update_end(self, run: Any) -> None:
        n = run.progress.updates
        if n % 3 == 1:
            run.call_envs("set_level", n, bonus=0.5)
        if n % 3 == 2:
            run.set_env_attr("size", 1.0 + n / 8)
        if self.draws and n % 2:
            run.call_envs("draw_level", evaluate=self.evaluate)

    def on_epoch_end(self, run: Any) -> None:
        run.call_envs("set_level", run.progress.epoch / 2, evaluate=self.evaluate)


class LevelSimulator(TensorCartPole):
    """Simulator whose saved state contains neither its level nor its size."""

    level, size = 0.0, 1.0

    def set_level(self, level: float, *, bonus: float = 0.0) -> None:
        """Set the level and push the cart."""
        self.level = level + bonus
        self.state = self.state + 0.01 * self.level

    def step(self, actions: Any) -> Any:
        obs, rewards, *rest = super().step(actions)
        return obs, rewards * self.size + self.level, *rest


class ReachEnv(PointToGoal):
    """Goal environment whose success distance can be changed."""

    reach = 1.0

    def _reached(self, achieved_goal: Any, desired_goal: Any) -> Any:
        return np.linalg.norm(achieved_goal - desired_goal, axis=-1) < self.reach
