"""Reports of vector environment steps, and infos in Gymnasium's format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from maze_train.core.conversion import Scalar
from maze_train.core.step_end import DROPPED, EpisodeEnd, StepBatch, is_transition
from maze_train.spaces.agents import AGENT_RETURNS

if TYPE_CHECKING:
    from maze_train.core.types import Array
    from maze_train.envs.types import Mask

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


def infos_of(batch: StepBatch[Array], num_envs: int) -> dict[str, Any]:
    """Return the infos of a step in Gymnasium's format for SAME_STEP."""
    ends = []
    final: Any = batch.final_obs
    for end in batch.ends:
        info = end.info
        if end.counted is not None:
            info = {"episode": dict(zip("rl", end.counted, strict=True)), **info}
        row = (
            {key: column[end.env].copy() for key, column in final.items()}
            if isinstance(final, dict)
            else final[end.env].copy()
        )
        ends.append((end.env, {"final_obs": row, "final_info": info}))
    infos = columns_of(batch.infos, num_envs) | columns_of(ends, num_envs)
    if batch.has_gaps:
        infos["ignored"] = ~is_transition(batch.end)
        if (lost := batch.end == DROPPED).any():
            infos["lost"] = lost
    return {**(batch.columns or {}), **infos}


def columns_of(rows: Iterable[tuple[int, Mapping[Any, Any]]], num_envs: int) -> dict[Any, Any]:
    """Combine infos into one array per key and a mask under `_key`, preserving the nesting.

    If the values of a key differ in type or shape, the array has dtype object. A key that collides
    with the name of a mask is omitted.

    Args:
        rows: Pairs of environment index and info.
        num_envs: Number of environments.
    """
    given: dict[Any, dict[int, Any]] = {}
    for env, info in rows:
        for key, value in info.items():
            given.setdefault(key, {})[env] = value
    infos: dict[Any, Any] = {}
    for key, values in given.items():
        if str(key)[:1] != "_" or str(key)[1:] not in given:
            infos[key] = _column(values, num_envs, as_objects=key == "final_obs")
            infos[f"_{key}"] = mask = np.zeros(num_envs, np.bool_)
            mask[list(values)] = True
    return infos


def _column(values: Mapping[int, Any], num_envs: int, as_objects: bool) -> object:
    """Return the values of one key, by environment, as an array or as nested arrays."""
    if not as_objects and all(isinstance(value, dict) for value in values.values()):
        return columns_of(values.items(), num_envs)
    column = np.full(num_envs, None, dtype=object)
    if not as_objects and all(_is_number(value) for value in values.values()):
        arrays = [np.asarray(value) for value in values.values()]
        dtypes = {array.dtype for array in arrays}
        are_numbers = all(dtype.kind in "biufc" for dtype in dtypes)
        if len({array.shape for array in arrays}) == 1 and (are_numbers or len(dtypes) == 1):
            column = np.zeros((num_envs, *arrays[0].shape), np.result_type(*dtypes))
    for env, value in values.items():
        column[env] = value
    return column


def _is_number(value: object) -> bool:
    """Whether Gymnasium stores a value in a numeric array."""
    if type(value) is int:
        return abs(value) < 2**63
    return type(value) in (float, bool) or isinstance(value, (np.number, np.ndarray))


def infos_by_key(infos: Iterable[Any], num_envs: int) -> dict[Any, Any]:
    """Return infos in Gymnasium's format, from this format or from one dict per environment."""
    return dict(infos) if isinstance(infos, Mapping) else columns_of(enumerate(infos), num_envs)


def info_of(infos: Mapping[Any, Any] | Sequence[Any], i: int, num_envs: int) -> dict[str, Any]:
    """Extract the info of environment i from Gymnasium's infos.

    Args:
        infos: One array or tensor per key, nested for dicts, with the mask of environments that
            have a value under `_key`; or one dict per environment.
        i: Index of the environment.
        num_envs: Number of environments.
    """
    if not isinstance(infos, Mapping):
        return dict(infos[i]) if isinstance(infos[i], Mapping) else {}
    found = {}
    arrays: dict[Any, Any] = {
        key: np.asarray(value) if isinstance(value, Scalar) and value.shape else value
        for key, value in infos.items()
    }
    for key, value in arrays.items():
        mask = arrays.get(f"_{key}")
        is_given = not is_mask(mask, num_envs) or mask[i]
        names_mask = str(key)[:1] == "_" and str(key)[1:] in infos and is_mask(value, num_envs)
        if is_given and not names_mask:
            if isinstance(value, Mapping):
                value = info_of(value, i, num_envs)
            found[key] = value[i] if np.shape(value)[:1] == (num_envs,) else value
    return found


def is_mask(value: object, num_envs: int) -> TypeGuard[Mask]:
    """Whether a value of Gymnasium's infos has the dtype and shape of a mask."""
    return isinstance(value, np.ndarray) and value.dtype == np.bool_ and value.shape == (num_envs,)
