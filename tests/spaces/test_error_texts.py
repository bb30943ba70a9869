"""What is said about spaces that nothing reads."""

from __future__ import annotations

import pytest
from gymnasium import spaces

from maze_train.errors import SpaceError
from maze_train.spaces.describe import flat_space

BOX = spaces.Box(-1, 1, (2,))


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
def test_leaf_and_remedy_are_named(leaf):
    """The error tells where the space is, which it is, and what can be done about it."""
    space = spaces.Dict({"robot": spaces.Tuple((BOX, leaf))})
    name = type(leaf).__name__
    with pytest.raises(SpaceError, match=rf"'robot/1' is {name}.*FilterObs.*filter_keys"):
        flat_space(space)
    with pytest.raises(SpaceError, match=rf"the space is {name}.*own: env\.wrappers"):
        flat_space(leaf)
