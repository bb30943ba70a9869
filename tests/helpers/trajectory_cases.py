"""Spaces of every kind with random episodes, for tests of datasets."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from cases import small_discrete
from gymnasium import spaces

from maze_train.core.types import tree_map
from maze_train.data.trajectories import Trajectory
from maze_train.spaces.describe import FlatView

INF = np.inf
CHOICE = spaces.Discrete(3)
FLOATS = spaces.Box(-INF, INF, (3,), np.float32)
NESTED = spaces.Dict(
    {
        "goal": spaces.Discrete(5, start=-2),
        "robot": spaces.Tuple(
            (
                spaces.Box(-1.0, 1.0, (2, 2), np.float64),
                spaces.Dict({"camera": spaces.Box(0, 255, (8, 9, 3), np.uint8)}),
            )
        ),
    }
)
SPACES = {
    "float32": FLOATS,
    "float64": spaces.Box(-1.0, 1.0, (2, 2), np.float64),
    "float16": spaces.Box(-1.0, 1.0, (2,), np.float16),
    "number": spaces.Box(-1.0, 1.0, (), np.float32),
    "image": spaces.Box(0, 255, (40, 36, 3), np.uint8),
    "stack": spaces.Box(0, 255, (4, 33, 34), np.uint8),
    "grey": spaces.Box(0, 255, (32, 32), np.uint8),
    "int16": spaces.Box(-300, 300, (2,), np.int16),
    "no_numbers": spaces.Box(-1.0, 1.0, (2, 0), np.float32),
    "bool": spaces.Box(0, 1, (3,), np.bool_),
    "discrete": spaces.Discrete(4),
    "discrete_start": spaces.Discrete(4, start=-7),
    "multi_discrete": spaces.MultiDiscrete([3, 2]),
    "multi_discrete_start": spaces.MultiDiscrete([[3, 4], [2, 5]], start=[[2, -1], [0, 9]]),
    "multi_binary": spaces.MultiBinary(6),
    "multi_binary_nd": spaces.MultiBinary((2, 3)),
    "multi_binary_0d": spaces.MultiBinary(()),
    "tuple": spaces.Tuple((spaces.Discrete(2), FLOATS, spaces.Tuple((spaces.MultiBinary(2),)))),
    "nested": NESTED,
    "many_keys": spaces.Dict({str(i): spaces.Discrete(i + 1) for i in range(12)}),
}
ODD_SPACES = {
    "integer_keys": spaces.Dict({1: spaces.Discrete(2), 0: spaces.Discrete(3)}),
    "odd_keys": spaces.Dict(
        OrderedDict([("../../x", spaces.Discrete(2)), ("a.npy", FLOATS), ("/\0\n\u00e4", FLOATS)])
    ),
    "small_discrete": small_discrete(3, 250),
}
"""Spaces that Minari cannot represent exactly."""


def random_tree(space, length, rng):
    """Return random values of a space, `[length, ...]`."""
    space.seed(int(rng.integers(2**31)))
    view = FlatView(space)
    rows = [dict(view.read(space.sample())) for _ in range(length)]
    tree = {
        key: np.array([row[key] for row in rows], leaf.dtype).reshape(length, *(leaf.shape or ()))
        for key, leaf in view.leaves.items()
    }
    return tree[""] if view.is_single else tree


def random_trajectory(observation_space, action_space, length=3, seed=0):
    """Return a random episode; the kind of end and whether the seed is known depend on `seed`."""
    rng = np.random.default_rng(seed)
    return Trajectory(
        obs=random_tree(observation_space, length + 1, rng),
        actions=random_tree(action_space, length, rng),
        rewards=rng.normal(size=length),
        terminated=seed % 2 == 0,
        truncated=seed % 3 == 0,
        seed=None if seed % 4 == 3 else seed,
    )


def random_trajectories(observation_space, action_space, lengths):
    """Return random episodes of these lengths."""
    return [
        random_trajectory(observation_space, action_space, length, seed)
        for seed, length in enumerate(lengths)
    ]


def assert_same(found, expected):
    """Check that all values, keys, shapes and dtypes of an episode are identical."""
    for name in ("obs", "actions", "rewards"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert isinstance(ours, dict) == isinstance(theirs, dict)
        if isinstance(ours, dict):
            assert ours.keys() == theirs.keys()
        assert tree_map(_bits, ours) == tree_map(_bits, theirs), name
    for name in ("terminated", "truncated", "seed"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (type(ours), ours) == (type(theirs), theirs), name


def assert_all_same(found, expected):
    """Check that all episodes are identical to the expected ones."""
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)


def _bits(array):
    return array.shape, array.dtype, array.tobytes()
