"""Multi-agent models: assignment of policies to agents, and construction."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from gymnasium import spaces
from torch import nn

from maze_train.collect.fixed_policies import fixed_policy
from maze_train.core.errors import ConfigError
from maze_train.core.seeding import Seeds
from maze_train.core.types import Tensor
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.nets.centralized import build_centralized
from maze_train.nets.config import ModelConfig
from maze_train.nets.joint import JointModel
from maze_train.spaces.agents import AgentSpaces, agent_spaces, agents_named
from maze_train.spaces.describe import space_to_dict
from maze_train.training.config import SNAPSHOT, AlgorithmConfig, PolicyConfig
from maze_train.training.models import make_model, model_maker

SHARED = "default"
"""ID of the policy if all agents share a policy."""

MARKS = re.compile("[./@:]")
"""Characters not allowed in policy IDs, because they are separators in the names of weights,
metrics, snapshots and policies of a run."""


def policies_of_agents(spaces: AgentSpaces, policies: Mapping[str, PolicyConfig]) -> dict[str, str]:
    """Return the policy ID of each agent.

    Without settings, agents with the same spaces share a policy. The policy ID is `default` if all
    agents share a policy, otherwise the common prefix of the agents' names.

    Args:
        spaces: Spaces of the agents.
        policies: Settings of the policies, keyed by ID.

    Raises:
        ConfigError: If an agent has no policy or several policies, a policy matches no agent, or
            the agents of a policy have different spaces.
    """
    if not policies:
        return _shared_policies(spaces)
    found: dict[str, str] = {}
    for policy, config in policies.items():
        for pattern in config.agents:
            for agent in agents_named(pattern, f"policies.{policy}.agents", spaces.agents):
                if found.setdefault(agent, policy) != policy:
                    problem = f"{agent} already has the policy {found[agent]}; only one is allowed"
                    raise ConfigError(f"policies.{policy}.agents", problem, config.agents)
    without = [agent for agent in spaces.agents if agent not in found]
    if without:
        problem = f"no policy for {', '.join(without)}; add them to the agents of a policy"
        raise ConfigError("policies", problem, list(policies))
    for policy in policies:
        _check_same_spaces(policy, [a for a in spaces.agents if found[a] == policy], spaces)
    return {agent: found[agent] for agent in spaces.agents}


def is_trainable(
    policy: str, policies: Mapping[str, PolicyConfig], chosen: Sequence[str] | None
) -> bool:
    """Return whether the settings allow training a policy; see `learner_with_frozen`."""
    is_fixed = policy in policies and policies[policy].is_fixed
    return not is_fixed and (chosen is None or policy in chosen)


def check_id(policy: str) -> None:
    """Raise ConfigError if a policy ID is not valid in metric names or as a module name."""
    problem = _problem_of_id(policy)
    if problem:
        raise ConfigError("policies", f"{problem}; choose another ID", policy)


def _problem_of_id(name: str) -> str:
    """Return the reason why a policy ID is invalid; empty for a valid ID."""
    if hasattr(nn.ModuleDict, name):
        return "not a valid PyTorch module name"
    return "" if name and not MARKS.search(name) else "expected a name without . / @ :"


def _check_same_spaces(policy: str, agents: list[str], spaces: AgentSpaces) -> None:
    for agent in agents[1:]:
        if spaces.of(agent) != spaces.of(agents[0]):
            raise ConfigError(
                f"policies.{policy}.agents",
                f"{agents[0]} and {agent} have different spaces, {spaces.of(agents[0])} and "
                f"{spaces.of(agent)}; give each of them a policy",
                agents,
            )


def _shared_policies(spaces: AgentSpaces) -> dict[str, str]:
    """Return the policy ID of each agent, with one policy per pair of spaces."""
    groups: dict[str, list[str]] = {}
    for agent in spaces.agents:
        described = str([space_to_dict(space) for space in spaces.of(agent)])
        groups.setdefault(described, []).append(agent)
    if len(groups) == 1:
        return dict.fromkeys(spaces.agents, SHARED)
    names = [_common_name(agents) for agents in groups.values()]
    if len(set(names)) < len(names) or not all(names):
        names = [agents[0] for agents in groups.values()]
    owners: dict[str, str] = {}
    for name, agents in zip(names, groups.values(), strict=True):
        policy = MARKS.sub("_", name)
        while policy in owners.values() or _problem_of_id(policy):
            policy += "_"
        owners |= dict.fromkeys(agents, policy)
    return {agent: owners[agent] for agent in spaces.agents}


def _common_name(agents: list[str]) -> str:
    """Return the common prefix of names without digits: `agent` for agent_0 and agent_1."""
    first, last = min(agents), max(agents)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return re.sub(r"[_\W\d]+$", "", "".join(a for a, _ in same))


def build_joint_model(
    build: Callable[[ModelConfig, Any, Any, int], nn.Module],
    config: ModelConfig,
    spaces: AgentSpaces,
    policies: Mapping[str, PolicyConfig],
    seed: int,
) -> JointModel:
    """Build the policies of all agents.

    Args:
        build: Builds a model from its settings, observation space, action space and seed.
        config: Default network settings.
        spaces: Spaces of the agents.
        policies: Settings of the policies, keyed by ID; see `policies_of_agents`.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: If the policies do not match the agents, or a policy cannot be built.
    """
    owners, seeds = policies_of_agents(spaces, policies), Seeds(seed)
    models: dict[str, nn.Module] = {}
    for agent, policy in owners.items():
        if policy in models:
            continue
        check_id(policy)
        own, here = policies.get(policy), spaces.of(agent)
        if own is None or own.source is None or own.run is not None:
            model = (own.model if own else None) or config
            if model.centralized_critic:
                given = build, model, spaces, agent, seeds.integer(policy)
                models[policy] = build_centralized(*given)
            else:
                models[policy] = build(model, *here, seeds.integer(policy))
        else:
            key = f"policies.{policy}.source"
            models[policy] = fixed_policy(own.source, key, *here)
    return JointModel(models, owners)


def model_weights(
    modules: Mapping[str, dict[str, Tensor]],
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
) -> dict[str, Tensor]:
    """Return the weights of a model, given the weights of its modules."""
    if agent_spaces(observation_space, action_space) is None:
        return modules[DEFAULT_MODULE]
    return {
        f"policies.{policy}.{name}": value
        for policy, weights in modules.items()
        if SNAPSHOT not in policy
        for name, value in weights.items()
    }


def make_joint_model(
    algorithm: AlgorithmConfig,
    config: ModelConfig,
    policies: Mapping[str, PolicyConfig],
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    seed: int,
) -> nn.Module:
    """Build the model of an algorithm for a single-agent or multi-agent environment.

    Raises:
        ConfigError: If the algorithm does not support multiple agents, the policies do not match
            the agents, or a network cannot be built.
    """
    several = agent_spaces(observation_space, action_space)
    if several is None:
        return make_model(algorithm, config, policies, observation_space, action_space, seed)
    if not algorithm.supports_multi_agent:
        problem = "trains a single agent, but the environment has several; choose an algorithm "
        problem += "with supports_multi_agent"
        raise ConfigError("algorithm", problem, algorithm.name)
    return build_joint_model(model_maker(algorithm), config, several, policies, seed)
