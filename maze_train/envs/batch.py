"""Results of one step of vector environments, and what is read from the infos of last steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from maze_train.core.step_end import EpisodeEnd
from maze_train.spaces.agents import AGENT_RETURNS

SUCCESS = "is_success"
"""Key of an info that says whether an episode was a success."""


@dataclass(slots=True)
class StepReport:
    """Ends of episodes and infos of one step, in the order of the environments."""

    ends: list[EpisodeEnd] = field(default_factory=list)
    """Episodes that ended."""
    infos: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Infos of resets and of all other steps by index of the environment, if they are asked for."""
    lost: list[int] = field(default_factory=list)
    """Environments whose row is no transition, because their episode was dropped."""
    continuing: list[int] = field(default_factory=list)
    """Environments whose new episode continues with the game of the old one."""

    def add(self, other: StepReport) -> None:
        """Append the report of the environments that follow."""
        self.ends += other.ends
        self.infos += other.infos
        self.lost += other.lost
        self.continuing += other.continuing


def asked_keys(info_keys: Sequence[str], agents: Sequence[str]) -> tuple[str, ...]:
    """Return the keys of all numbers that statistics of episodes need.

    Args:
        info_keys: Keys that the user asked for.
        agents: Names of the agents of a multi-agent environment; empty for a single agent.
    """
    return (SUCCESS, *info_keys, *(f"{agent}/{SUCCESS}" for agent in agents))


def numbers_of(
    info: Mapping[str, Any], keys: Sequence[str], agents: Sequence[str]
) -> dict[str, float]:
    """Return the numbers of an info under some keys.

    A key may be a path: `fuel/left` is `info["fuel"]["left"]` unless there is a key of that name.
    A key that only infos of agents have gives the mean over these agents. Values that are not a
    single number are left out.
    """
    found: dict[str, float] = {}
    for key in keys:
        value = number_at(info, key)
        if value is None:
            of_agents = (number_at(info, f"{agent}/{key}") for agent in agents)
            own = [x for x in of_agents if x is not None]
            value = sum(own) / len(own) if own else None
        if value is not None:
            found[key] = value
    return found


def number_at(info: Mapping[str, Any], key: str) -> float | None:
    """Return the number at a path of an info; None if there is none."""
    if key in info:
        return as_number(info[key])
    head, _, rest = key.partition("/")
    inner = info.get(head)
    return number_at(inner, rest) if rest and isinstance(inner, Mapping) else None


def as_number(value: Any) -> float | None:
    """Return a value as a number; None if it is not a single number."""
    # Other values are for the user, and no reason to end training.
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        array = np.asarray(value)
        if array.dtype.kind not in "SU":
            return float(array.item())
    return None


def numbers_in(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return all single numbers of an info, by value and nested as they are."""
    found: dict[str, Any] = {}
    for key, value in info.items():
        part = numbers_in(value) if isinstance(value, Mapping) else as_number(value)
        if part is not None:
            found[str(key)] = part
    return found


def copied(value: Any) -> Any:
    """Copy the dicts, lists and arrays of an info, which environments may reuse."""
    if isinstance(value, dict):
        return {key: copied(part) for key, part in value.items()}
    if isinstance(value, list):
        return [copied(part) for part in value]
    return value.copy() if isinstance(value, np.ndarray) else value


def episode_end(
    env: int, info: dict[str, Any], keys: Sequence[str] | None, agents: Sequence[str]
) -> EpisodeEnd:
    """Read what is needed of a last info, by value.

    Args:
        env: Index of the environment.
        info: The info.
        keys: Keys of the numbers that are needed, as `asked_keys` returns them; None: all of it.
        agents: Names of the agents of a multi-agent environment.
    """
    returns = dict(info.get(AGENT_RETURNS, {})) if agents else {}
    return EpisodeEnd(
        env, copied(info) if keys is None else numbers_of(info, keys, agents), returns
    )
