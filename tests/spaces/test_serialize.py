from __future__ import annotations

import json
from collections import OrderedDict

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

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


@pytest.mark.parametrize("space", [s for s in SPACES if isinstance(s, spaces.Box)], ids=str)
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


def test_equal_bounds_are_one_number():
    """An image takes as little room as a number; other bounds are written entry by entry."""
    image = space_to_dict(spaces.Box(0, 255, (84, 84, 4), np.uint8))
    assert (image["low"], image["high"]) == (0, 255)
    assert len(json.dumps(image)) < 100
    mixed = space_to_dict(spaces.Box(np.zeros(2, np.float32), np.array([1.0, 2.0], np.float32)))
    assert (mixed["low"], mixed["high"]) == (0.0, [1.0, 2.0])


def test_forms_of_earlier_versions_are_read():
    """Bounds entry by entry, parts of a Dict as a mapping, no dtype of a Discrete space."""
    box = {"type": "Box", "low": [[-1.0, -1.0]], "high": [[1.0, 1.0]]}
    old = {
        "type": "Dict",
        "spaces": {
            "b": {**box, "shape": [1, 2], "dtype": "float32"},
            "a": {"type": "Discrete", "n": 3, "start": -1},
            "c": {"type": "MultiBinary", "n": [2, 3]},
        },
    }
    space = space_from_dict(old)
    assert list(space.spaces) == ["b", "a", "c"]
    assert space["b"] == spaces.Box(-1, 1, (1, 2), np.float32)
    assert space["a"] == spaces.Discrete(3, start=-1)
    assert space["c"] == spaces.MultiBinary((2, 3))


def test_keys_that_text_can_not_hold_are_refused():
    """A key that would come back as something else is named."""
    with pytest.raises(SpaceError, match=r"the key \(1, 2\) can not be saved"):
        space_to_dict(spaces.Dict({(1, 2): spaces.Discrete(2)}))


SHAPES = st.lists(st.integers(1, 3), max_size=3).map(tuple)
DTYPES = st.sampled_from(
    [
        np.float16,
        np.float32,
        np.float64,
        np.uint8,
        np.int16,
        np.uint32,
        np.int64,
        np.uint64,
        np.bool_,
    ]
)


@st.composite
def boxes(draw):
    """Boxes whose bounds are the same everywhere, or random entry by entry."""
    shape, dtype = draw(SHAPES), np.dtype(draw(DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    bound_shape = shape if draw(st.booleans()) else ()
    if dtype.kind == "f":
        low, high = np.sort(rng.standard_cauchy((2, *bound_shape)).astype(dtype), axis=0)
        low = np.where(rng.random(bound_shape) < 0.2, -np.inf, low)
        high = np.where(rng.random(bound_shape) < 0.2, np.inf, high)
    elif dtype.kind == "b":
        low, high = np.zeros(bound_shape, dtype), rng.random(bound_shape) < 0.5
    else:
        info = np.iinfo(dtype)
        ends = rng.integers(info.min, info.max, (2, *bound_shape), dtype=dtype, endpoint=True)
        low, high = np.sort(ends, axis=0)
    low, high = (np.broadcast_to(bound, shape).astype(dtype) for bound in (low, high))
    return spaces.Box(low, high, shape, dtype.type)


@st.composite
def multi_discretes(draw):
    """MultiDiscrete spaces of any shape, from any start."""
    shape = draw(SHAPES)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from([np.int16, np.int64]))
    nvec, start = rng.integers(1, 9, shape), rng.integers(-9, 9, shape)
    return spaces.MultiDiscrete(nvec.astype(dtype), dtype=dtype, start=start.astype(dtype))


LEAVES = st.one_of(
    boxes(),
    multi_discretes(),
    st.builds(spaces.Discrete, st.integers(1, 9), start=st.integers(-9, 9)),
    st.builds(spaces.MultiBinary, st.one_of(st.integers(1, 4), SHAPES)),
)
KEYS = st.text(st.characters(codec="utf-8"), max_size=3)
NESTED = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        st.lists(st.tuples(KEYS, parts), max_size=3, unique_by=lambda pair: pair[0]).map(
            spaces.Dict
        ),
        st.lists(parts, max_size=3).map(spaces.Tuple),
    ),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(NESTED)
def test_any_space_comes_back(space):
    """Random nestings of random spaces come back from text with every number as it was."""
    copy = space_from_dict(json.loads(json.dumps(space_to_dict(space))))
    assert copy == space
    assert repr(copy) == repr(space)
    assert keys_of(copy) == keys_of(space)
    for ours, theirs in zip(numbers_of(space), numbers_of(copy), strict=True):
        np.testing.assert_array_equal(ours, theirs, strict=True)


def numbers_of(space):
    """All numbers that make a space, as arrays: spaces are equal if these are nearly so."""
    if isinstance(space, spaces.Box):
        return [space.low, space.high, space.bounded_below, space.bounded_above]
    if isinstance(space, spaces.Discrete):
        return [np.asarray(space.n), np.asarray(space.start)]
    if isinstance(space, spaces.MultiDiscrete):
        return [space.nvec, space.start]
    if isinstance(space, spaces.MultiBinary):
        return [np.asarray(space.n)]
    parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
    return [number for part in parts for number in numbers_of(part)]
