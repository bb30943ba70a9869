"""Results of one step of vector environments, and what is read from the infos of last steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from maze_train.core.step_end import is_terminated, is_truncated
from maze_train.spaces.agents import AGENT_RETURNS

Mask: TypeAlias = npt.NDArray[np.bool_]

SUCCESS = "is_success"
"""Key of an info that says whether an episode was a success."""


@dataclass(slots=True)
class EpisodeEnd:
    """The end of an episode of one environment."""

    env: int
    """Index of the environment."""

    info: dict[str, Any]
    """Info of the last step, copied before the environment is reset: all of it, or the numbers that
    were asked for, by key."""

    agent_returns: dict[str, float] = field(default_factory=dict)
    """Undiscounted return of each agent of a multi-agent environment."""

    counted: tuple[float, int] | None = None
    """Raw return and length of the game, if the environment is monitored and the game is over."""


@dataclass(slots=True)
class StepBatch:
    """Results of one step of n environments."""

    obs: npt.NDArray[Any] | dict[str, npt.NDArray[Any]]
    """Observations to act on, `[n, ...]`."""

    rewards: npt.NDArray[np.float64]
    """`[n]`."""

    end: npt.NDArray[np.uint8]
    """Codes of `maze_train.core.step_end.StepEnd`, `[n]`."""

    final_obs: npt.NDArray[Any] | dict[str, npt.NDArray[Any]] | None = None
    """Last observations of the episodes that ended, `[n, ...]`, valid until the next step; other
    rows mean nothing. None: no episode ended."""

    ends: Sequence[EpisodeEnd] = ()
    """The episodes that ended in the step."""

    has_gaps: bool = False
    """Whether there are rows that are not transitions."""

    infos: Sequence[tuple[int, dict[str, Any]]] = ()
    """Infos of this step by index of the environment, if infos of every step are reported."""

    columns: Mapping[str, Any] | None = None
    """The same in gymnasium's form, from vector environments of other packages."""

    @property
    def terminated(self) -> Mask:
        """Whether the step led to a terminal state, `[n]`."""
        return is_terminated(self.end)

    @property
    def truncated(self) -> Mask:
        """Whether the episode was truncated after the step, in a state that is not terminal."""
        return is_truncated(self.end)


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


def able_to_hold(column: Any, value: Any, given: npt.NDArray[Any]) -> Any:
    """`column` itself, or its content in an array with a dtype that can hold `value` in a row.

    Gymnasium takes dtype and shape from the first value. A later 0.5 would become 0 in a column of
    integers, and an array of another length, or a mapping in their place, would end the run.
    `given` has the environments that gave a value before.
    """
    if isinstance(column, dict):
        return column if isinstance(value, dict) else _rows_of(column, given)
    if column.dtype == object:
        return column
    array = np.asarray(value)
    if array.dtype.kind in "biufc" and column.dtype.kind in "biufc":
        if array.shape == column.shape[1:]:
            wide = np.result_type(column.dtype, array.dtype)
            return column if wide == column.dtype else column.astype(wide)
    elif array.dtype == column.dtype:
        return column
    rows = np.full(len(column), None, dtype=object)
    for i, row in enumerate(column):
        rows[i] = row
    return rows


def _rows_of(columns: Mapping[str, Any], given: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert columns of infos by key to a mapping for each environment that gave one."""
    rows = np.full(len(given), None, dtype=object)
    for env in np.flatnonzero(given):
        rows[env] = {}
    for key, own in columns.items():
        mask = columns.get(f"_{key}")
        if mask is not None:
            column = _rows_of(own, mask) if isinstance(own, dict) else own
            for env in np.flatnonzero(mask):
                rows[env][key] = column[env]
    return rows
