from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch
from cases import sweep
from gymnasium import spaces

from maze_train.core.types import tree_leaves
from maze_train.spaces.columns import storage_dtype
from maze_train.spaces.tensors import as_tensors, sampled_for, zeros_for

KEPT = ("float32", "uint8", "int8", "int16", "int32", "int64", "bool")
CHANGED = {"float16": "float32", "float64": "float32"}
CHANGED |= {"uint16": "int32", "uint32": "int64", "uint64": "int64"}
STORED = {**{name: name for name in KEPT}, **CHANGED}

MIXED = spaces.Dict(
    OrderedDict(
        [
            ("z", spaces.Box(0, 255, (2, 3), np.uint8)),
            ("a", spaces.Box(-1.0, 1.0, (2,), np.float64)),
            ("m", spaces.Discrete(4)),
        ]
    )
)


def test_storage_dtypes():
    """Floats become float32; integers keep their dtype or use the next larger PyTorch dtype."""
    for given, stored in STORED.items():
        box = spaces.Box(0, 1, (2,), np.dtype(given).type)
        assert storage_dtype(box) == np.dtype(stored), given
    for space, stored in [
        (spaces.Discrete(3), "int64"),
        (spaces.MultiDiscrete([2, 3], dtype=np.uint16), "int32"),
        (spaces.MultiDiscrete([2, 3], dtype=np.uint64), "int64"),
        (spaces.MultiBinary(3), "int8"),
    ]:
        assert storage_dtype(space) == np.dtype(stored), space


@sweep("name", [name for name in STORED if name != "float64"])
def test_no_value_is_lost(name):
    """Storage preserves the minimum and maximum of each dtype; zeros have the same dtype."""
    dtype = np.dtype(name)
    ends = _ends(dtype)
    space = spaces.Box(*ends, (2,), dtype.type)
    stored = as_tensors(space, np.array(ends, dtype))
    assert stored.tolist() == np.array(ends, dtype).tolist()
    zeros = zeros_for(space, (3,))
    assert (zeros.dtype, zeros.shape) == (stored.dtype, (3, 2))
    assert not zeros.any()


@pytest.mark.parametrize(
    ("dtype", "high", "values", "stored"),
    [
        (np.uint64, 2**64 - 1, [2**64 - 1, 7], [2.0**64, 7.0]),
        (np.float64, np.inf, [1 + 1e-9, 0], [1.0, 0.0]),
    ],
)
def test_large_numbers_are_rounded_instead_of_wrapped(dtype, high, values, stored):
    """uint64 beyond int64 and float64 are rounded to float32."""
    tensor = as_tensors(spaces.Box(0, high, (2,), dtype), np.array(values, dtype))
    assert tensor.dtype is torch.float32
    assert tensor.tolist() == stored


def _ends(dtype):
    """Return the minimum and maximum of a dtype; for uint64 the maximum of int64."""
    if dtype.kind == "b":
        return 0, 1
    if dtype.kind == "f":
        return float(np.finfo(dtype).min), float(np.finfo(dtype).max)
    return int(np.iinfo(dtype).min), min(int(np.iinfo(dtype).max), 2**63 - 1)


def test_images_are_stored_as_bytes():
    """An image uses one byte per entry."""
    tensor = zeros_for(spaces.Box(0, 255, (84, 84, 4), np.uint8), (2, 3))
    assert tensor.shape == (2, 3, 84, 84, 4)
    assert tensor.dtype is torch.uint8
    assert tensor.untyped_storage().nbytes() == 2 * 3 * 84 * 84 * 4


def test_as_tensors_copies_and_converts():
    """A tensor is a copy of the environment's buffer."""
    buffers = {
        "z": np.full((5, 2, 3), 200, np.uint8),
        "a": np.full((5, 2), 1 / 3),
        "m": np.arange(5),
    }
    tensors = as_tensors(MIXED, buffers)
    for buffer in buffers.values():
        buffer[:] = 0
    assert tensors["z"].dtype is torch.uint8
    assert int(tensors["z"].min()) == 200
    assert tensors["a"].dtype is torch.float32
    assert float(tensors["a"][0, 0]) == np.float32(1 / 3)
    assert tensors["m"].tolist() == [0, 1, 2, 3, 4]
    read_only = np.ones(2)
    read_only.flags.writeable = False
    assert as_tensors(MIXED["a"], read_only).tolist() == [1.0, 1.0]
    assert as_tensors(MIXED["m"], np.int64(3)).shape == ()


LARGEST = np.finfo(np.float64).max

SAMPLED = [
    MIXED,
    spaces.Box(-LARGEST, LARGEST, (2, 1), np.float64),
    spaces.Box(-np.inf, np.inf, (2,), np.float16),
    spaces.Box(np.array([3.0, -np.inf]), np.array([np.inf, -2.0]), dtype=np.float64),
    spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64),
    spaces.Box(0, 2**64 - 1, (2,), np.uint64),
    spaces.Box(0, 1, (5,), np.bool_),
    spaces.Box(-1, 1, (), np.float32),
    spaces.Box(5, 6, (2,), np.uint8),
    spaces.Discrete(3, start=-7),
    spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, -1], [0, 2]]),
    spaces.MultiBinary((2, 3)),
]


@pytest.mark.parametrize("space", SAMPLED, ids=str)
def test_sampled_observations_are_valid_and_reproducible(space):
    """Samples are finite, within bounds, of the stored dtype, and reproducible."""
    samples = sampled_for(space, 4)
    zeros = zeros_for(space, (4,))
    leaves = list(space.spaces.values()) if isinstance(space, spaces.Dict) else [space]
    if isinstance(space, spaces.Dict):
        assert list(samples) == list(zeros) == list(space.spaces)
    for leaf, sample, zero in zip(leaves, tree_leaves(samples), tree_leaves(zeros), strict=True):
        assert (sample.dtype, sample.shape) == (zero.dtype, zero.shape)
        assert sample.shape == (4, *leaf.shape)
        assert sample.isfinite().all()
        assert all(leaf.contains(row.numpy().astype(leaf.dtype)) for row in sample)
    for first, second in zip(tree_leaves(samples), tree_leaves(sampled_for(space, 4)), strict=True):
        assert torch.equal(first, second)
