"""Policies of several agents that play in a rollout, each with its own origin."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from maze_train.errors import ConfigError
from maze_train.nets.joint import JointModel
from maze_train.rollout.population import ModelAgent
from maze_train.runners.named_policies import NamedPolicy, named_policy
from maze_train.runners.rollout_policies import RolloutPolicy, score_of
from maze_train.runners.saved_policies import SavedPolicy, read_saved_policy
from maze_train.spaces.agents import AgentSpaces, agent_spaces
from maze_train.spaces.compare import check_same_spaces
from maze_train.training.config import RANDOM, PolicyConfig
from maze_train.training.policies import check_id, matching, policies_of_agents

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maze_train.config.rollout_config import RolloutConfig
    from maze_train.envs.slots import EnvSlots
    from maze_train.rollout.slot_agent import SlotAgent


OF_RUN = "_of_run"
"""End of the id of a policy of the run, where the user has given its id to another one."""


def with_policies(
    base: RolloutPolicy, config: RolloutConfig, spaces: tuple[Any, Any]
) -> RolloutPolicy:
    """The policies that a rollout names, and for all other agents those of its run.

    Args:
        base: What plays for agents that are not named.
        config: The configuration, with `policies`.
        spaces: Observation and action space of the environment.

    Raises:
        ConfigError: If there is one agent, agents and policies do not fit, or one can not be built.
        RunDirectoryError: If saved weights do not fit.
    """
    several = agent_spaces(*spaces)
    if several is None:
        problem = "the environment has one agent; leave it out"
        raise ConfigError("policies", problem, list(config.policies))
    policies = _all_policies(config, several)
    owners = policies_of_agents(several, policies)
    found: dict[str, NamedPolicy] = {}
    for agent, policy in owners.items():
        if policy not in found:
            check_id(policy)
            found[policy] = _found(policy, policies[policy], agent, several, config)
    models = [named.make_model() for named in found.values()]  # what fails does so here
    learned = any(True for model in models for _ in model.parameters())
    described = {
        policy: {
            "agents": [agent for agent, owner in owners.items() if owner == policy],
            "source": named.source,
            **(score_of(named.saved) if named.saved else {}),
        }
        for policy, named in found.items()
    }
    return replace(
        base,
        label=", ".join(f"{policy}: {_title(named)}" for policy, named in found.items()),
        settings={"policies": described},
        make_agent=partial(_agent_of, found, owners, config.deterministic),
        spaces=spaces,
        deterministic=config.deterministic if learned else None,
        owners=owners,
    )


def _all_policies(config: RolloutConfig, several: AgentSpaces) -> dict[str, PolicyConfig]:
    """The policies that are named, and those of the run for agents that are not."""
    of_run: dict[str, str] = {}
    own: Mapping[str, PolicyConfig] = {}
    if config.run is not None:
        saved = read_saved_policy(config.run, config.trust, config)
        own = saved.config.policies
        of_run = _policies_of_run(saved, several)
    elif config.policy == RANDOM:
        kinds = policies_of_agents(several, {})  # a policy is for agents with the same spaces
        one = len(set(kinds.values())) == 1
        of_run = {agent: RANDOM if one else f"{RANDOM}_{kind}" for agent, kind in kinds.items()}
    named = {
        key: replace(policy, agents=_agents(key, policy, several, of_run))
        for key, policy in config.policies.items()
    }
    taken = {agent for policy in named.values() for agent in policy.agents}
    rest: dict[str, list[str]] = {}
    for agent, owner in of_run.items():
        if agent not in taken:
            rest.setdefault(owner, []).append(agent)
    for owner, agents in rest.items():
        source = own[owner].source if owner in own and own[owner].run is None else None
        if source is None:
            source = RANDOM if config.run is None else f"{config.run}:{owner}"
        key = owner
        while key in named:
            key += OF_RUN
        named[key] = PolicyConfig(agents=agents, source=source)
    return named


def _policies_of_run(saved: SavedPolicy, several: AgentSpaces) -> dict[str, str]:
    """Id of the policy that a run has for each agent, of those for which it has just one."""
    theirs, own = agent_spaces(*saved.spaces), saved.config.policies
    if theirs is None:
        return {}
    if not own:
        owners = policies_of_agents(several, {}) | policies_of_agents(theirs, {})
        return {agent: owners[agent] for agent in several.agents}
    found: dict[str, set[str]] = {agent: set() for agent in several.agents}
    for policy, config in own.items():
        for pattern in config.agents:
            for agent in matching(pattern, several.agents):
                found[agent].add(policy)
    return {agent: ids.pop() for agent, ids in found.items() if len(ids) == 1}


def _agents(
    key: str, policy: PolicyConfig, several: AgentSpaces, of_run: Mapping[str, str]
) -> list[str]:
    """Names of the agents of a policy, which settings may call as a policy of the run does."""
    found: list[str] = []
    for name in policy.agents:
        agents = matching(name, several.agents)
        agents = agents or [agent for agent, owner in of_run.items() if owner == name]
        if not agents:
            known = ", ".join(dict.fromkeys((*several.agents, *of_run.values())))
            problem = f"no such agent, and no such policy of the run; there are: {known}"
            raise ConfigError(f"policies.{key}.agents", problem, name)
        found += agents
    return found


def _found(
    policy: str, own: PolicyConfig, agent: str, several: AgentSpaces, config: RolloutConfig
) -> NamedPolicy:
    """The policy that settings name, which has to be for the spaces of its agents."""
    key, spaces = f"policies.{policy}.source", several.of(agent)
    named = named_policy(own.source, key, spaces, agent, config.trust, config)
    if named.saved is not None:
        problem = f"its policy has the {{kind}} space {{found}}, {agent} has {{wanted}}"
        check_same_spaces(key, problem, named.saved.spaces, spaces, own.source)
    return named


def _title(named: NamedPolicy) -> str:
    if named.saved is not None:
        return named.saved.config.algorithm.name.upper()
    return RANDOM if named.source == RANDOM else str(named.source["_target_"])


def _agent_of(
    policies: Mapping[str, NamedPolicy],
    owners: Mapping[str, str],
    deterministic: bool,
    slots: EnvSlots,
) -> SlotAgent:
    models = {policy: named.make_model() for policy, named in policies.items()}
    return ModelAgent(JointModel(models, owners), len(slots), deterministic)
