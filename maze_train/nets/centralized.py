"""Actor-critics whose critic sees what all agents observe, and whose policy acts on its own part.

Sources: the centralised critics of Lowe et al. (2017), arXiv:1706.02275, for state values; inputs
as in Yu et al. (2021), arXiv:2103.01955, section 5.2 (agent-specific global state).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from gymnasium.spaces import Dict
from torch import nn

from maze_train.errors import ConfigError
from maze_train.nets.actor_critic import ActorCriticModel, build_critic
from maze_train.nets.normalization import ObservationNormalizer
from maze_train.nets.policy_model import input_space
from maze_train.seeding import Seeds
from maze_train.spaces.agent_trees import (
    JOINT,
    OWN_LEAF,
    part_of,
    seen_by_critic,
    with_name,
    without_joint,
)
from maze_train.spaces.describe import flat_space

if TYPE_CHECKING:
    from collections.abc import Callable

    from gymnasium import spaces

    from maze_train.nets.config import ModelConfig, ObservationNormalizationConfig
    from maze_train.spaces.agents import AgentSpaces
    from maze_train.types import Tensor, TensorTree


OWN = "own"
"""Name of the observation of the agent itself among the inputs of its critic."""


class NormalizerOfAll(ObservationNormalizer):
    """Normalises the observations of an agent, and takes in those of all agents for its critic.

    Args:
        space: What the policy reads.
        others: Normalises what the critic reads besides; a part of the critic.
        config: Settings.
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        others: ObservationNormalizer,
        config: ObservationNormalizationConfig,
    ) -> None:
        super().__init__(space, config)
        self._others = (others,)  # in a tuple, as it is no submodule

    @property
    def keys(self) -> list[str]:
        """Keys that are normalised, of all agents."""
        return [*(key or OWN_LEAF for key in super().keys), *self._others[0].keys]

    def update(self, obs: TensorTree) -> None:
        """Take observations into both statistics; see `ObservationNormalizer`."""
        super().update(without_joint(obs))
        self._others[0].update(obs)

    @property
    def is_waiting(self) -> bool:
        """Whether either has fewer observations than wanted before training."""
        return super().is_waiting or self._others[0].is_waiting

    def freeze(self) -> None:
        """Keep both statistics as they are from now on."""
        super().freeze()
        self._others[0].freeze()


class CentralizedCritic(nn.Module):
    """Maps what all agents observe to raw values of one agent.

    Args:
        net: Reads a flat mapping: `own`, `agents/<name>`, `acts`, `agent`.
        normalizer: Normalises observations of all agents, or None.
    """

    def __init__(self, net: nn.Module, normalizer: ObservationNormalizer | None) -> None:
        super().__init__()
        self.normalizer = normalizer
        self.net = net

    def forward(self, own: TensorTree, obs: dict[str, Tensor]) -> Tensor:
        """Raw values, `[..., output_size]`, of the own observation as the policy reads it."""
        joint = {key: leaf for key, leaf in obs.items() if key.startswith(JOINT)}
        seen: Any = joint if self.normalizer is None else self.normalizer(joint)
        values: Tensor = self.net({**with_name(OWN, own), **part_of(seen, JOINT)})
        return values


class CentralizedActorCritic(ActorCriticModel):
    """An actor-critic with a centralised critic; see `ActorCriticModel`.

    To act, it reads the observation of its agent. To learn, it reads those that a `TurnSplitter`
    gives it, which have the observations of all agents beside the own one.
    """

    is_centralized = True

    def inputs(self, obs: TensorTree) -> TensorTree:
        """Inputs of the policy: the own observation without masks, normalised."""
        return super().inputs(without_joint(obs))

    def raw_values(self, features: TensorTree, obs: TensorTree) -> Tensor:
        """Output of the critic, `[..., output_size]`."""
        values: Tensor = self.critic(self.inputs(obs), obs)
        return values


def build_centralized(
    build: Callable[[ModelConfig, Any, Any, int], nn.Module],
    config: ModelConfig,
    several: AgentSpaces,
    agent: str,
    seed: int,
) -> CentralizedActorCritic:
    """Build an actor-critic, and give it a centralised critic.

    Args:
        build: Builds a model from its settings, observation space, action space and seed.
        config: Model settings.
        several: Spaces of the agents.
        agent: Name of one of those that the policy acts for.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: If the algorithm has other critics than those of states, or a network can not
            be built.
    """
    plain = replace(config, centralized_critic=None, critic=None, critic_hidden_sizes=None)
    model = build(plain, *several.of(agent), seed)
    if type(model) is not ActorCriticModel:
        problem = "only critics of states can be centralised; choose a2c, ppo or impala, or null"
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
    read = Dict(OrderedDict({**with_name(OWN, parts), **part_of(joint.spaces, JOINT)}))
    # What a trunk or a memory holds is for the policy.
    alone = replace(config, trunk=None, memory=None, shared_trunk=False)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(Seeds(seed).integer("critic"))
        critic = CentralizedCritic(build_critic(alone, read, model.value_head), others)
    return CentralizedActorCritic(model.policy, critic, model.value_head, **around).eval()
