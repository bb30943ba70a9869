"""Centralised critics: value functions that depend on the observations of all agents.

Sources: centralised critics: Lowe et al. (2017), arXiv:1706.02275, applied to state values; inputs:
Yu et al. (2021), arXiv:2103.01955, section 5.2 (agent-specific global state).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.spaces import Dict
from torch import nn

from maze_train.core.errors import ConfigError
from maze_train.core.seeding import Seeds
from maze_train.core.types import Tensor, TensorTree
from maze_train.nets.actor_critic import ActorCriticModel, build_critic
from maze_train.nets.config import ModelConfig, ObservationNormalizationConfig
from maze_train.nets.normalization import ObservationNormalizer
from maze_train.nets.policy_model import input_space, without_critic
from maze_train.spaces.agents import AGENTS, AgentSpaces
from maze_train.spaces.describe import flat_space, is_image
from maze_train.spaces.tensors import (
    JOINT,
    OWN_LEAF,
    part_of,
    seen_by_critic,
    with_name,
    without_joint,
)

OWN = "own"
"""Name of the agent's observation in the inputs of its critic."""


class NormalizerOfAll(ObservationNormalizer):
    """Normalizes the inputs of an agent's policy and of its centralised critic.

    Args:
        space: Input of the policy.
        others: Normalizer of the additional critic inputs; a submodule of the critic.
        config: Settings.
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        others: ObservationNormalizer,
        config: ObservationNormalizationConfig,
    ) -> None:
        super().__init__(space, config)
        self._others = (others,)  # A tuple prevents registration as a submodule.

    @property
    def keys(self) -> list[str]:
        """Normalized keys of the policy and of the centralised critic."""
        return [*(key or OWN_LEAF for key in super().keys), *self._others[0].keys]

    def update(self, obs: TensorTree) -> None:
        """Add observations to the statistics of both normalizers; see `ObservationNormalizer`."""
        super().update(without_joint(obs))
        self._others[0].update(obs)

    @property
    def is_waiting(self) -> bool:
        """Whether either normalizer has fewer observations than required before training."""
        return super().is_waiting or self._others[0].is_waiting

    def freeze(self) -> None:
        """Freeze the statistics of both normalizers."""
        super().freeze()
        self._others[0].freeze()


class CentralizedCritic(nn.Module):
    """Critic that maps the observations of all agents to value outputs for one agent.

    Args:
        net: Network for the flat mapping `own`, `agents/<name>`, `acts`, `agent`.
        normalizer: Normalizer of the observations of all agents, or None.
        joins: Groups of leaves to concatenate into one vector, by new key; see `joined_leaves`.
    """

    def __init__(
        self,
        net: nn.Module,
        normalizer: ObservationNormalizer | None,
        joins: Mapping[str, Mapping[str, spaces.Space[Any]]] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.normalizer = normalizer
        self.net = net
        self._joins = {
            key: [(name, len(leaf.shape or ())) for name, leaf in leaves.items()]
            for key, leaves in joins.items()
        }

    def forward(self, own: TensorTree, obs: dict[str, Tensor]) -> Tensor:
        """Return value outputs `[..., output_size]`; `own` is the normalized observation."""
        joint = {key: leaf for key, leaf in obs.items() if key.startswith(JOINT)}
        seen = joint if self.normalizer is None else self.normalizer(joint)
        inputs = {**with_name(OWN, own), **part_of(seen, JOINT)}
        for key, leaves in self._joins.items():
            parts = [(inputs.pop(name), dims) for name, dims in leaves]
            vectors = [x.flatten(-dims) if dims else x.unsqueeze(-1) for x, dims in parts]
            inputs[key] = torch.cat(vectors, dim=-1)
        values: Tensor = self.net(inputs)
        return values


def joined_leaves(
    leaves: Mapping[str, spaces.Space[Any]], config: ModelConfig
) -> dict[str, dict[str, spaces.Space[Any]]]:
    """Group leaves of different agents with the same name and space, by a new key.

    A template network has one branch per key. Concatenating the observations of all agents reduces
    the number of branches. Images are not grouped.

    Args:
        leaves: Spaces by key; the agents' keys are `agents/<name>` or `agents/<name>/<key>`.
        config: Settings of the model.
    """
    groups: list[tuple[str, dict[str, spaces.Space[Any]]]] = []
    for key, leaf in leaves.items():
        top, _, rest = key.partition("/")
        if top != AGENTS or (is_image(leaf) and config.image_encoder != "flat"):
            continue
        name = rest.partition("/")[2]
        for known, group in groups:
            if known == name and leaf == next(iter(group.values())):
                group[key] = leaf
                break
        else:
            groups.append((name, {key: leaf}))
    groups = [(name, group) for name, group in groups if len(group) > 1]
    return {f"{AGENTS}/{i}/{name}": group for i, (name, group) in enumerate(groups)}


def joined_space(leaves: Sequence[spaces.Space[Any]]) -> spaces.Space[Any]:
    """Return the space of the concatenated flat values of leaves with the same space."""
    first, count = leaves[0], len(leaves)
    if isinstance(first, spaces.Box):
        low, high = (np.tile(bound.ravel(), count) for bound in (first.low, first.high))
        return spaces.Box(low, high, dtype=first.dtype.type)
    if isinstance(first, spaces.MultiBinary):
        return spaces.MultiBinary(count * math.prod(first.shape))
    assert isinstance(first, spaces.Discrete | spaces.MultiDiscrete)
    sizes = first.n if isinstance(first, spaces.Discrete) else first.nvec
    sizes, start = (np.tile(np.ravel(numbers), count) for numbers in (sizes, first.start))
    return spaces.MultiDiscrete(sizes, start=start)


class CentralizedActorCritic(ActorCriticModel):
    """Actor-critic with a centralised critic; see `ActorCriticModel`.

    The input of the policy is the observation of the acting agent. The critic, which is used only
    for learning, also receives the observations of all other agents, which a `TurnSplitter` adds.
    """

    is_centralized = True

    def inputs(self, obs: TensorTree) -> TensorTree:
        """Return the policy inputs: the normalized observation of the agent, without masks."""
        return super().inputs(without_joint(obs))

    def raw_values(self, features: TensorTree, obs: TensorTree) -> Tensor:
        """Return outputs of the critic, `[..., output_size]`."""
        values: Tensor = self.critic(self.inputs(obs), obs)
        return values


def build_centralized(
    build: Callable[[ModelConfig, Any, Any, int], nn.Module],
    config: ModelConfig,
    several: AgentSpaces,
    agent: str,
    seed: int,
) -> CentralizedActorCritic:
    """Build an actor-critic with a centralised critic.

    Args:
        build: Builds a model from settings, observation space, action space and seed.
        config: Model settings.
        several: Spaces of the agents.
        agent: Name of any agent that uses the policy.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: If the algorithm has no state-value critic, or a network cannot be built.
    """
    model = build(without_critic(config), *several.of(agent), seed)
    if type(model) is not ActorCriticModel:
        problem = "only state-value critics can be centralised; choose a2c, ppo or impala, or null"
        raise ConfigError("model.centralized_critic", problem, True)
    own = input_space(flat_space(several.observations[agent]))
    shown: Any = flat_space(several.observation_space)
    joint = Dict(OrderedDict(seen_by_critic(shown.spaces)))
    around, others = model.around, None
    if model.normalizer is not None:
        excluded = [key for key in joint if key.split("/", 4)[-1] in config.normalization.exclude]
        settings = replace(config.normalization, exclude=excluded)
        others = ObservationNormalizer(joint, settings)
        around["normalizer"] = NormalizerOfAll(own, others, config.normalization)
    parts = dict(own.spaces) if isinstance(own, Dict) else own
    leaves = {**with_name(OWN, parts), **part_of(joint.spaces, JOINT)}
    joins = {} if config.critic is not None else joined_leaves(leaves, config)
    for key, group in joins.items():
        leaves[key] = joined_space([leaves.pop(name) for name in group])
    read = Dict(OrderedDict(leaves))
    # Trunk and recurrent layers belong to the policy only.
    alone = replace(config, trunk=None, rnn=None, shared_trunk=False)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(Seeds(seed).integer("critic"))
        critic = CentralizedCritic(build_critic(alone, read, model.value_head), others, joins)
    return CentralizedActorCritic(model.policy, critic, model.value_head, **around).eval()
