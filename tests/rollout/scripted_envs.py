"""Environments whose every number follows from the seed of the episode and the actions."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces

ACTION_SPACES = {
    "discrete": spaces.Discrete(3, start=1),
    "box": spaces.Box(-0.5, 0.25, (2,), np.float32),
    "nested": spaces.Tuple(
        (spaces.Discrete(3), spaces.Dict({"force": spaces.Box(-0.5, 0.5, (2,), np.float32)}))
    ),
}


def number_of(action):
    """One number for an action of any space."""
    if isinstance(action, tuple):
        return float(action[0]) + float(action[1]["force"].sum())
    return float(np.sum(action))


class ScriptedEnv(gymnasium.Env):
    """Episodes of 1 to 6 steps that end terminal, cut off, or both, as the seed says."""

    def __init__(
        self, actions="discrete", dict_obs=False, ends=("terminated", "truncated", "both")
    ):
        box = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.observation_space = spaces.Dict({"a": box, "b": box}) if dict_obs else box
        self.action_space = ACTION_SPACES[actions]
        self.dict_obs, self.ends = dict_obs, ends

    def observe(self):
        obs = np.array([self.mark, self.t / 10, self.last])
        return {"a": obs, "b": -obs} if self.dict_obs else obs

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.last = 0, 0.0
        self.mark = self.np_random.standard_normal()
        self.length = int(self.np_random.integers(1, 7))
        self.how = str(self.np_random.choice(list(self.ends)))
        return self.observe(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        self.last = number_of(action)
        reward = self.mark + self.last + self.np_random.random()
        ended = self.t == self.length
        info = {"is_success": self.mark > 0} if ended and self.how != "both" else {}
        terminated = ended and self.how in ("terminated", "both")
        truncated = ended and self.how in ("truncated", "both")
        return self.observe(), reward, terminated, truncated, info
