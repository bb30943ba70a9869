"""Observations as tensors: which dtype they are stored with, and storage for them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces

from maze_train.trees import tree_map

if TYPE_CHECKING:
    from maze_train.types import Array, ArrayTree, TensorTree

__all__ = ["as_arrays", "as_tensors", "sampled_for", "storage_dtype", "zeros_for"]

KEPT_DTYPES = ("float32", "uint8", "int8", "int16", "int32", "int64", "bool")


def storage_dtype(space: spaces.Space[Any]) -> np.dtype[Any]:
    """The dtype in which observations of a leaf space are stored.

    Floating-point numbers become float32, which is what networks compute with; integers that
    PyTorch knows stay as they are (bytes of images in particular), others become int64.
    """
    dtype = np.dtype(space.dtype if space.dtype is not None else np.float32)
    if dtype.name in KEPT_DTYPES:
        return dtype
    return np.dtype(np.float32 if dtype.kind == "f" else np.int64)


def zeros_for(space: spaces.Space[Any], shape: tuple[int, ...]) -> TensorTree:
    """Zeros for observations of a flat space: `[*shape, *space.shape]`, one tensor per key."""
    if isinstance(space, spaces.Dict):
        return {key: _zeros(leaf, shape) for key, leaf in space.spaces.items()}
    return _zeros(space, shape)


def _zeros(space: spaces.Space[Any], shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.zeros((*shape, *(space.shape or ())), storage_dtype(space)))


def sampled_for(space: spaces.Space[Any], n: int) -> TensorTree:
    """Observations of a flat space, the same each time: `[n, *space.shape]`, one tensor per key."""
    space = copy.deepcopy(space)
    space.seed(0)
    samples = [space.sample() for _ in range(n)]
    if isinstance(space, spaces.Dict):
        columns = {key: np.stack([sample[key] for sample in samples]) for key in space.spaces}
        return as_tensors(space, columns)
    return as_tensors(space, np.stack(samples))


def as_arrays(tree: TensorTree) -> ArrayTree:
    """Arrays that share the memory of tensors on the CPU."""
    return tree_map(lambda tensor: tensor.numpy(), tree)


def as_tensors(space: spaces.Space[Any], tree: ArrayTree) -> TensorTree:
    """Copies of arrays as tensors, each in the dtype in which its space is stored."""
    if isinstance(tree, dict):
        assert isinstance(space, spaces.Dict)
        return {key: _tensor(space[key], array) for key, array in tree.items()}
    return _tensor(space, tree)


def _tensor(space: spaces.Space[Any], array: Array) -> torch.Tensor:
    return torch.from_numpy(np.array(array, dtype=storage_dtype(space)))
