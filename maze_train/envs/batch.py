"""Reports of vector environment steps, and extraction of values from infos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from maze_train.core.step_end import EpisodeEnd
from maze_train.spaces.agents import AGENT_RETURNS

SUCCESS = "is_success"
"""Info key that indicates whether an episode was successful."""


@dataclass(slots=True)
class StepReport:
    """Episode ends and infos reported for one step, ordered by environment."""

    ends: list[EpisodeEnd] = field(default_factory=list)
    """Episodes that ended."""
    infos: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Infos of resets and of other steps, with the index of the environment; empty unless
    requested."""
    dropped: list[int] = field(default_factory=list)
    """Environments whose episode was dropped. The rows of these environments are not
    transitions."""
    continuing: list[int] = field(default_factory=list)
    """Environments whose new episode continues the game of the previous one."""
    notes: list[str] = field(default_factory=list)
    """Notes about unexpected values of the environments."""

    def add(self, other: StepReport) -> None:
        """Append the report of the environments that follow in index order."""
        self.ends += other.ends
        self.infos += other.infos
        self.dropped += other.dropped
        self.continuing += other.continuing
        self.notes += other.notes


def required_keys(info_keys: Sequence[str], agents: Sequence[str]) -> tuple[str, ...]:
    """Return the keys of all info values needed for episode metrics.

    Args:
        info_keys: Keys requested by the user.
        agents: Names of the agents of a multi-agent environment; empty for a single agent.
    """
    return (SUCCESS, *info_keys, *(f"{agent}/{SUCCESS}" for agent in agents))


def numbers_of(
    info: Mapping[str, Any], keys: Sequence[str], agents: Sequence[str]
) -> dict[str, float]:
    """Return the numeric values of the given keys in an info.

    A key may be a path: `fuel/left` is `info["fuel/left"]` if this key exists, otherwise
    `info["fuel"]["left"]`. If a key exists only in the infos of agents, the value is the mean over
    these agents. Values that are not scalars are skipped.
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
    """Return the scalar at a path in an info; None if there is no scalar."""
    if key in info:
        return as_number(info[key])
    head, _, rest = key.partition("/")
    inner = info.get(head)
    return number_at(inner, rest) if rest and isinstance(inner, Mapping) else None


def as_number(value: object) -> float | None:
    """Return a value as a float; None if it is not a scalar."""
    # Infos may contain values of any type; an unsupported value must not stop training.
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        array = np.asarray(value)
        if array.dtype.kind not in "SU":
            return float(array.item())
    return None


def numbers_in(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of all scalars in an info, preserving the nesting."""
    found: dict[str, Any] = {}
    for key, value in info.items():
        part = numbers_in(value) if isinstance(value, Mapping) else as_number(value)
        if part is not None:
            found[str(key)] = part
    return found


def copied(value: object) -> Any:
    """Copy dicts, lists and arrays of an info, because environments may reuse them."""
    if isinstance(value, dict):
        return {key: copied(part) for key, part in value.items()}
    if isinstance(value, list):
        return [copied(part) for part in value]
    return value.copy() if isinstance(value, np.ndarray) else value


def episode_end(
    env: int, info: dict[str, Any], keys: Sequence[str] | None, agents: Sequence[str]
) -> EpisodeEnd:
    """Extract the required values of a final info.

    Args:
        env: Index of the environment.
        info: The final info.
        keys: Keys of the required values, see `required_keys`; if None, the whole info is copied.
        agents: Names of the agents of a multi-agent environment.
    """
    returns = dict(info.get(AGENT_RETURNS, {})) if agents else {}
    return EpisodeEnd(
        env, copied(info) if keys is None else numbers_of(info, keys, agents), returns
    )
