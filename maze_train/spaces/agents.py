"""Spaces of several agents as those of one environment: a part for each agent, and flags.

Observations are a Dict with the keys

    agents      observation of each agent by name; the last one it had, while it does not act
    acts        who acts next, `[A]` bool
    rewards     what each agent got since the step before, `[A]`
    terminated  whose episode has ended in the step, `[A]` bool
    truncated   whose was cut off in it, `[A]` bool; if terminated as well, the value of the state
                is unknown, and the turn is not learned from

and actions a Dict with the action of each agent; only those of agents that act count.
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
"""Key of an info: the sum of rewards of each agent since the reset."""
TEAMS = "teams"
"""Key of the metadata of an environment: the names of its agents by team."""
FLAGS = (ACTS, TERMINATED, TRUNCATED)


@dataclass(frozen=True)
class AgentSpaces:
    """Spaces of each agent by name, in one order."""

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
        """Observation space of all agents together."""
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
        """Action space of all agents together."""
        return spaces.Dict(OrderedDict(self.actions))


def agent_spaces(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
) -> AgentSpaces | None:
    """The spaces of each agent; None if the spaces are those of one agent.

    Args:
        observation_space: Observation space of one environment, as the environment gives it.
        action_space: Its action space.
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


def matching(pattern: str, agents: Sequence[str]) -> list[str]:
    """The agent of a name, which may look like a pattern, else those that match the pattern."""
    return [pattern] if pattern in agents else [a for a in agents if fnmatchcase(a, pattern)]


def agents_named(pattern: str, key: str, agents: Sequence[str]) -> list[str]:
    """The agents that a name or pattern in the settings means.

    Raises:
        ConfigError: If there is none; `key` is the setting.
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
    """Return the teams of all agents; an agent that no team names is a team by itself.

    Args:
        teams: Names or patterns of the members of each team.
        agents: Names of all agents; members and teams are in their order.

    Raises:
        ConfigError: If a name is of no agent, or an agent is in two teams.
    """
    owners = {agent: ("", agent) for agent in agents}
    for team, members in teams.items():
        key = f"env.teams.{team}"
        for agent in (agent for name in members for agent in agents_named(name, key, agents)):
            before = owners[agent]
            if before[0] not in ("", team):
                problem = f"{agent} is in the team {before[0]} already; an agent has one team"
                raise ConfigError(key, problem, list(members))
            owners[agent] = (team, "")
    return tuple(
        tuple(agent for agent in agents if owners[agent] == owner)
        for owner in dict.fromkeys(owners.values())
    )


def teams_in(metadata: Mapping[str, Any], agents: Sequence[str]) -> Sequence[Sequence[str]]:
    """The teams that the metadata of an environment names; without any, each agent is one.

    Args:
        metadata: The metadata.
        agents: Names of all agents.
    """
    found: Sequence[Sequence[str]] = metadata.get(TEAMS) or [(agent,) for agent in agents]
    return found
