"""Spaces that are not equal, told in a few words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import sweep
from gymnasium import spaces

from maze_train.core.errors import ConfigError
from maze_train.spaces.describe import check_same_spaces, space_difference

IMAGE = spaces.Box(0, 255, (84, 84, 3), np.uint8)
BYTES = "Box(shape=[84, 84, 3], dtype=uint8)"
VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)
FLOATS = "Box(shape=[3], dtype=float32)"
NUMBER = "Box(shape=[], dtype=float32)"
BITS = "MultiDiscrete(shape=[100]) with"
LOW = np.array([-1.0, -2.0, -1.0], np.float32)


@sweep(
    "case",
    [
        (IMAGE, spaces.Box(0, 255, (64, 64, 3), np.uint8), BYTES, BYTES.replace("84", "64")),
        (
            VECTOR,
            spaces.Box(LOW, -LOW, (3,), np.float32),
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
def test_what_differs(case: tuple[Any, Any, str, str]) -> None:
    """Type, shape and data type; bounds and choices where nothing else tells them apart."""
    one, other, *texts = case
    assert one != other
    assert space_difference(one, other) == tuple(texts)


def test_an_error_names_the_setting_and_the_kind_of_space() -> None:
    """The first kind that differs is reported; equal spaces are no error."""
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
