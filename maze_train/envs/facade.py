"""Infos in the format of Gymnasium's vector environments: one array per key, and a mask.

Vector environments of maze_train return this format; adapters parse it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.core.step_end import DROPPED, StepBatch, is_transition

if TYPE_CHECKING:
    from maze_train.core.types import Array


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


def _column(values: Mapping[int, Any], num_envs: int, as_objects: bool) -> Any:
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


def _is_number(value: Any) -> bool:
    """Whether Gymnasium stores a value in a numeric array."""
    if type(value) is int:
        return abs(value) < 2**63
    return type(value) in (float, bool) or isinstance(value, (np.number, np.ndarray))


def info_of(infos: Any, i: int, num_envs: int) -> dict[str, Any]:
    """Extract the info of environment i from Gymnasium's infos.

    Args:
        infos: One array per key, nested for dicts, with the mask of environments that have a value
            under `_key`; or one dict per environment.
        i: Index of the environment.
        num_envs: Number of environments.
    """
    if not isinstance(infos, Mapping):
        return dict(infos[i]) if isinstance(infos[i], Mapping) else {}
    found = {}
    for key, value in infos.items():
        mask: Any = infos.get(f"_{key}")
        is_given = not is_mask(mask, num_envs) or mask[i]
        names_mask = str(key)[:1] == "_" and str(key)[1:] in infos and is_mask(value, num_envs)
        if is_given and not names_mask:
            if isinstance(value, Mapping):
                value = info_of(value, i, num_envs)
            found[key] = value[i] if np.shape(value)[:1] == (num_envs,) else value
    return found


def is_mask(value: Any, num_envs: int) -> bool:
    """Whether a value of Gymnasium's infos has the dtype and shape of a mask."""
    is_array = isinstance(value, np.ndarray)
    return is_array and value.dtype == np.bool_ and value.shape == (num_envs,)
