from __future__ import annotations

import json
from collections import OrderedDict

import numpy as np
import pytest
from gymnasium import spaces

from maze_train.core.errors import SpaceError
from maze_train.spaces.describe import space_from_dict, space_to_dict

INF = np.inf
LOW = np.array([-INF, 0.1, -3.0e38], np.float32)
HIGH = np.array([0.25, INF, 3.0e38], np.float32)

SPACES = [
    spaces.Box(LOW, HIGH, dtype=np.float32),
    spaces.Box(-INF, INF, (2, 3), np.float64),
    spaces.Box(np.array([0.1, 1e-300]), np.array([1 / 3, 1e300]), dtype=np.float64),
    spaces.Box(-1.0, 1.0, (2,), np.float16),
    spaces.Box(-1.0, 1.0, (), np.float32),
    spaces.Box(0, 255, (4, 5, 3), np.uint8),
    spaces.Box(np.array([-5, 0]), np.array([2**62, 2**63 - 1]), dtype=np.int64),
    spaces.Box(0, 2**64 - 1, (1,), np.uint64),
    spaces.Box(0, 1, (2, 2), np.bool_),
    spaces.Box(np.array([False, True]), np.array([True, True]), dtype=np.bool_),
    spaces.Box(-1.0, 1.0, (2, 0), np.float32),
    spaces.Discrete(5),
    spaces.Discrete(3, start=-7),
    spaces.Discrete(3, start=250, dtype=np.uint8),
    spaces.MultiDiscrete(4),
    spaces.MultiDiscrete([3, 1, 4]),
    spaces.MultiDiscrete([3, 4], start=[2, -1]),
    spaces.MultiDiscrete([[2, 3], [4, 5]], dtype=np.int32),
    spaces.MultiBinary(6),
    spaces.MultiBinary((2, 3)),
    spaces.MultiBinary((1,)),
    spaces.MultiBinary(()),
    spaces.Dict({1: spaces.Discrete(2), 0: spaces.Discrete(3)}),
    spaces.Dict({}),
    spaces.Tuple(()),
    spaces.Dict({'ü/ "': spaces.Discrete(2)}),
    spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Box(-INF, INF, (1,), np.float32)}),
    spaces.Dict(OrderedDict([("10", spaces.Discrete(2)), ("2", spaces.Discrete(3))])),
    spaces.Tuple((spaces.Discrete(2), spaces.Dict({"x": spaces.Tuple((spaces.MultiBinary(1),))}))),
]


def described(space):
    """All that a space consists of, to the last bit: equal ones may differ by rounding."""
    parts = getattr(space, "spaces", None)
    if parts is not None:
        items = parts.items() if isinstance(parts, dict) else enumerate(parts)
        return [(key, described(part)) for key, part in items]
    names = [name for name in vars(space) if not name.endswith(("random", "repr"))]
    values = [np.asarray(getattr(space, name)) for name in names]
    return [*zip(names, [(value.dtype, value.tolist()) for value in values], strict=True)]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_round_trip_through_text(space):
    """A space written as JSON text comes back with dtype, shape, order, and all of its bits."""
    copy = space_from_dict(json.loads(json.dumps(space_to_dict(space))))
    assert copy == space
    assert type(copy) is type(space)
    assert described(copy) == described(space)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Text(4), "Text.* cannot be saved"),
        (spaces.Dict({"k": spaces.Text(4)}), "Text.* cannot be saved"),
        (spaces.Dict({(1, 2): spaces.Discrete(2)}), r"the key \(1, 2\) cannot be saved"),
    ],
)
def test_spaces_without_a_form_are_refused(space, message):
    """A space of another kind is named, also inside of a Dict; so is a key that is no text."""
    with pytest.raises(SpaceError, match=message):
        space_to_dict(space)
    with pytest.raises(SpaceError, match="unknown type of space 'Torus'"):
        space_from_dict({"type": "Torus"})


def test_equal_bounds_are_one_number():
    """An image takes as little room as a number; other bounds are written entry by entry."""
    image = space_to_dict(spaces.Box(0, 255, (84, 84, 4), np.uint8))
    assert (image["low"], image["high"]) == (0, 255)
    assert len(json.dumps(image)) < 100
    mixed = space_to_dict(spaces.Box(np.zeros(2, np.float32), np.array([1.0, 2.0], np.float32)))
    assert (mixed["low"], mixed["high"]) == (0.0, [1.0, 2.0])
