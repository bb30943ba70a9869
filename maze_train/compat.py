"""Names from Maze: aliases of classes, and functions that stack mappings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from maze_train.algorithms.es.population import ESDistributedRollouts
from maze_train.collect.actors import DistributedActors
from maze_train.collect.episode_pool import EpisodeWorker
from maze_train.core.errors import ShapeError
from maze_train.core.types import Array, T, Tensor
from maze_train.run.train import TrainingRunner
from maze_train.workers.pool import CallCancelledError

ACRunner = ACDevRunner = ACLocalRunner = TrainingRunner
BCRunner = BCDevRunner = BCLocalRunner = TrainingRunner
ESMasterRunner = ESDevRunner = ESLocalRunner = TrainingRunner
ImpalaRunner = ImpalaDevRunner = ImpalaLocalRunner = TrainingRunner
SACRunner = SACDevRunner = SACLocalRunner = TrainingRunner


SequentialDistributedActors = SubprocDistributedActors = DistributedActors
ESDummyDistributedRollouts = ESSubprocDistributedRollouts = ESDistributedRollouts
ESRolloutWorkerWrapper = EpisodeWorker
ESAbortException = CallCancelledError


def stack_numpy_dict_list(dict_list: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
    """Stack the values of each key along a new first axis: n arrays `[...]` become `[n, ...]`.

    Args:
        dict_list: n >= 1 mappings with the same keys, of arrays or array-like values.

    Raises:
        ShapeError: If there is no mapping, keys differ, or the shapes under one key differ.
    """
    return {key: np.stack(values) for key, values in _by_key(dict_list, np.asarray).items()}


def unstack_numpy_list_dict(list_dict: Mapping[str, Any]) -> list[dict[str, Array]]:
    """Split a mapping of stacked values: `[n, ...]` becomes n arrays `[...]`.

    Inverse of `stack_numpy_dict_list`. If the values are 0-d, returns a single mapping.

    Args:
        list_dict: At least one array or array-like value; all have the same length n.

    Raises:
        ShapeError: If there is no value, or lengths differ.
    """
    if not list_dict:
        raise ShapeError("cannot unstack an empty mapping: expected at least one key")
    arrays = {key: _converted(key, value, np.asarray) for key, value in list_dict.items()}
    first, *_ = arrays
    shape = arrays[first].shape
    for key, array in arrays.items():
        if array.shape[:1] != shape[:1]:
            raise ShapeError(
                f"{key!r} has the shape {list(array.shape)}, {first!r} has {list(shape)}: expected "
                f"the same first dimension"
            )
    if not shape:
        return [arrays]
    return [{key: array[i] for key, array in arrays.items()} for i in range(shape[0])]


def stack_torch_dict_list(
    dict_list: Sequence[Mapping[str, Any]], dim: int = 0
) -> dict[str, Tensor]:
    """Stack the values of each key along a new axis `dim`.

    Args:
        dict_list: n >= 1 mappings with the same keys, of tensors or arrays.
        dim: Index of the new axis; negative values count from the end.

    Raises:
        ShapeError: If there is no mapping, keys differ, or the shapes under one key differ.
    """
    return {key: torch.stack(values, dim) for key, values in _by_key(dict_list, _tensor).items()}


def _by_key(
    dict_list: Sequence[Mapping[str, Any]], convert: Callable[[Any], Any]
) -> dict[str, list[Any]]:
    """Return the values of each key, after checking that their shapes are equal."""
    if not dict_list:
        raise ShapeError("cannot stack an empty list: expected at least one mapping")
    keys = dict_list[0].keys()
    for number, item in enumerate(dict_list):
        if item.keys() != keys:
            odd = sorted(map(repr, item.keys() ^ keys))
            raise ShapeError(
                f"mapping {number} and mapping 0 differ in the keys {', '.join(odd)}: expected the "
                f"same keys in all mappings"
            )
    columns = {key: [_converted(key, item[key], convert) for item in dict_list] for key in keys}
    for key, values in columns.items():
        shapes = [list(value.shape) for value in values]
        if any(shape != shapes[0] for shape in shapes):
            raise ShapeError(f"{key!r} has the shapes {shapes}: expected equal shapes")
    return columns


def _converted(key: str, value: object, convert: Callable[[Any], T]) -> T:
    try:
        return convert(value)
    except (ValueError, TypeError) as error:
        raise ShapeError(f"{key!r} is not an array: {error}") from error


def _tensor(value: object) -> Tensor:
    return value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
