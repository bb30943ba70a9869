from __future__ import annotations

import json
from collections import OrderedDict

import numpy as np
import pytest
from gymnasium import spaces

from maze_train.errors import SpaceError
from maze_train.spaces.serialize import space_from_dict, space_to_dict

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
    spaces.Discrete(5),
    spaces.Discrete(3, start=-7),
    spaces.MultiDiscrete([3, 1, 4]),
    spaces.MultiDiscrete([3, 4], start=[2, -1]),
    spaces.MultiDiscrete([[2, 3], [4, 5]], dtype=np.int32),
    spaces.MultiBinary(6),
    spaces.MultiBinary((2, 3)),
    spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Box(-INF, INF, (1,), np.float32)}),
    spaces.Dict(OrderedDict([("10", spaces.Discrete(2)), ("2", spaces.Discrete(3))])),
    spaces.Tuple((spaces.Discrete(2), spaces.Dict({"x": spaces.Tuple((spaces.MultiBinary(1),))}))),
]


def keys_of(space):
    """Keys of all Dict spaces in their order."""
    if isinstance(space, spaces.Dict):
        return [(key, keys_of(part)) for key, part in space.spaces.items()]
    return [keys_of(part) for part in space.spaces] if isinstance(space, spaces.Tuple) else None


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_round_trip_through_text(space):
    """A space that was written as JSON text comes back equal, with dtype, shape and order."""
    copy = space_from_dict(json.loads(json.dumps(space_to_dict(space))))
    assert copy == space
    assert type(copy) is type(space)
    assert (copy.shape, copy.dtype) == (space.shape, space.dtype)
    assert keys_of(copy) == keys_of(space)


@pytest.mark.parametrize("space", SPACES[:8], ids=str)
def test_bounds_come_back_bit_for_bit(space):
    """Bounds of every magnitude keep their bits, infinite ones included."""
    copy = space_from_dict(json.loads(json.dumps(space_to_dict(space))))
    np.testing.assert_array_equal(copy.low, space.low, strict=True)
    np.testing.assert_array_equal(copy.high, space.high, strict=True)
    np.testing.assert_array_equal(copy.bounded_below, space.bounded_below)


def test_the_copy_samples_what_the_original_samples():
    """Equal seeds give equal samples: nothing about the space was lost."""
    space = SPACES[-1]
    copy = space_from_dict(space_to_dict(space))
    space.seed(3)
    copy.seed(3)
    assert str([space.sample() for _ in range(5)]) == str([copy.sample() for _ in range(5)])


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: spaces.Dict({"k": s})])
def test_spaces_without_a_form_are_refused(wrap):
    """A space of another kind is named, also inside of a Dict."""
    with pytest.raises(SpaceError, match=r"Text.* can not be saved"):
        space_to_dict(wrap(spaces.Text(4)))


def test_an_unknown_type_is_refused():
    """A description of an unknown type is named."""
    with pytest.raises(SpaceError, match="unknown type of space 'Torus'"):
        space_from_dict({"type": "Torus"})
