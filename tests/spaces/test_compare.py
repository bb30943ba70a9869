"""Spaces that are not equal, told in a few words."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from maze_train.errors import ConfigError
from maze_train.spaces.compare import check_same_spaces, space_difference

IMAGE = spaces.Box(0, 255, (84, 84, 3), np.uint8)
VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)
LOW = np.array([-1.0, -2.0, -1.0], np.float32)


@pytest.mark.parametrize(
    ("one", "other", "texts"),
    [
        (
            IMAGE,
            spaces.Box(0, 255, (64, 64, 3), np.uint8),
            ("Box(shape=[84, 84, 3], dtype=uint8)", "Box(shape=[64, 64, 3], dtype=uint8)"),
        ),
        (
            VECTOR,
            spaces.Box(LOW, -LOW, (3,), np.float32),
            (
                "Box(shape=[3], dtype=float32) with bounds [-1.0, 1.0] at [1]",
                "Box(shape=[3], dtype=float32) with bounds [-2.0, 2.0] at [1]",
            ),
        ),
        (
            spaces.Box(0.0, 1.0, (), np.float32),
            spaces.Box(0.0, 2.0, (), np.float32),
            (
                "Box(shape=[], dtype=float32) with bounds [0.0, 1.0]",
                "Box(shape=[], dtype=float32) with bounds [0.0, 2.0]",
            ),
        ),
        (
            VECTOR,
            spaces.Box(-1.0, 1.0, (3,), np.float64),
            ("Box(shape=[3], dtype=float32)", "Box(shape=[3], dtype=float64)"),
        ),
        (
            spaces.Discrete(3),
            spaces.Discrete(3, start=1),
            ("Discrete(3)", "Discrete(3, start=1)"),
        ),
        (
            spaces.MultiDiscrete([2, 3]),
            VECTOR,
            ("MultiDiscrete(nvec=[2, 3], start=[0, 0])", "Box(shape=[3], dtype=float32)"),
        ),
        (
            spaces.MultiDiscrete([2] * 100),
            spaces.MultiDiscrete([2] * 99 + [3]),
            (
                "MultiDiscrete(shape=[100]) with 2 choices from 0 at [99]",
                "MultiDiscrete(shape=[100]) with 3 choices from 0 at [99]",
            ),
        ),
        (
            spaces.Dict({"a": VECTOR, "b": spaces.Discrete(2)}),
            spaces.Dict({"a": VECTOR, "b": spaces.Discrete(3)}),
            ("Discrete(2) at 'b'", "Discrete(3) at 'b'"),
        ),
        (
            spaces.Dict({"a": VECTOR}),
            spaces.Dict({"a": VECTOR, "c": IMAGE}),
            ("nothing at 'c'", "Box(shape=[84, 84, 3], dtype=uint8) at 'c'"),
        ),
        (
            spaces.Dict({"a": VECTOR}),
            VECTOR,
            ("Dict (1 leaf)", "Box(shape=[3], dtype=float32)"),
        ),
        (
            spaces.Dict({"0": VECTOR, "1": IMAGE}),
            spaces.Tuple((VECTOR, IMAGE)),
            ("Dict (2 leaves)", "Tuple (2 leaves)"),
        ),
        (
            spaces.Dict({"a/b": VECTOR}),
            spaces.Dict({"a": spaces.Dict({"b": VECTOR})}),
            ("Dict nested in one way", "Dict nested in another"),
        ),
    ],
)
def test_what_differs(
    one: spaces.Space[object], other: spaces.Space[object], texts: tuple[str, str]
) -> None:
    """Type, shape and data type; bounds and choices where nothing else tells them apart."""
    assert one != other
    assert space_difference(one, other) == texts


def test_an_error_names_the_setting_and_the_kind_of_space() -> None:
    """The first kind that differs is told; equal spaces are no error."""
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
