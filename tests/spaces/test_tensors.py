from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maze_train.spaces.tensors import as_arrays, as_tensors, storage_dtype, zeros_for

STORED = {
    "float16": "float32",
    "float32": "float32",
    "float64": "float32",
    "uint8": "uint8",
    "int8": "int8",
    "int16": "int16",
    "int32": "int32",
    "int64": "int64",
    "uint16": "int64",
    "uint32": "int64",
}

MIXED = spaces.Dict(
    OrderedDict(
        [
            ("z", spaces.Box(0, 255, (2, 3), np.uint8)),
            ("a", spaces.Box(-1.0, 1.0, (2,), np.float64)),
            ("m", spaces.Discrete(4)),
        ]
    )
)


@pytest.mark.parametrize(("given", "stored"), STORED.items())
def test_storage_dtype_of_boxes(given, stored):
    """Floats become float32; integers stay, or become int64 where PyTorch lacks them."""
    assert storage_dtype(spaces.Box(0, 100, (2,), np.dtype(given).type)) == np.dtype(stored)


@pytest.mark.parametrize(
    ("space", "stored"),
    [
        (spaces.Discrete(3), "int64"),
        (spaces.MultiDiscrete([2, 3], dtype=np.int32), "int32"),
        (spaces.MultiBinary(3), "int8"),
    ],
)
def test_storage_dtype_of_other_leaves(space, stored):
    """Integer spaces keep their own type."""
    assert storage_dtype(space) == np.dtype(stored)


def test_images_are_stored_as_bytes():
    """An image takes one byte per entry, not the four of a float."""
    tensor = zeros_for(spaces.Box(0, 255, (84, 84, 4), np.uint8), (2, 3))
    assert tensor.shape == (2, 3, 84, 84, 4)
    assert tensor.dtype is torch.uint8
    assert tensor.untyped_storage().nbytes() == 2 * 3 * 84 * 84 * 4


def test_zeros_for_a_dict_are_one_tensor_per_key():
    """Leading dimensions come first, keys keep their order."""
    zeros = zeros_for(MIXED, (4, 1))
    assert list(zeros) == ["z", "a", "m"]
    assert [list(x.shape) for x in zeros.values()] == [[4, 1, 2, 3], [4, 1, 2], [4, 1]]
    assert [x.dtype for x in zeros.values()] == [torch.uint8, torch.float32, torch.int64]
    assert all(not x.any() for x in zeros.values())


def test_as_tensors_copies_and_converts():
    """A tensor does not change when the environment writes to its buffer again."""
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


def test_as_tensors_takes_read_only_arrays_and_numbers():
    """A read-only buffer and a plain number become tensors without a warning."""
    array = np.ones(2)
    array.flags.writeable = False
    assert as_tensors(MIXED["a"], array).tolist() == [1.0, 1.0]
    assert as_tensors(MIXED["m"], np.int64(3)).shape == ()


def test_as_arrays_shares_memory():
    """Writing to the arrays writes to the tensors, for one tensor and for several."""
    tensors = zeros_for(MIXED, (2,))
    as_arrays(tensors)["a"][1, 0] = 7.0
    assert float(tensors["a"][1, 0]) == 7.0
    one = zeros_for(MIXED["m"], (3,))
    as_arrays(one)[2] = 9
    assert one.tolist() == [0, 0, 9]
