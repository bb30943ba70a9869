"""A small goal-conditioned environment."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from maze_train import MultiAgentEnv, Turn

REACH = 0.15
"""Distance within which a goal counts as reached."""


class PointToGoal(gymnasium.Env[Any, Any]):
    """Point in a square that moves to a goal; the reward is -1 until the goal is reached.

    Args:
        length: Number of steps after which an episode is truncated.
        ends: Whether reaching the goal terminates the episode.
    """

    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    observation_space = spaces.Dict(
        {
            "observation": spaces.Box(-1.0, 1.0, (2,), np.float64),
            "achieved_goal": spaces.Box(-1.0, 1.0, (2,), np.float64),
            "desired_goal": spaces.Box(-1.0, 1.0, (2,), np.float64),
        }
    )

    def __init__(self, length: int = 20, ends: bool = False) -> None:
        self.length, self.ends = length, ends

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return np.where(self._reached(achieved_goal, desired_goal), 0.0, -1.0)

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return self.ends and bool(self._reached(achieved_goal, desired_goal))

    def _reached(self, achieved_goal: Any, desired_goal: Any) -> Any:
        return np.linalg.norm(achieved_goal - desired_goal, axis=-1) < REACH

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.position = self.np_random.uniform(-1.0, 1.0, 2)
        self.goal = self.np_random.uniform(-1.0, 1.0, 2)
        self.t = 0
        return self._observed(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        self.position = (self.position + 0.15 * action).clip(-1.0, 1.0)
        reward = float(self.compute_reward(self.position, self.goal, {}))
        terminated = self.compute_terminated(self.position, self.goal, {})
        truncated, info = self.t >= self.length, {"is_success": not reward}
        return self._observed(), reward, terminated, truncated, info

    def _observed(self) -> dict[str, Any]:
        position = self.position.copy()
        return {
            "observation": position,
            "achieved_goal": position,
            "desired_goal": self.goal.copy(),
        }


class PairToGoals(MultiAgentEnv):
    """Two points; the right one moves in every second turn, or if it is the only one left."""

    possible_agents = ("left", "right")

    def __init__(self, **settings: Any) -> None:
        self.points = {agent: PointToGoal(**settings) for agent in self.possible_agents}
        self.compute_reward = self.points["left"].compute_reward
        self.compute_terminated = self.points["left"].compute_terminated

    def observation_space(self, agent: str) -> Any:
        return PointToGoal.observation_space

    def action_space(self, agent: str) -> Any:
        return PointToGoal.action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Turn:
        self.t = 0
        seeds = np.random.default_rng(seed).integers(2**31, size=2).tolist()
        points = zip(self.points.items(), seeds, strict=True)
        self.seen = {agent: point.reset(seed=own)[0] for (agent, point), own in points}
        return Turn({"left": self.seen["left"]})

    def step(self, actions: dict[str, Any]) -> Turn:
        self.t += 1
        steps = {agent: self.points[agent].step(action) for agent, action in actions.items()}
        self.seen |= {agent: step[0] for agent, step in steps.items()}
        terminated = [agent for agent, step in steps.items() if step[2]]
        truncated = [agent for agent, step in steps.items() if step[3] and not step[2]]
        last = {agent: self.seen.pop(agent) for agent in (*terminated, *truncated)}
        acting = self.seen if self.t % 2 or "left" not in self.seen else {"left": self.seen["left"]}
        rewards = {agent: step[1] for agent, step in steps.items()}
        return Turn({**last, **acting}, rewards, terminated, truncated)


class NoReward(gymnasium.Env[Any, Any]):
    """Environment with goals but without `compute_reward`."""

    action_space, observation_space = PointToGoal.action_space, PointToGoal.observation_space
