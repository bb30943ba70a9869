"""CartPole as a tensor simulator; a minimal example of a custom simulator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

Tensor = torch.Tensor


class TensorCartPole:
    """Batched CartPole (Barto, Sutton, Anderson 1983), with the constants of CartPole-v1.

    Args:
        num_envs: Number of environments.
        device: Device of the simulation.
        max_episode_steps: Number of steps after which an episode is truncated.
    """

    def __init__(
        self, num_envs: int, device: torch.device | str = "cpu", max_episode_steps: int = 500
    ) -> None:
        self.num_envs, self.device, self.limit = num_envs, device, max_episode_steps
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.generator = torch.Generator(device)
        self.steps = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self.state = self._first()

    def _first(self) -> Tensor:
        numbers = torch.rand(self.num_envs, 4, device=self.device, generator=self.generator)
        return 0.1 * numbers - 0.05

    def reset(self, *, seed: int) -> tuple[Tensor, dict[str, Any]]:
        """Reset all environments."""
        self.generator.manual_seed(seed)
        self.state, self.steps = self._first(), torch.zeros_like(self.steps)
        return self.state, {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step all environments; finished episodes are reset automatically."""
        x, speed, angle, turn = self.state.unbind(1)
        cos, sin = angle.cos(), angle.sin()
        force = (20.0 * actions - 10.0 + 0.05 * turn.square() * sin) / 1.1
        turning = (9.8 * sin - cos * force) / (0.5 * (4 / 3 - 0.1 * cos.square() / 1.1))
        pushing = force - 0.05 * turning * cos / 1.1
        rates = torch.stack([speed, pushing, turn, turning], 1)
        last, self.steps = self.state + 0.02 * rates, self.steps + 1
        terminated = (last[:, 0].abs() > 2.4) | (last[:, 2].abs() > math.radians(12))
        truncated = (self.steps >= self.limit) & ~terminated
        ended = terminated | truncated
        self.state = torch.where(ended[:, None], self._first(), last)
        self.steps = torch.where(ended, 0, self.steps)
        return self.state, torch.ones_like(x), terminated, truncated, {"final_obs": last}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the running episodes.

        Optional: without state_dict and load_state_dict, a resumed run starts new episodes.
        """
        parts = {"state": self.state, "steps": self.steps}
        return {**parts, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the episodes from a state."""
        self.state, self.steps = (state[key].to(self.device) for key in ("state", "steps"))
        self.generator.set_state(state["generator"].cpu())
