"""Uniform random actions, legal where observations have masks."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from gymnasium import spaces

from maze_train.core.seeding import Seeds
from maze_train.core.types import Array, ArrayTree
from maze_train.envs.vector import zeroed_columns
from maze_train.spaces.describe import FlatView
from maze_train.spaces.masks import LegalChoices, random_action


class UniformPolicy:
    """Draws actions with `gymnasium.Space.sample`, only legal ones if there are masks.

    Args:
        observation_space: Observation space of one environment.
        action_space: Its action space.

    Raises:
        SpaceError: If masks do not fit the actions.
    """

    def __init__(
        self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
    ) -> None:
        self._legal = LegalChoices(observation_space, action_space)
        self._action = FlatView(copy.deepcopy(action_space))
        self._generator = np.random.default_rng()

    def reset(self, seed: int) -> None:
        """Begin an episode: its random numbers follow from the seed, >= 0."""
        seeds = Seeds(seed)
        self._action.space.seed(seeds.integer("actions") % 2**31)
        self._generator = seeds.generator("legal actions")

    def act(self, observation: Any) -> Any:
        """A random action.

        Raises:
            SpaceError: If no action is legal.
        """
        legal = self._legal.read(observation) if self._legal.has_masks else ()
        return random_action(self._action, legal, self._generator)


class UniformActions:
    """Uniform random actions of a single environment, in the arrays of vector environments.

    Args:
        observation_space: Observation space of the environment.
        action_space: Its action space.
        seed: Seed of the actions, >= 0.

    Raises:
        SpaceError: If masks do not fit the actions.
    """

    def __init__(
        self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], seed: int
    ) -> None:
        self._observation, self._action = FlatView(observation_space), FlatView(action_space)
        self._policy = UniformPolicy(observation_space, action_space)
        self._policy.reset(seed)

    def __call__(self, obs: ArrayTree) -> ArrayTree:
        """Actions `[1, ...]` for observations `[1, ...]`.

        Raises:
            SpaceError: If no action is legal.
        """
        columns: dict[str, Array] = obs if isinstance(obs, dict) else {"": obs}
        found = {key: column[0] for key, column in columns.items()}
        actions = zeroed_columns(self._action, 1)
        action = self._policy.act(
            found[""] if self._observation.is_single else self._observation.build(found)
        )
        for key, value in self._action.read(action):
            actions[key][0] = value
        return actions[""] if self._action.is_single else actions
