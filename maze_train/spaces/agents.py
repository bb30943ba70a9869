"""Multi-agent environments as single environments: joint spaces with one entry per agent.

Observations are a Dict with the following keys:

    agents      observation of each agent by name; unchanged while the agent is inactive
    acts        whether each agent acts next, `[A]` bool
    rewards     reward of each agent since its previous action, `[A]`
    terminated  whether the episode of each agent terminated in the step, `[A]` bool
    truncated   whether the episode of each agent was truncated in the step, `[A]` bool; if it also
                terminated, the value of the state is unknown, and the step is excluded from
                learning

Actions are a Dict with the action of each agent; actions of inactive agents are ignored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from gymnasium import spaces

from maze_train.core.errors import ConfigError, did_you_mean, nearest

AGENTS, ACTS, REWARDS = "agents", "acts", "rewards"
TERMINATED, TRUNCATED = "terminated", "truncated"
AGENT_RETURNS = "agent_returns"
"""Info key: sum of the rewards of each agent since the reset."""
TEAMS = "teams"
"""Key of the environment metadata with the names of the agents by team."""
FLAGS = (ACTS, TERMINATED, TRUNCATED)


@dataclass(frozen=True)
class AgentSpaces:
    """Spaces of each agent by name, in a fixed order."""

    observations: dict[str, spaces.Space[Any]]
    actions: dict[str, spaces.Space[Any]]

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents."""
        return tuple(self.observations)

    def of(self, agent: str) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        """Observation and action space of an agent."""
        return self.observations[agent], self.actions[agent]

    @property
    def observation_space(self) -> spaces.Dict:
        """Joint observation space of all agents."""
        size = len(self.observations)
        parts: OrderedDict[str, spaces.Space[Any]] = OrderedDict()
        parts[AGENTS] = spaces.Dict(OrderedDict(self.observations))
        parts[ACTS] = spaces.MultiBinary(size)
        parts[REWARDS] = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        parts[TERMINATED] = spaces.MultiBinary(size)
        parts[TRUNCATED] = spaces.MultiBinary(size)
        return spaces.Dict(parts)

    @property
    def action_space(self) -> spaces.Dict:
        """Joint action space of all agents."""
        return spaces.Dict(OrderedDict(self.actions))


def agent_spaces(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
) -> AgentSpaces | None:
    """Return the spaces of each agent, or None for a single-agent environment.

    Args:
        observation_space: Unmodified observation space of one environment.
        action_space: Action space of the environment.
    """
    if not isinstance(observation_space, spaces.Dict) or not isinstance(action_space, spaces.Dict):
        return None
    if set(observation_space.spaces) != {AGENTS, REWARDS, *FLAGS}:
        return None
    observations = observation_space[AGENTS]
    if not isinstance(observations, spaces.Dict):
        return None
    return AgentSpaces(
        {name: observations[name] for name in action_space.spaces}, dict(action_space.spaces)
    )


def agents_of(own_spaces: tuple[spaces.Space[Any], spaces.Space[Any]]) -> tuple[str, ...]:
    """Return the names of the agents, given observation and action space; empty for one agent."""
    several = agent_spaces(*own_spaces)
    return () if several is None else several.agents


def matching(pattern: str, agents: Sequence[str]) -> list[str]:
    """Return the agent whose name equals the pattern, or else all agents that match the pattern."""
    return [pattern] if pattern in agents else [a for a in agents if fnmatchcase(a, pattern)]


def agents_named(pattern: str, key: str, agents: Sequence[str]) -> list[str]:
    """Return the agents that match a name or pattern from the settings.

    Raises:
        ConfigError: If no agent matches; the message names the setting `key`.
    """
    found = matching(pattern, agents)
    if not found:
        hint = did_you_mean(nearest(pattern, agents, count=1), "", " ")
        problem = f"no such agent; {hint}there are: {', '.join(agents)}"
        raise ConfigError(key, problem, pattern)
    return found


def partition(
    teams: Mapping[str, Sequence[str]], agents: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """Return the teams of all agents; an agent without a team forms a team of one.

    Args:
        teams: Names or patterns of the members of each team.
        agents: Names of all agents; members and teams are returned in this order.

    Raises:
        ConfigError: If a name matches no agent, or an agent is in two teams.
    """
    owners = {agent: ("", agent) for agent in agents}
    for team, members in teams.items():
        key = f"env.teams.{team}"
        for agent in (agent for name in members for agent in agents_named(name, key, agents)):
            before = owners[agent]
            if before[0] not in ("", team):
                problem = f"{agent} is already in team {before[0]}; an agent can be in one team"
                raise ConfigError(key, problem, list(members))
            owners[agent] = (team, "")
    return tuple(
        tuple(agent for agent in agents if owners[agent] == owner)
        for owner in dict.fromkeys(owners.values())
    )


def teams_in(metadata: Mapping[str, Any], agents: Sequence[str]) -> Sequence[Sequence[str]]:
    """Return the teams declared in the environment metadata; by default one team per agent.

    Args:
        metadata: The metadata.
        agents: Names of all agents.
    """
    found: Sequence[Sequence[str]] = metadata.get(TEAMS) or [(agent,) for agent in agents]
    return found
