from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from maze_train.errors import SpaceError
from maze_train.spaces.describe import (
    FlatView,
    flat_space,
    flat_spaces,
    flatten_value,
    unflatten_value,
)

BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)
NESTED = spaces.Dict(
    {
        "robot": spaces.Tuple((BOX, spaces.Dict({"mode": spaces.Discrete(4)}))),
        "goal": spaces.MultiDiscrete([2, 3]),
        "bits": spaces.MultiBinary(2),
    }
)


def test_leaf_has_empty_key():
    """A space that is a leaf stays as it is, under the key ''."""
    assert flat_spaces(BOX) == {"": BOX}
    assert flat_space(BOX) is BOX
    value = BOX.sample()
    assert flatten_value(BOX, value) is value
    assert unflatten_value(BOX, value) is value


def test_nested_keys_are_joined():
    """Keys of Dict and indices of Tuple are joined by '/'."""
    assert list(flat_spaces(NESTED)) == ["bits", "goal", "robot/0", "robot/1/mode"]
    flat = flat_space(NESTED)
    assert isinstance(flat, spaces.Dict)
    assert list(flat.spaces) == list(flat_spaces(NESTED))


def test_order_of_long_tuples_is_kept():
    """The eleventh part of a Tuple comes after the tenth, in both forms."""
    space = spaces.Tuple([BOX] * 12)
    expected = [str(i) for i in range(12)]
    assert list(flat_spaces(space)) == expected
    assert list(flat_space(space).spaces) == expected


def test_values_round_trip():
    """Flattened values lie in the flat space, and unflatten to what they were."""
    NESTED.seed(0)
    view = FlatView(NESTED)
    for _ in range(5):
        value = NESTED.sample()
        flat = flatten_value(view, value)
        assert flat_space(NESTED).contains(flat)
        back = unflatten_value(view, flat)
        assert NESTED.contains(back)
        assert back["robot"][1]["mode"] == value["robot"][1]["mode"]
        np.testing.assert_array_equal(back["robot"][0], value["robot"][0])


def test_ambiguous_and_empty_spaces_are_refused():
    """Two leaves must not share a key, and there must be one."""
    with pytest.raises(SpaceError, match="joined key 'a/b'"):
        flat_spaces(spaces.Dict({"a/b": BOX, "a": spaces.Dict({"b": BOX})}))
    with pytest.raises(SpaceError, match="no leaves"):
        flat_spaces(spaces.Dict({}))


def test_missing_leaf_is_named():
    """Reading and building name the leaf that is missing."""
    with pytest.raises(SpaceError, match="'robot/1/mode' is missing"):
        flatten_value(NESTED, {"robot": (BOX.sample(),), "goal": [0, 0], "bits": [0, 0]})
    with pytest.raises(SpaceError, match="'goal' is missing"):
        unflatten_value(NESTED, {"bits": 0, "robot/0": 0, "robot/1/mode": 0})


def test_empty_keys_are_refused():
    """The empty key is that of a lone leaf."""
    with pytest.raises(SpaceError, match="is empty: give it a name"):
        FlatView(spaces.Dict({"": BOX}))
