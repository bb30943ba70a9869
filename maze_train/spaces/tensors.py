"""Observations as tensors: the dtype in which they are stored, and storage for them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces

if TYPE_CHECKING:
    from maze_train.core.types import Array, ArrayTree, TensorTree


DTYPES = {
    **{name: name for name in ("float32", "uint8", "int8", "int16", "int32", "int64", "bool")},
    "uint16": "int32",
    "uint32": "int64",
}
"""Dtype in which leaves of a dtype are stored."""


def storage_dtype(space: spaces.Space[Any]) -> np.dtype[Any]:
    """The dtype in which observations of a leaf space are stored.

    Integers, bytes of images among them, and bool are kept as they are, or in the next larger type
    that PyTorch knows (uint16 in int32, uint32 in int64). float16 becomes float32. Two types are
    rounded to float32, which is what networks compute with: float64, and uint64 with an upper bound
    beyond that of int64.
    """
    dtype = np.dtype(space.dtype if space.dtype is not None else np.float32)
    if dtype.name in DTYPES:
        return np.dtype(DTYPES[dtype.name])
    if dtype.kind != "u":
        return np.dtype(np.float32)
    exceeds = isinstance(space, spaces.Box) and (space.high > np.iinfo(np.int64).max).any()
    return np.dtype(np.float32 if exceeds else np.int64)


def zeros_for(space: spaces.Space[Any], shape: tuple[int, ...]) -> TensorTree:
    """Zeros for observations of a flat space: `[*shape, *space.shape]`, one tensor per key."""
    if isinstance(space, spaces.Dict):
        return {key: _zeros(leaf, shape) for key, leaf in space.spaces.items()}
    return _zeros(space, shape)


def _zeros(space: spaces.Space[Any], shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.zeros((*shape, *(space.shape or ())), storage_dtype(space)))


def sampled_for(space: spaces.Space[Any], n: int) -> TensorTree:
    """Observations of a flat space, the same each time: `[n, *space.shape]`, one tensor per key.

    Those of a Box are close to 0, or to the bound that is: between bounds that are as far apart as
    numbers allow, a uniform sample would be of no use to a network.
    """
    if isinstance(space, spaces.Dict):
        return {key: _sampled(leaf, n) for key, leaf in space.spaces.items()}
    return _sampled(space, n)


def _sampled(space: spaces.Space[Any], n: int) -> torch.Tensor:
    if isinstance(space, spaces.Box):
        samples = np.random.default_rng(0).standard_normal((n, *space.shape))
        return _tensor(space, np.clip(samples, space.low, space.high))
    space = copy.deepcopy(space)
    space.seed(0)
    return _tensor(space, np.stack([space.sample() for _ in range(n)]))


def as_tensors(space: spaces.Space[Any], tree: ArrayTree) -> TensorTree:
    """Copies of arrays as tensors, each in the dtype in which its space is stored."""
    if isinstance(tree, dict):
        assert isinstance(space, spaces.Dict)
        return {key: _tensor(space[key], array) for key, array in tree.items()}
    return _tensor(space, tree)


def _tensor(space: spaces.Space[Any], array: Array) -> torch.Tensor:
    return torch.from_numpy(np.array(array, dtype=storage_dtype(space)))
