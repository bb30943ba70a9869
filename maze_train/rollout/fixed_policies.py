"""Policies of several agents that have no networks: random actions, and those of users."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from maze_train.distributions.mapping import distribution_for
from maze_train.envs.agents import nearest_to_zero
from maze_train.errors import ConfigError
from maze_train.nets.policy_model import build_masking
from maze_train.rollout.agents import built_policy
from maze_train.rollout.initial_policies import FixedPolicy, GivenPolicy, RandomPolicy
from maze_train.rollout.rollout_generator import acts
from maze_train.spaces.describe import FlatView
from maze_train.spaces.masks import mask_layout
from maze_train.targets import build_target, is_target
from maze_train.types import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable

    from gymnasium import Space

    from maze_train.types import Tensor, TensorTree


class OneByOne:
    """A policy for batches, of policies that take single observations.

    Args:
        policies: Policies of the rows of a batch, which its owner may change; of the last one are
            all further rows. Each has a method `act(observation)`, or is called itself.
        observation_space: Observation space of one environment.
        action_space: Its action space.
    """

    def __init__(
        self, policies: list[Any], observation_space: Space[Any], action_space: Space[Any]
    ) -> None:
        self._policies = policies
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
            policy = self._policies[min(row, len(self._policies) - 1)]
            act = policy.act if callable(getattr(policy, "act", None)) else policy
            parts = {key: np.array(column[row]) for key, column in columns.items()}
            single = self._observation.is_single
            action = act(parts[""] if single else self._observation.build(parts))
            found.append(dict(self._action.read(action)))
        actions = {key: [parts[key] for parts in found] for key in found[0]}
        return actions[""] if self._action.is_single else self._action.build(actions)


class EpisodicPolicy(FixedPolicy):
    """Policies of a user with a method `reset`, one for each agent in each running episode.

    They are asked in turns of their agents only, and reset where an episode begins. The memory of
    an agent is the number of its policy, from 1; 0: its episode begins with its next turn. A number
    of a checkpoint means a policy that has just been reset.

    Args:
        make_policy: Makes a policy.
        observation_space: Observation space of the agents.
        action_space: Their action space.
    """

    state_size = 1

    def __init__(
        self,
        make_policy: Callable[[], Any],
        observation_space: Space[Any],
        action_space: Space[Any],
    ) -> None:
        spaces = observation_space, action_space
        asked: list[Any] = []
        given = OneByOne(asked, *spaces)
        super().__init__(GivenPolicy(given, distribution_for(action_space), *spaces))
        leaves = FlatView(action_space).leaves.values()
        self._of_waiting = np.concatenate([nearest_to_zero(leaf).ravel() for leaf in leaves])
        self._make, self._asked = make_policy, asked
        self._policies: list[Any] = []
        self._free: list[int] = []

    def policy_params(self, obs: TensorTree) -> Tensor:
        """Parameters of the actions where each observation is the first one of an episode."""
        first = torch.zeros(len(tree_leaves(obs)[0]), 1)
        params, state = self.turn_step(obs, first, first == 0)
        self.end_episodes(state)
        return params

    def turn_step(self, obs: TensorTree, state: Tensor, acts: Tensor) -> tuple[Tensor, Tensor]:
        """Parameters of the actions, and the memory `[n, 1]` after `obs`.

        Args:
            obs: Observations of n agents.
            state: Their memory.
            acts: Whether they act, `[n]`.
        """
        numbers = state[:, 0].long().tolist()
        while len(self._policies) < max(numbers):  # those of a checkpoint
            self._add()
        rows = acts.nonzero()[:, 0].tolist()
        for row in rows:
            numbers[row] = numbers[row] or self._begin()
        self._asked[:] = [self._policies[numbers[row] - 1] for row in rows]
        waiting = torch.from_numpy(self._of_waiting).to(state.device, torch.float32)
        params = waiting.repeat(len(numbers), 1)
        if rows:
            params[rows] = super().policy_params(tree_map(lambda x: x[rows], obs))
        return params, state.new_tensor(numbers)[:, None]

    def end_episodes(self, states: Tensor) -> None:
        """Take policies back, by the memories of their agents, `[k, 1]`."""
        self._free += [number for number in states[:, 0].long().tolist() if number]

    def _begin(self) -> int:
        """Reset a policy that is free; returns its number."""
        if not self._free:
            self._add()
            return len(self._policies)
        self._policies[self._free[-1] - 1].reset()
        return self._free.pop()

    def _add(self) -> None:
        """Make one more policy.

        Raises:
            ConfigError: If it is one that is there already.
        """
        policy = self._make()
        if any(policy is other for other in self._policies):
            problem = "the same object was returned twice; let it build a new one for each episode"
            raise ConfigError("policy", problem, type(policy).__name__)
        policy.reset()
        self._policies.append(policy)


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
            a method `act(observation)`, nor a function, or its `reset` needs an argument.
    """

    def make() -> Any:
        return built_policy(lambda: build_target(node, observation_space, action_space, key=key))

    policy = make()
    if isinstance(policy, nn.Module) and acts(policy):
        return policy
    if isinstance(policy, nn.Module) or not callable(getattr(policy, "act", policy)):
        problem = (
            "expected an ActingModel that is a module, an object with a method act(observation), "
            "or a function of one observation"
        )
        raise ConfigError(key, problem, type(policy).__name__)
    reset = getattr(policy, "reset", None)
    if callable(reset):
        try:
            inspect.signature(reset).bind()
        except TypeError as error:
            problem = f"among several agents, reset() is called without arguments: {error}"
            raise ConfigError(key, problem, type(policy).__name__) from error
        return EpisodicPolicy(make, observation_space, action_space)
    given = OneByOne([policy], observation_space, action_space)
    distribution = distribution_for(action_space)
    return FixedPolicy(GivenPolicy(given, distribution, observation_space, action_space))
