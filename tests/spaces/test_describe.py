"""Descriptions of spaces: leaves, images, differences, serialization."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from cases import small_discrete, sweep
from gymnasium import spaces

from maze_train.core.errors import ConfigError, SpaceError
from maze_train.spaces.describe import (
    FlatView,
    check_same_spaces,
    flat_space,
    flat_spaces,
    flatten_value,
    holds_images,
    image_layout,
    is_image,
    space_difference,
    space_from_dict,
    space_to_dict,
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
    """A leaf space is unchanged and has the key ''."""
    assert flat_spaces(BOX) == {"": BOX}
    assert flat_space(BOX) is BOX
    value = BOX.sample()
    assert flatten_value(BOX, value) is value
    assert unflatten_value(BOX, value) is value


def test_nested_keys_are_joined():
    """Dict keys and Tuple indices are joined by '/', and the order is kept."""
    keys = [str(i) for i in range(12)]
    for space, expected in [
        (NESTED, ["bits", "goal", "robot/0", "robot/1/mode"]),
        (spaces.Tuple([BOX] * 12), keys),
    ]:
        assert list(flat_spaces(space)) == list(flat_space(space).spaces) == expected


def test_values_round_trip():
    """Flattened values are members of the flat space and unflatten to the original values."""
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
def test_unsupported_spaces_raise(leaf):
    """The error contains the key, the type of the space and a remedy."""
    space = spaces.Dict({"robot": spaces.Tuple((BOX, leaf))})
    name = type(leaf).__name__
    with pytest.raises(SpaceError, match=rf"'robot/1' is {name}.*FilterObs.*filter_keys"):
        flat_spaces(space)
    with pytest.raises(SpaceError, match=rf"the space is {name}.*wrapper: env\.wrappers"):
        flat_space(leaf)


def test_ambiguous_and_empty_spaces_raise():
    """Duplicate flat keys, no leaves and empty keys raise SpaceError."""
    for parts, words in [
        ({"a/b": BOX, "a": spaces.Dict({"b": BOX})}, "flattened key 'a/b'"),
        ({}, "no leaves"),
        ({"": BOX}, "has an empty key: give it a name"),
    ]:
        with pytest.raises(SpaceError, match=words):
            flat_spaces(spaces.Dict(parts))


def test_missing_leaf_is_named():
    """Flattening and unflattening name the missing leaf."""
    with pytest.raises(SpaceError, match="'robot/1/mode' is missing"):
        flatten_value(NESTED, {"robot": (BOX.sample(),), "goal": [0, 0], "bits": [0, 0]})
    with pytest.raises(SpaceError, match="'goal' is missing"):
        unflatten_value(NESTED, {"bits": 0, "robot/0": 0, "robot/1/mode": 0})


# -- images --------------------------------------------------------------------------------------


def of_bytes(*shape, low=0, high=255):
    """Return a Box of bytes."""
    return spaces.Box(low, high, shape, np.uint8)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((7, 7, 3), (3, 7, 7, True)),
        ((7, 7, 20), (20, 7, 7, True)),
        ((3, 64, 64), (3, 64, 64, False)),
        ((4, 84, 84), (4, 84, 84, False)),
        ((84, 84, 4), (4, 84, 84, True)),
        ((84, 84, 1), (1, 84, 84, True)),
        ((1, 84, 84), (1, 84, 84, False)),
        ((12, 96, 96), (12, 96, 96, False)),
        ((210, 160, 3), (3, 210, 160, True)),
        ((3, 210, 160), (3, 210, 160, False)),
        ((7, 7, 7), (7, 7, 7, True)),
        ((9, 30, 9), (9, 9, 30, True)),
        ((8, 8, 111), (111, 8, 8, True)),
        ((4, 96, 96, 3), (12, 96, 96, True)),
        ((4, 84, 84, 1), (4, 84, 84, True)),
        ((4, 3, 64, 48), (12, 64, 48, False)),
        ((84, 84), (1, 84, 84, False)),
        ((16, 160), (1, 16, 160, False)),
    ],
)
def test_images(shape, layout):
    """The layout contains the number of channels, the image size and the channel order."""
    assert is_image(of_bytes(*shape))
    assert image_layout(of_bytes(*shape)) == layout


@pytest.mark.parametrize(
    "space",
    [
        of_bytes(128),
        of_bytes(),
        of_bytes(6, 7, 2),
        of_bytes(3, 3, 27),
        of_bytes(10, 5, 8),
        of_bytes(15, 84),
        of_bytes(84, 15),
        of_bytes(84, 84, high=5),
        of_bytes(84, 84, low=1),
        of_bytes(2, 4, 16, 16, 3),
        of_bytes(3, 0, 84),
        spaces.Box(0, 255, (84, 84, 3), np.float32),
        spaces.Box(0, 255, (84, 84, 3), np.int16),
        spaces.Box(-128, 127, (84, 84, 3), np.int8),
        spaces.MultiBinary((84, 84, 3)),
        spaces.MultiDiscrete(np.full((20, 20, 3), 255), dtype=np.uint8),
        spaces.Discrete(256),
    ],
    ids=str,
)
def test_arrays_that_are_not_byte_images_are_vectors(space):
    """Arrays that are not byte images are read as vectors."""
    assert not is_image(space)
    assert not holds_images(space)


def test_image_bounds_with_channels_are_ignored():
    """Binary planes with channels are images."""
    assert is_image(of_bytes(10, 10, 4, high=1))


def test_dict_with_an_image_leaf_has_an_image():
    """A single image leaf is sufficient."""
    vector = spaces.Box(-1, 1, (3,))
    assert holds_images(spaces.Dict({"a": vector, "camera/0": of_bytes(64, 64, 3)}))
    assert not holds_images(spaces.Dict({"a": vector, "b": of_bytes(64)}))
    assert holds_images(of_bytes(64, 64, 3))


# -- differences ---------------------------------------------------------------------------------


IMAGE = spaces.Box(0, 255, (84, 84, 3), np.uint8)
BYTES = "Box(shape=[84, 84, 3], dtype=uint8)"
VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)
FLOATS = "Box(shape=[3], dtype=float32)"
NUMBER = "Box(shape=[], dtype=float32)"
BITS = "MultiDiscrete(shape=[100]) with"
LOWER = np.array([-1.0, -2.0, -1.0], np.float32)


@sweep(
    "case",
    [
        (IMAGE, spaces.Box(0, 255, (64, 64, 3), np.uint8), BYTES, BYTES.replace("84", "64")),
        (
            VECTOR,
            spaces.Box(LOWER, -LOWER, (3,), np.float32),
            f"{FLOATS} with bounds [-1.0, 1.0] at [1]",
            f"{FLOATS} with bounds [-2.0, 2.0] at [1]",
        ),
        (
            spaces.Box(0.0, 1.0, (), np.float32),
            spaces.Box(0.0, 2.0, (), np.float32),
            f"{NUMBER} with bounds [0.0, 1.0]",
            f"{NUMBER} with bounds [0.0, 2.0]",
        ),
        (VECTOR, spaces.Box(-1.0, 1.0, (3,), float), FLOATS, FLOATS.replace("32", "64")),
        (spaces.Discrete(3), spaces.Discrete(3, start=1), "Discrete(3)", "Discrete(3, start=1)"),
        (spaces.MultiDiscrete([2, 3]), VECTOR, "MultiDiscrete(nvec=[2, 3], start=[0, 0])", FLOATS),
        (
            spaces.MultiDiscrete([2] * 100),
            spaces.MultiDiscrete([2] * 99 + [3]),
            f"{BITS} 2 choices from 0 at [99]",
            f"{BITS} 3 choices from 0 at [99]",
        ),
        (
            spaces.Dict({"a": VECTOR, "b": spaces.Discrete(2)}),
            spaces.Dict({"a": VECTOR, "b": spaces.Discrete(3)}),
            "Discrete(2) at 'b'",
            "Discrete(3) at 'b'",
        ),
        (
            spaces.Dict({"a": VECTOR}),
            spaces.Dict({"a": VECTOR, "c": IMAGE}),
            "nothing at 'c'",
            f"{BYTES} at 'c'",
        ),
        (spaces.Dict({"a": VECTOR}), VECTOR, "Dict (1 leaf)", FLOATS),
        (
            spaces.Dict({"0": VECTOR, "1": IMAGE}),
            spaces.Tuple((VECTOR, IMAGE)),
            "Dict (2 leaves)",
            "Tuple (2 leaves)",
        ),
        (
            spaces.Dict({"a/b": VECTOR}),
            spaces.Dict({"a": spaces.Dict({"b": VECTOR})}),
            "Dict nested in one way",
            "Dict nested in another",
        ),
    ],
)
def test_space_difference_names_type_shape_dtype_or_bounds(case: tuple[Any, Any, str, str]) -> None:
    """The difference is type, shape or dtype; otherwise bounds or choices."""
    one, other, *texts = case
    assert one != other
    assert space_difference(one, other) == tuple(texts)


def test_space_error_names_setting_and_space() -> None:
    """The error contains the setting and the first kind of space that differs."""
    pair = (VECTOR, spaces.Discrete(2))
    problem = "it has the {kind} space {found}, the environment has {wanted}"
    check_same_spaces("base_run", problem, pair, (VECTOR, spaces.Discrete(2)), "a")
    with pytest.raises(ConfigError) as caught:
        check_same_spaces("base_run", problem, pair, (VECTOR, spaces.Discrete(4)), "a")
    assert str(caught.value) == (
        "base_run = 'a': it has the action space Discrete(2), the environment has Discrete(4)"
    )
    with pytest.raises(ConfigError, match=r"^env: other .*observation .*84"):
        check_same_spaces("env", "other {kind} {found} {wanted}", pair, (IMAGE, pair[1]))


# -- saved spaces --------------------------------------------------------------------------------


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
    small_discrete(3, 250),
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
    """Return all attributes of a space exactly, because `==` tolerates rounding."""
    parts = getattr(space, "spaces", None)
    if parts is not None:
        items = parts.items() if isinstance(parts, dict) else enumerate(parts)
        return [(key, described(part)) for key, part in items]
    names = [name for name in vars(space) if not name.endswith(("random", "repr"))]
    values = [np.asarray(getattr(space, name)) for name in names]
    return [*zip(names, [(value.dtype, value.tolist()) for value in values], strict=True)]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_round_trip_through_text(space):
    """Strict JSON text preserves dtype, shape, order and exact bounds."""
    copy = space_from_dict(json.loads(json.dumps(space_to_dict(space), allow_nan=False)))
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
def test_unsupported_spaces_and_metadata_raise(space, message):
    """Unsupported spaces, also in a Dict, and keys that are not strings raise SpaceError."""
    with pytest.raises(SpaceError, match=message):
        space_to_dict(space)
    with pytest.raises(SpaceError, match="unknown type of space 'Torus'"):
        space_from_dict({"type": "Torus"})


def test_equal_bounds_are_one_number():
    """Equal bounds are stored as one value, other bounds entry by entry."""
    image = space_to_dict(spaces.Box(0, 255, (84, 84, 4), np.uint8))
    assert (image["low"], image["high"]) == (0, 255)
    assert len(json.dumps(image)) < 100
    mixed = space_to_dict(spaces.Box(np.zeros(2, np.float32), np.array([1.0, 2.0], np.float32)))
    assert (mixed["low"], mixed["high"]) == (0.0, [1.0, 2.0])
