"""PyTorch and JAX simulators, one for each supported interface."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorWrapper

from benchmarks.tensor_cartpole import TensorCartPole
from maze_train.envs.third_party import SimulatorVectorEnv
from maze_train.simulators.tensors import TensorSimulator


class ArraysOfSimulator(SimulatorVectorEnv):
    """Vector environment that passes seeds on unchanged; its third-party wrapper draws them."""

    def _reset_envs(self, seed, options):
        self._before = self._columns(self.simulator.reset_arrays(seed).items())
        return self._before, {}


def cartpole_of_arrays(num_envs, max_episode_steps=500):
    """Return an environment with the same results as `TensorCartPole`, for `env.backend=native`."""
    poles = TensorSimulator(TensorCartPole(num_envs, "cpu", max_episode_steps), "poles")
    return VectorWrapper(ArraysOfSimulator(poles))  # hides the simulator


class Robot:
    """Simulator with the Isaac Lab API: observation groups, resets within the step, and a log.

    Updates its observations in place, returns no final observations, and has no saved state.
    Episode e of environment i has 3 + (i + e) % 3 steps; odd episodes are terminated.
    """

    def __init__(self, num_envs, device="cpu", style="five results"):
        self.num_envs, self.device, self.style = num_envs, torch.device(device), style
        box = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.single_observation_space = spaces.Dict({"policy": box, "critic": box})
        self.single_action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        numbers = torch.arange(num_envs, dtype=torch.float32)
        self.obs = {key: torch.zeros(num_envs, 3) for key in ("policy", "critic")}
        self.numbers, self.episodes, self.steps = numbers, numbers * 0, numbers * 0

    def _observe(self):
        self.obs["policy"][:] = torch.stack([self.numbers, self.episodes, self.steps], 1) / 10 + 1
        self.obs["critic"][:] = self.obs["policy"].square()
        return self.obs

    def reset(self, seed=None, options=None):
        self.episodes, self.steps = self.numbers * 0, self.numbers * 0
        return self._observe(), {}

    def step(self, actions):
        self.steps = self.steps + 1
        rewards = self.steps + self.numbers + actions.sum(1) * 0
        ended = self.steps >= 3 + (self.numbers + self.episodes) % 3
        terminated = ended & (self.episodes % 2 == 1)
        self.episodes, self.steps = self.episodes + ended, self.steps * ~ended
        log = {"log": {"Episode_Reward/alive": rewards.mean(), "height": self.numbers}}
        if self.style == "four results":
            return self._observe(), rewards, ended, {**log, "time_outs": ended & ~terminated}
        return self._observe(), rewards, terminated, ended & ~terminated, log

    def close(self):
        self.obs = {}


class PointState(NamedTuple):
    """State of a point on a line in a functional JAX environment."""

    obs: Any
    reward: Any
    done: Any
    metrics: Any


class GymnaxPoint:
    """`Point` with the API of gymnax and Craftax: spaces are methods, functions take keys."""

    class Params(NamedTuple):
        """Parameters with an episode limit under the name that Craftax uses."""

        max_timesteps: int = 6

        def replace(self, **changes):
            return self._replace(**changes)

    default_params = Params()

    def __init__(self):
        self._point = Point()

    def observation_space(self, params):
        return spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def action_space(self, params):
        return spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset_env(self, key, params):
        state = self._point.reset(key)
        return state.obs, state

    def step_env(self, key, state, action, params):
        state = self._point.step(state, action)
        return state.obs, state, state.reward, state.done, {}


class Point:
    """Functional environment with the API of Brax; the action moves a point, and x > 1 ends it."""

    def __init__(self, max_episode_steps=6):
        import jax

        self._jax, self.max_episode_steps = jax, max_episode_steps
        self.observation_size, self.action_size = 2, 1

    def reset(self, key):
        numpy = self._jax.numpy
        x = self._jax.random.uniform(key)
        return PointState(numpy.stack([x, 0 * x]), 0 * x, x > 2, {"place": x})

    def step(self, state, action):
        numpy = self._jax.numpy
        x = state.obs[0] + 0.1 + 0.01 * action[0]
        obs = numpy.stack([x, state.obs[1] + 1])
        return PointState(obs, x, x > 1, {"place": x})

    def render(self, trajectory):
        return [np.full((2, 2, 3), 100 * state.obs[0], np.uint8) for state in trajectory]
