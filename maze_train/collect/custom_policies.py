"""User-defined policies, and uniformly random actions."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from maze_train.core.errors import ConfigError, MazeTrainError
from maze_train.core.seeding import Seeds
from maze_train.core.targets import member_of
from maze_train.spaces.describe import FlatView
from maze_train.spaces.masks import LegalChoices, random_action


class UserPolicy:
    """User-defined policy: an object with a method `act(observation)`, or a function.

    Args:
        policy: The policy. A method `reset` is optional, see `UserRows`.
        key: Name of the setting, for messages.

    Attributes:
        act: Returns the action for one observation.
        name: Qualified name of the class or function.
        is_reset: Whether the policy has a method `reset`.

    Raises:
        ConfigError: If the policy is not callable and has no method `act`.
    """

    def __init__(self, policy: Any, key: str = "policy") -> None:
        act = member_of(policy, "act")
        self.act: Callable[[Any], Any] = act if callable(act) else policy
        if not callable(self.act):
            problem = (
                "expected 'random', a model, an object with a method act(observation), or a "
                "function with one argument, the observation"
            )
            raise ConfigError(key, problem, policy)
        named = policy if member_of(policy, "__qualname__") else type(policy)
        self.name = f"{named.__module__}.{named.__qualname__}"
        self.policy = policy
        reset = member_of(policy, "reset")
        self.is_reset = callable(reset)
        self._seed_form = seed_form(reset) if callable(reset) else ""

    def reset(self, seed: int) -> None:
        """Begin an episode: call `reset` of the policy, if it exists."""
        if self._seed_form == "keyword":
            self.policy.reset(seed=seed)
        elif self._seed_form == "positional":
            self.policy.reset(seed)
        elif self.is_reset:
            self.policy.reset()


def seed_form(reset: Callable[..., Any]) -> str:
    """Return how a method accepts a seed: `keyword`, `positional` or `none`."""
    try:
        params = inspect.signature(reset).parameters.values()
    except (TypeError, ValueError):  # Functions written in C may have no signature.
        return "none"
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if any(param.name == "seed" and param.kind in by_name for param in params):
        return "keyword"
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in params if p.default is p.empty and p.kind in by_place]
    return "positional" if len(needed) == 1 else "none"


def built_policy(make_policy: Callable[[], object]) -> object:
    """Call a function that builds a policy.

    Raises:
        ConfigError: If the function raises. Errors of maze_train propagate unchanged.
    """
    try:
        return make_policy()
    except MazeTrainError:
        raise
    except Exception as error:
        raise ConfigError(
            "policy", f"building it failed: {type(error).__name__}: {error}"
        ) from error


def check_are_new(policies: Sequence[Any]) -> None:
    """Check that stateful policies are distinct objects.

    Raises:
        ConfigError: If the same object was returned twice.
    """
    if len({id(policy) for policy in policies}) < len(policies):
        problem = (
            "the function returned the same object twice; it must create a new object in each "
            "call, because each running episode needs a separate policy"
        )
        raise ConfigError("policy", problem, type(policies[0]).__name__)


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
