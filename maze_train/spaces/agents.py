"""Spaces of several agents as those of one environment: a part for each agent, and flags.

Observations are a Dict with the keys

    agents      observation of each agent by name; the last one it had, while it does not act
    acts        who acts next, `[A]` bool
    rewards     what each agent got since the step before, `[A]`
    terminated  whose episode has ended in the step, `[A]` bool
    truncated   whose was cut off in it, `[A]` bool

and actions a Dict with the action of each agent, of which those count that belong to agents who
act.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from gymnasium import spaces

from maze_train.core.types import leaves_by_key
from maze_train.spaces.describe import is_mask_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from maze_train.core.types import Tensor, TensorTree


AGENTS, ACTS, REWARDS = "agents", "acts", "rewards"
TERMINATED, TRUNCATED = "terminated", "truncated"
AGENT_RETURNS = "agent_returns"
"""Key of an info: the sum of rewards of each agent since the reset."""
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


JOINT = "/joint"
"""Name below which the observations of a policy with a centralised critic have those of all agents;
no key of an observation space begins so."""

OWN_LEAF = "/own"
"""Key of an own observation that is a lone leaf, beside those."""

JOINT_ACTS, JOINT_AGENT = f"{JOINT}/{ACTS}", f"{JOINT}/agent"
"""Flags of who acts, and the number of the agent itself."""


def part_of(tree: Mapping[str, Any], name: str) -> Any:
    """The part of a flat mapping below a name: a leaf, or the mapping of those below it."""
    if name in tree:
        return tree[name]
    start = f"{name}/"
    return {key[len(start) :]: leaf for key, leaf in tree.items() if key.startswith(start)}


def flat_space_of(
    observation_space: spaces.Dict, agent: str, *, is_centralized: bool = False
) -> spaces.Space[Any]:
    """The flat observation space of one agent, of the flat one of all of them.

    Args:
        observation_space: That of all of them.
        agent: Its name.
        is_centralized: Whether observations have what a centralised critic reads; see `with_joint`.
    """
    part = part_of(part_of(observation_space.spaces, AGENTS), agent)
    if is_centralized:
        part = {**_own_leaves(part), **seen_by_critic(observation_space.spaces)}
    return spaces.Dict(part) if isinstance(part, dict) else part


def is_seen_by_critics(key: str) -> bool:
    """Whether critics read a leaf of the flat tree of all agents: not masks, rewards and ends."""
    top, _, below = key.partition("/")
    return top == ACTS or (top == AGENTS and not is_mask_key(below.partition("/")[2]))


def joint_view(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves of the flat tree of all agents that critics read, below `JOINT`."""
    return with_name(JOINT, {k: leaf for k, leaf in tree.items() if is_seen_by_critics(k)})


def seen_by_critic(joint: Mapping[str, spaces.Space[Any]]) -> dict[str, spaces.Space[Any]]:
    """Spaces of what a centralised critic reads besides the own observation of its agent."""
    count = spaces.Discrete((joint[ACTS].shape or (0,))[0])
    return {**joint_view(joint), JOINT_AGENT: count}


def with_joint(own: Any, joint: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """The observation of an agent, `[T, E, ...]`, with what its centralised critic reads besides.

    Args:
        own: The observation.
        joint: Result of `joint_view`.
        number: Which agent it is.
    """
    numbers = torch.full(joint[JOINT_ACTS].shape[:2], number)
    return {**_own_leaves(own), **joint, JOINT_AGENT: numbers}


def without_joint(obs: TensorTree) -> TensorTree:
    """The own observation of an agent, with or without the rest."""
    if not isinstance(obs, dict):
        return obs
    own = {key: leaf for key, leaf in obs.items() if not key.startswith(JOINT)}
    return own.get(OWN_LEAF, own)


def _own_leaves(own: Any) -> dict[str, Any]:
    return {key or OWN_LEAF: leaf for key, leaf in leaves_by_key(own).items()}


def with_name(name: str, part: Any) -> dict[str, Any]:
    """The flat mapping whose part below a name is `part`; the inverse of `part_of`."""
    if isinstance(part, dict):
        return {f"{name}/{key}": leaf for key, leaf in part.items()}
    return {name: part}


def joined(parts: Sequence[TensorTree], dim: int = 0) -> TensorTree:
    """Trees of the same form, one after the other along a dimension."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, dict):
        return {
            key: torch.cat([cast("dict[str, Tensor]", part)[key] for part in parts], dim)
            for key in first
        }
    return torch.cat(cast("list[Tensor]", list(parts)), dim)
