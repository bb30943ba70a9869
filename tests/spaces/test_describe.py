from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from maze_train.core.errors import SpaceError
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
    """Keys of Dict and indices of Tuple are joined by '/'; the order of parts is kept."""
    keys = [str(i) for i in range(12)]
    for space, expected in [
        (NESTED, ["bits", "goal", "robot/0", "robot/1/mode"]),
        (spaces.Tuple([BOX] * 12), keys),
    ]:
        assert list(flat_spaces(space)) == list(flat_space(space).spaces) == expected


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


@pytest.mark.parametrize(
    "leaf",
    [
        spaces.Text(5),
        spaces.Sequence(BOX),
        spaces.Graph(BOX, None),
        spaces.OneOf((BOX, spaces.Discrete(2))),
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_other_spaces_are_refused(leaf):
    """The error tells where the space is, which it is, and what can be done about it."""
    space = spaces.Dict({"robot": spaces.Tuple((BOX, leaf))})
    name = type(leaf).__name__
    with pytest.raises(SpaceError, match=rf"'robot/1' is {name}.*FilterObs.*filter_keys"):
        flat_spaces(space)
    with pytest.raises(SpaceError, match=rf"the space is {name}.*own: env\.wrappers"):
        flat_space(leaf)


def test_ambiguous_and_empty_spaces_are_refused():
    """Two leaves must not share a key, there must be one, and the empty key is a lone leaf's."""
    for parts, words in [
        ({"a/b": BOX, "a": spaces.Dict({"b": BOX})}, "joined key 'a/b'"),
        ({}, "no leaves"),
        ({"": BOX}, "is empty: give it a name"),
    ]:
        with pytest.raises(SpaceError, match=words):
            flat_spaces(spaces.Dict(parts))


def test_missing_leaf_is_named():
    """Reading and building name the leaf that is missing."""
    with pytest.raises(SpaceError, match="'robot/1/mode' is missing"):
        flatten_value(NESTED, {"robot": (BOX.sample(),), "goal": [0, 0], "bits": [0, 0]})
    with pytest.raises(SpaceError, match="'goal' is missing"):
        unflatten_value(NESTED, {"bits": 0, "robot/0": 0, "robot/1/mode": 0})
