"""Lists of mappings and mappings of stacked values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maze_train.data.stacking import (
    stack_numpy_dict_list,
    stack_torch_dict_list,
    unstack_numpy_list_dict,
)
from maze_train.errors import ShapeError

STACKED = {"a": [[1], [2]], "b": [[3], [4]]}
APART = [{"a": [1], "b": [3]}, {"a": [2], "b": [4]}]


def plain(value):
    """Arrays and tensors as lists."""
    if isinstance(value, dict):
        return {key: plain(x) for key, x in value.items()}
    return value.tolist() if hasattr(value, "tolist") else [plain(x) for x in value]


def test_the_example():
    """Both ways, with lists, arrays and tensors as values."""
    assert plain(stack_numpy_dict_list(APART)) == STACKED
    assert plain(unstack_numpy_list_dict(STACKED)) == APART
    assert plain(stack_torch_dict_list(APART)) == STACKED
    tensors = [{key: torch.tensor(x) for key, x in item.items()} for item in APART]
    mixed = [{"a": tensors[0]["a"], "b": np.array([3])}, tensors[1]]
    for items in (tensors, mixed):
        found = stack_torch_dict_list(items)
        assert plain(found) == STACKED
        assert all(isinstance(x, torch.Tensor) for x in found.values())


@given(n=st.integers(1, 4), shape=st.lists(st.integers(0, 3), max_size=2), seed=st.integers(0, 99))
def test_one_is_the_inverse_of_the_other(n, shape, seed):
    """For any shape and data type; nothing is converted."""
    rng = np.random.default_rng(seed)
    items = [
        {"x": rng.normal(size=shape).astype(np.float16), "y": rng.integers(0, 9, (2, 1))}
        for _ in range(n)
    ]
    stacked = stack_numpy_dict_list(items)
    assert stacked["x"].shape == (n, *shape)
    back = unstack_numpy_list_dict(stacked)
    assert len(back) == n
    for ours, theirs in zip(back, items, strict=True):
        for key, value in theirs.items():
            np.testing.assert_array_equal(ours[key], value, strict=bool(shape) or key == "y")
            assert ours[key].dtype == value.dtype


def test_values_without_an_axis():
    """They are one mapping; so are they when they are stacked."""
    (only,) = unstack_numpy_list_dict({"a": 1, "b": np.float32(2)})
    assert plain(only) == {"a": 1, "b": 2.0}
    assert plain(stack_numpy_dict_list([{"a": 1}, {"a": 2}])) == {"a": [1, 2]}
    assert unstack_numpy_list_dict({"a": np.zeros((0, 2))}) == []


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_the_place_of_the_new_axis(dim):
    """As in torch.stack; data types stay."""
    items = [{"x": torch.full((2, 3), k, dtype=torch.int16)} for k in range(4)]
    found = stack_torch_dict_list(items, dim=dim)["x"]
    assert found.dtype == torch.int16
    assert torch.equal(found, torch.stack([item["x"] for item in items], dim))


def test_the_stack_is_a_copy():
    """Arrays that the environment uses again do not change it."""
    array = np.zeros(2)
    stacks = [f([{"x": array}])["x"] for f in (stack_numpy_dict_list, stack_torch_dict_list)]
    array[:] = 1
    assert all(float(x.sum()) == 0 for x in stacks)


@pytest.mark.parametrize("stack", [stack_numpy_dict_list, stack_torch_dict_list])
@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([], "nothing to stack"),
        ([{"a": 1, "b": 2}, {"a": 1}], "mapping 1 and mapping 0 differ in the keys 'b'"),
        ([{"a": 1}, {"a": 1, "c": 2}], "keys 'c'"),
        ([{"a": [1]}, {"a": [1, 2]}], r"'a' has the shapes \[\[1\], \[2\]\]"),
        ([{"a": [[1], [1, 2]]}], "'a' is no array"),
    ],
)
def test_what_can_not_be_stacked(stack, items, text):
    """The key and both shapes are named."""
    with pytest.raises(ShapeError, match=text):
        stack(items)


@pytest.mark.parametrize(
    ("stacked", "text"),
    [
        ({}, "nothing to unstack"),
        ({"a": [1, 2], "b": [1]}, r"'b' has the shape \[1\], 'a' has \[2\]"),
        ({"a": [1, 2], "b": 1}, r"'b' has the shape \[\], 'a' has \[2\]"),
        ({"a": 1, "b": [1]}, r"'b' has the shape \[1\], 'a' has \[\]"),
    ],
)
def test_what_can_not_be_unstacked(stacked, text):
    """The key and both shapes are named."""
    with pytest.raises(ShapeError, match=text):
        unstack_numpy_list_dict(stacked)
