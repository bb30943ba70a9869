"""Uniform random actions that respect action masks."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from gymnasium import spaces

from maze_train.core.seeding import Seeds
from maze_train.spaces.describe import FlatView
from maze_train.spaces.masks import LegalChoices, random_action


class UniformPolicy:
    """Samples actions with `gymnasium.Space.sample`, or from the legal actions if there are masks.

    Args:
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.

    Raises:
        SpaceError: If a mask does not match the action space.
    """

    def __init__(
        self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
    ) -> None:
        self._legal = LegalChoices(observation_space, action_space)
        self._action = FlatView(copy.deepcopy(action_space))
        self._generator = np.random.default_rng()

    def reset(self, seed: int) -> None:
        """Begin an episode, and seed the random number generators (seed >= 0)."""
        seeds = Seeds(seed)
        self._action.space.seed(seeds.integer("actions") % 2**31)
        self._generator = seeds.generator("legal actions")

    def act(self, observation: Any) -> Any:
        """Sample a random action.

        Raises:
            SpaceError: If no action is legal.
        """
        legal = self._legal.read(observation) if self._legal.has_masks else ()
        return random_action(self._action, legal, self._generator)
