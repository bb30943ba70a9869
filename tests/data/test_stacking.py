"""Stacking of lists of mappings, and splitting of stacked mappings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from maze_train import (
    ShapeError,
    stack_numpy_dict_list,
    stack_torch_dict_list,
    unstack_numpy_list_dict,
)
from maze_train.core.types import tree_map

STACKED = {"a": [[1], [2]], "b": [[3], [4]]}
APART = [{"a": [1], "b": [3]}, {"a": [2], "b": [4]}]


def plain(tree):
    """Return arrays and tensors as lists."""
    return tree_map(lambda x: x.tolist(), tree)


def test_stacked_mappings_are_split_again():
    """Values may be lists, arrays, tensors or scalars, and dtypes are preserved."""
    assert plain(stack_numpy_dict_list(APART)) == plain(stack_torch_dict_list(APART)) == STACKED
    assert [plain(item) for item in unstack_numpy_list_dict(STACKED)] == APART
    mixed = [{"a": torch.tensor([1]), "b": np.array([3])}, APART[1]]
    assert plain(stack_torch_dict_list(mixed)) == STACKED
    assert plain(stack_numpy_dict_list([{"a": 1}, {"a": 2}])) == {"a": [1, 2]}
    (only,) = unstack_numpy_list_dict({"a": 1, "b": np.float32(2)})
    assert plain(only) == {"a": 1, "b": 2.0}
    assert unstack_numpy_list_dict({"a": np.zeros((0, 2))}) == []
    half = stack_numpy_dict_list([{"x": np.zeros((2, 1), np.float16)}] * 3)
    assert (half["x"].shape, half["x"].dtype) == ((3, 2, 1), np.float16)
    assert unstack_numpy_list_dict(half)[0]["x"].dtype == np.float16


def test_stack_is_a_copy_along_any_axis():
    """The stack does not change with arrays that the environment reuses."""
    array = np.zeros((2, 3), np.int16)
    found = [stack_torch_dict_list([{"x": array}] * 4, dim=dim)["x"] for dim in (0, 1, 2, -1)]
    found.append(torch.from_numpy(stack_numpy_dict_list([{"x": array}])["x"]))
    array[:] = 1
    shapes = [(4, 2, 3), (2, 4, 3), (2, 3, 4), (2, 3, 4), (1, 2, 3)]
    assert [tuple(x.shape) for x in found] == shapes
    assert all(x.dtype == torch.int16 and not x.any() for x in found)


STACKS = (stack_numpy_dict_list, stack_torch_dict_list)
UNSTACK = (unstack_numpy_list_dict,)


@pytest.mark.parametrize(
    ("functions", "value", "text"),
    [
        (STACKS, [], "cannot stack an empty"),
        (STACKS, [{"a": 1, "b": 2}, {"a": 1}], "mapping 1 and mapping 0 differ in the keys 'b'"),
        (STACKS, [{"a": 1}, {"a": 1, "c": 2}], "keys 'c'"),
        (STACKS, [{"a": [1]}, {"a": [1, 2]}], r"'a' has the shapes \[\[1\], \[2\]\]"),
        (STACKS, [{"a": [[1], [1, 2]]}], "'a' is not an array"),
        (UNSTACK, {}, "cannot unstack an empty"),
        (UNSTACK, {"a": [1, 2], "b": [1]}, r"'b' has the shape \[1\], 'a' has \[2\]"),
        (UNSTACK, {"a": 1, "b": [1]}, r"'b' has the shape \[1\], 'a' has \[\]"),
    ],
)
def test_stacking_mappings_of_other_shapes_raises(functions, value, text):
    """The error contains the key and the shapes."""
    for function in functions:
        with pytest.raises(ShapeError, match=text):
            function(value)
