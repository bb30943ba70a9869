"""CartPole that does not terminate when the pole falls, so that all episodes have 200 steps.

Importing this module registers the environment, as does `endless_cartpole:EndlessCartPole-v0`.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv

__all__ = ["EPISODE_STEPS", "EndlessCartPoleEnv", "EndlessCartPoleVectorEnv"]

EPISODE_STEPS = 200


class EndlessCartPoleEnv(CartPoleEnv):
    """CartPole without limits of position and angle."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.x_threshold = self.theta_threshold_radians = math.inf


class EndlessCartPoleVectorEnv(CartPoleVectorEnv):
    """Vectorised version, stepped as arrays."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.x_threshold = self.theta_threshold_radians = math.inf


gymnasium.register(
    "EndlessCartPole-v0",
    entry_point=EndlessCartPoleEnv,
    vector_entry_point=EndlessCartPoleVectorEnv,
    max_episode_steps=EPISODE_STEPS,
)
