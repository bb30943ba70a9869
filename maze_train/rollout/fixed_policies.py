"""Policies of several agents that have no networks: random actions, and those of users."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from maze_train.distributions.mapping import distribution_for
from maze_train.errors import ConfigError
from maze_train.nets.policy_model import build_masking
from maze_train.rollout.agents import built_policy
from maze_train.rollout.initial_policies import GivenPolicy, RandomPolicy
from maze_train.rollout.rollout_generator import acts
from maze_train.spaces.describe import FlatView
from maze_train.spaces.masks import mask_layout
from maze_train.targets import build_target, is_target
from maze_train.types import tree_leaves

if TYPE_CHECKING:
    from gymnasium import Space

    from maze_train.types import Tensor, TensorTree


class FixedPolicy(nn.Module):
    """An `ActingModel` without weights as a module, which can be one of several policies.

    Args:
        policy: The acting model.
    """

    def __init__(self, policy: RandomPolicy | GivenPolicy) -> None:
        super().__init__()
        self._policy = policy
        self.distribution: Any = policy.distribution

    def __deepcopy__(self, memo: dict[int, Any]) -> FixedPolicy:
        """Itself: there are no weights, and the object of a user may not take to copies."""
        return self

    def policy_params(self, obs: TensorTree) -> Tensor:
        """Parameters of the actions, float32 on the device of the observations."""
        return self._policy.policy_params(obs).to(tree_leaves(obs)[0].device, torch.float32)


class OneByOne:
    """A policy for batches, of one that takes single observations.

    Args:
        policy: Has a method `act(observation)`, or is called itself.
        observation_space: Observation space of one environment.
        action_space: Its action space.
    """

    def __init__(
        self, policy: Any, observation_space: Space[Any], action_space: Space[Any]
    ) -> None:
        self._act = policy.act if callable(getattr(policy, "act", None)) else policy
        self._observation = FlatView(observation_space)
        self._action = FlatView(action_space)

    def act(self, observations: Any) -> Any:
        """Actions for a batch of observations: nested as the spaces are, [n, ...] per part.

        Raises:
            SpaceError: If an action lacks a part.
        """
        columns = dict(self._observation.read(observations))
        found = []
        for row in range(len(next(iter(columns.values())))):
            parts = {key: np.array(column[row]) for key, column in columns.items()}
            single = self._observation.is_single
            action = self._act(parts[""] if single else self._observation.build(parts))
            found.append(dict(self._action.read(action)))
        actions = {key: [parts[key] for parts in found] for key in found[0]}
        return actions[""] if self._action.is_single else self._action.build(actions)


def fixed_policy(
    source: Any, key: str, observation_space: Space[Any], action_space: Space[Any]
) -> nn.Module:
    """The policy that a setting names, where it is none of a run.

    Args:
        source: `random`, or a node that names a policy of the user.
        key: Where the configuration names it.
        observation_space: Observation space of the agents.
        action_space: Their action space.

    Raises:
        ConfigError: See `own_policy`.
    """
    if is_target(source):
        return own_policy(source, key, observation_space, action_space)
    return random_policy(observation_space, action_space)


def random_policy(observation_space: Space[Any], action_space: Space[Any]) -> FixedPolicy:
    """A policy whose actions are uniform over the legal ones, see `RandomPolicy`."""
    distribution = distribution_for(action_space)
    masking = build_masking(distribution, mask_layout(observation_space, action_space))
    return FixedPolicy(RandomPolicy(distribution, action_space, masking))


def own_policy(
    node: dict[str, Any], key: str, observation_space: Space[Any], action_space: Space[Any]
) -> nn.Module:
    """The policy that a node names, called with observation and action space.

    Args:
        node: A mapping with the key `_target_`.
        key: Where the configuration names it.
        observation_space: Observation space of the agents.
        action_space: Their action space.

    Raises:
        ConfigError: If it can not be built, or gives neither a module that acts, nor an object with
            a method `act(observation)`, nor a function.
    """
    policy: Any = built_policy(lambda: build_target(node, observation_space, action_space, key=key))
    if isinstance(policy, nn.Module) and acts(policy):
        return policy
    if isinstance(policy, nn.Module) or not callable(getattr(policy, "act", policy)):
        problem = (
            "expected an ActingModel that is a module, an object with a method act(observation), "
            "or a function of one observation"
        )
        raise ConfigError(key, problem, type(policy).__name__)
    given = OneByOne(policy, observation_space, action_space)
    distribution = distribution_for(action_space)
    return FixedPolicy(GivenPolicy(given, distribution, observation_space, action_space))
