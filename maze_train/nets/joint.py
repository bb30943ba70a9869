"""Policies of several agents as one policy, and critics that see what all agents observe.

Sources: the centralised critics of Lowe et al. (2017), arXiv:1706.02275, for state values; inputs
as in Yu et al. (2021), arXiv:2103.01955, section 5.2 (agent-specific global state).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.spaces import Dict
from torch import nn

from maze_train.core.errors import ConfigError
from maze_train.core.seeding import Seeds
from maze_train.core.types import Device, Shape, Tensor, TensorTree
from maze_train.distributions.base import Distribution
from maze_train.nets.actor_critic import ActorCriticModel, build_critic
from maze_train.nets.config import ModelConfig, ObservationNormalizationConfig
from maze_train.nets.normalization import ObservationNormalizer
from maze_train.nets.policy_model import input_space, without_critic
from maze_train.spaces.agents import ACTS, AGENTS, AgentSpaces
from maze_train.spaces.describe import flat_space, is_image
from maze_train.spaces.tensors import (
    JOINT,
    OWN_LEAF,
    joined,
    part_of,
    parts_by_name,
    seen_by_critic,
    stacked,
    unstacked,
    with_name,
    without_joint,
)


class AgentsDistribution:
    """Independent actions of several agents, by name.

    Parameters, noise and actions are those of each agent, one after the other. Agents that have one
    and the same distribution are computed in one call.

    Args:
        parts: The distribution of each agent.
    """

    def __init__(self, parts: Mapping[str, Distribution]) -> None:
        self.parts = dict(parts)
        self.param_sizes = [part.param_size for part in parts.values()]
        self.param_size = sum(self.param_sizes)
        self._noise_sizes = [part.noise_size for part in parts.values()]
        self.noise_size = sum(self._noise_sizes)
        self.always_draws = any(getattr(part, "always_draws", False) for part in parts.values())
        """Whether an agent acts at random also where the most probable actions are asked for."""
        groups: dict[int, tuple[Any, list[str]]] = {}
        for agent, part in parts.items():
            groups.setdefault(id(part), (part, []))[1].append(agent)
        self._groups = list(groups.values())

    def draw_noise(
        self, shape: Shape, generator: torch.Generator | None = None, device: Device = None
    ) -> Tensor:
        """Random numbers for `sample`, `[*shape, noise_size]`."""
        draws = [part.draw_noise(shape, generator, device) for part in self.parts.values()]
        return torch.cat(draws, dim=-1)

    def sample(self, params: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """The actions that `noise` selects, as the agents have them."""
        given = self._by_agent(params), self._noises(noise)
        return _flat(self._of_each(lambda part, own, drawn: part.sample(own, drawn), *given))

    def mode(self, params: Tensor, noise: Tensor | None = None) -> dict[str, Tensor]:
        """The most probable actions, as the agents have them; see `always_draws` for `noise`."""
        if noise is None:
            return _flat(self._of_each(lambda part, own: part.mode(own), self._by_agent(params)))

        def chosen(part: Any, own: Tensor, drawn: Tensor) -> TensorTree:
            draws = getattr(part, "always_draws", False)
            found: TensorTree = part.sample(own, drawn) if draws else part.mode(own)
            return found

        return _flat(self._of_each(chosen, self._by_agent(params), self._noises(noise)))

    def to_env(self, actions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The actions as the environment takes them."""
        return _flat(self._of_each(lambda part, own: part.to_env(own), parts_by_name(actions)))

    def log_prob(self, params: Tensor, actions: Mapping[str, Tensor]) -> Tensor:
        """Log-probabilities of the actions of A agents, `[..., A]`.

        Zeros where actions have none, as those of policies that act at random and never learn.
        """

        def of_one(part: Any, own: Tensor, taken: Any) -> TensorTree:
            if not hasattr(part, "log_prob"):
                return own.new_zeros(own.shape[:-1])
            found: Tensor = part.log_prob(own, taken)
            return found

        found = self._of_each(of_one, self._by_agent(params), parts_by_name(actions))
        return torch.stack(cast("list[Tensor]", list(found.values())), dim=-1)

    def split(self, params: Tensor) -> tuple[Tensor, ...]:
        """The params of every agent, each [..., param_size of the agent]."""
        return torch.split(params, self.param_sizes, dim=-1)

    def _by_agent(self, params: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.parts, self.split(params), strict=True))

    def _noises(self, noise: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.parts, torch.split(noise, self._noise_sizes, dim=-1), strict=True))

    def _of_each(
        self, function: Callable[..., TensorTree], *given: Mapping[str, TensorTree]
    ) -> dict[str, TensorTree]:
        """Results of `function(distribution, ...)` by agent, of arguments by agent."""
        found: dict[str, TensorTree] = {}
        for part, agents in self._groups:
            own = [stacked([trees[agent] for agent in agents]) for trees in given]
            found.update(zip(agents, unstacked(function(part, *own)), strict=True))
        return {agent: found[agent] for agent in self.parts}


def _flat(trees: Mapping[str, TensorTree]) -> dict[str, Tensor]:
    """Trees by agent as one flat mapping."""
    found: dict[str, Tensor] = {}
    for agent, tree in trees.items():
        found.update(with_name(agent, tree))
    return found


class JointModel(nn.Module):
    """Acts for all agents of an environment, each with the policy that it is given.

    Observations are those of `maze_train.spaces.agents`. Agents with the same policy are asked for
    in one batch. The recurrent state of an agent stays as it is while the agent does not act.

    Args:
        policies: Models by the id of their policy.
        agents: Id of the policy of each agent.
    """

    def __init__(self, policies: Mapping[str, nn.Module], agents: Mapping[str, str]) -> None:
        super().__init__()
        self.policies = nn.ModuleDict(policies)
        self.agents = dict(agents)
        self.members: dict[str, list[str]] = {
            policy: [agent for agent, own in agents.items() if own == policy] for policy in policies
        }
        self.distribution = AgentsDistribution(
            {agent: self._policy(policy).distribution for agent, policy in agents.items()}
        )
        self.state_sizes: dict[str, int] = {
            agent: int(getattr(self._policy(policy), "state_size", 0))
            for agent, policy in agents.items()
        }

    @property
    def state_size(self) -> int:
        """Size S of the recurrent state of all agents of one environment; 0: none."""
        return sum(self.state_sizes.values())

    @property
    def centralized(self) -> list[str]:
        """Ids of the policies with a centralised critic."""
        return [key for key, own in self.policies.items() if getattr(own, "is_centralized", False)]

    @property
    def by_policy(self) -> dict[str, nn.Module]:
        """The models by the id of their policy."""
        return dict(self.policies.items())

    def states_by_agent(self, states: Tensor) -> dict[str, Tensor]:
        """The part of each agent of memories `[..., S]`."""
        parts = torch.split(states, list(self.state_sizes.values()), dim=-1)
        return dict(zip(self.agents, parts, strict=True))

    def forward(self, obs: TensorTree) -> Tensor:
        """The same as `policy_params`."""
        return self.policy_params(obs)

    def policy_params(self, obs: TensorTree) -> Tensor:
        """Parameters of the actions of all agents, `[n, param_size]`, of feedforward models."""
        assert not self.state_size, "this model is recurrent: call policy_step"
        return self._params(obs, {})[0]

    def policy_step(self, obs: TensorTree, state: Tensor) -> tuple[Tensor, Tensor]:
        """Parameters `[n, param_size]`, and the recurrent state `[n, S]` after `obs`."""
        before = self.states_by_agent(state)
        params, after = self._params(obs, before)
        acts = cast("dict[str, Tensor]", obs)[ACTS].bool()
        kept = [
            torch.where(acts[:, i, None], after[agent], old) if agent in after else old
            for i, (agent, old) in enumerate(before.items())
        ]
        return params, torch.cat(kept, dim=-1)

    def end_episodes(self, states: Tensor) -> None:
        """Notify policies of ended episodes, given the recurrent states of these, `[k, S]`."""
        for agent, own in self.states_by_agent(states).items():
            policy = self._policy(self.agents[agent])
            if hasattr(policy, "end_episodes"):
                policy.end_episodes(own)

    def _params(
        self, obs: TensorTree, states: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Parameters of all agents, and the recurrent state after `obs` of those that have one."""
        parts = parts_by_name(part_of(cast("dict[str, Tensor]", obs), AGENTS))
        params: dict[str, Tensor] = {}
        after: dict[str, Tensor] = {}
        for policy, agents in self.members.items():
            if not agents:
                continue
            model = self._policy(policy)
            own = joined([parts[agent] for agent in agents])
            if getattr(model, "state_size", 0):
                state = torch.cat([states[agent] for agent in agents])
                if hasattr(model, "turn_step"):
                    found, state = model.turn_step(own, state, self._acting(obs, agents))
                else:
                    found, state = model.policy_step(own, state)
                after.update(zip(agents, _of_each_agent(state, agents), strict=True))
            else:
                found = model.policy_params(own)
            params.update(zip(agents, _of_each_agent(found, agents), strict=True))
        return torch.cat([params[agent] for agent in self.agents], dim=-1), after

    def _acting(self, obs: TensorTree, agents: Sequence[str]) -> Tensor:
        """Whether some agents act, one after the other in all environments, `[len(agents) * n]`."""
        numbers = {agent: i for i, agent in enumerate(self.agents)}
        acts = cast("dict[str, Tensor]", obs)[ACTS].bool()
        return acts[:, [numbers[agent] for agent in agents]].T.flatten()

    def _policy(self, policy: str) -> Any:
        return self.policies[policy]


def acting_alone(models: Mapping[str, nn.Module]) -> JointModel:
    """The model in which each agent acts with its own model.

    Args:
        models: Models by agent; PyTorch cannot name modules as agents may be named.
    """
    numbers = {agent: str(i) for i, agent in enumerate(models)}
    return JointModel({numbers[agent]: own for agent, own in models.items()}, numbers)


def _of_each_agent(rows: Tensor, agents: list[str]) -> tuple[Tensor, ...]:
    """The rows of agents that were asked for in one batch."""
    # Unlike `chunk`, which compares sizes, this can be exported for any number of environments.
    return rows.reshape(len(agents), -1, rows.shape[-1]).unbind()


OWN = "own"
"""Name of the observation of the agent itself among the inputs of its critic."""


class NormalizerOfAll(ObservationNormalizer):
    """Normalises the observations of an agent, and those of all agents for its critic.

    Args:
        space: The input of the policy.
        others: Normalises what the critic reads in addition; a part of the critic.
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
        joins: Leaves that the network reads as one vector, by its key; see `joined_leaves`.
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
        """Raw values, `[..., output_size]`, of the own observation as the policy reads it."""
        joint = {key: leaf for key, leaf in obs.items() if key.startswith(JOINT)}
        seen: Any = joint if self.normalizer is None else self.normalizer(joint)
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
    """Leaves of agents with the same name and an equal space, by a key for all of them.

    A template network has a branch per key. One branch for all agents keeps its cost in proportion
    to what they observe; images stay apart.

    Args:
        leaves: Spaces by key, those of agents as `agents/<name>` or `agents/<name>/<key>`.
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
    """The space of equal leaves, flattened and one after the other."""
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
    """An actor-critic with a centralised critic; see `ActorCriticModel`.

    To act, it reads the observation of its agent. To learn, it reads those that a `TurnSplitter`
    gives it, which have the observations of all agents next to the own one.
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
        ConfigError: If the algorithm has other critics than those of states, or a network cannot
            be built.
    """
    model = build(without_critic(config), *several.of(agent), seed)
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
    leaves = {**with_name(OWN, parts), **part_of(joint.spaces, JOINT)}
    joins = {} if config.critic is not None else joined_leaves(leaves, config)
    for key, group in joins.items():
        leaves[key] = joined_space([leaves.pop(name) for name in group])
    read = Dict(OrderedDict(leaves))
    # What a trunk or recurrent layers hold is for the policy.
    alone = replace(config, trunk=None, rnn=None, shared_trunk=False)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(Seeds(seed).integer("critic"))
        critic = CentralizedCritic(build_critic(alone, read, model.value_head), others, joins)
    return CentralizedActorCritic(model.policy, critic, model.value_head, **around).eval()
