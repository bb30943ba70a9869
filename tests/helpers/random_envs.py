"""Environments with arbitrary spaces; observations and episode ends are random but seeded."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from hypothesis import strategies as st

from maze_train.spaces.describe import FlatView, flat_spaces

MASK = "action_mask"
FLOATS = (np.float32, np.float64)
INTEGERS = (np.int8, np.int16, np.int32, np.int64, np.uint8)
BOUNDS = ("both", "equal", "low", "high", "none", "mixed")
NAMES = ("arm", "gear", "speed", "goal", "10", "2")


class RandomSpaceEnv(gymnasium.Env[Any, Any]):
    """Environment with random observations of given spaces that raises on illegal actions.

    The reward, in [-1, 1], is a function of the observation and the action taken on it.
    Episodes are terminated, truncated, or both.

    Args:
        observation_space: Any space that can be sampled. In a Dict, the key `action_mask` (see
            `mask_spaces`) holds the mask of legal actions.
        action_space: Any space.
        end_probability: Probability of a termination, and of a truncation, in each step.
        refuses_illegal: Whether a masked action raises an error.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        end_probability: float = 0.15,
        refuses_illegal: bool = True,
    ) -> None:
        # Copies: each space has a random generator, which environments must not share.
        self.observation_space = copy.deepcopy(observation_space)
        self.action_space = copy.deepcopy(action_space)
        self.end_probability = end_probability
        self.is_masked = refuses_illegal and has_mask(observation_space)
        self.t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self.t = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is not in {self.action_space}")
        if self.is_masked and not is_legal(
            self.action_space, action, self.observation_space[MASK], self.masks
        ):
            raise ValueError(f"{action!r} is not legal: the masks are {self.masks}")
        reward = math.sin(self.mark + 3.0 * number_of(action))
        self.t += 1
        terminated = bool(self.np_random.random() < self.end_probability)
        # The checker of Gymnasium requires episodes of more than one step.
        truncated = self.t > 1 and bool(self.np_random.random() < self.end_probability)
        return self.observe(), reward, terminated, truncated, {}

    def observe(self) -> Any:
        """Return a new observation; its mask allows at least one action of each component."""
        observation = self.observation_space.sample()
        if has_mask(self.observation_space):
            self.masks = random_masks(self.action_space, self.np_random)
            observation[MASK] = as_observed(self.observation_space[MASK], self.masks)
        self.mark = number_of(observation)
        return copy.deepcopy(observation)


def number_of(value: Any) -> float:
    """Return one value in [-1, 1] for a value of any space."""
    if isinstance(value, dict):
        return number_of(tuple(value.values()))
    if isinstance(value, tuple):
        return float(np.mean([number_of(part) for part in value])) if value else 0.0
    return float(np.tanh(np.asarray(value, np.float64)).mean()) if np.size(value) else 0.0


# -- masks ---------------------------------------------------------------------------------------


def choices_of(action_space: spaces.Space[Any]) -> dict[str, list[int]]:
    """Return the numbers of actions of all choices that can be masked, by component."""
    found = {}
    for key, leaf in flat_spaces(action_space).items():
        if isinstance(leaf, spaces.Discrete):
            found[key] = [int(leaf.n)]
        elif isinstance(leaf, spaces.MultiDiscrete):
            found[key] = [int(n) for n in leaf.nvec.ravel()]
    return found


def has_mask(observation_space: spaces.Space[Any]) -> bool:
    """Return whether observations contain an action mask."""
    return isinstance(observation_space, spaces.Dict) and MASK in observation_space.spaces


def random_masks(
    action_space: spaces.Space[Any], rng: np.random.Generator
) -> dict[str, list[np.ndarray[Any, Any]]]:
    """Return random masks by component; each choice has at least one legal action."""
    masks: dict[str, list[Any]] = {}
    for key, counts in choices_of(action_space).items():
        masks[key] = [rng.random(n) < 0.4 for n in counts]
        for mask in masks[key]:
            mask[rng.integers(len(mask))] = True
    return masks


def as_observed(mask_space: spaces.Space[Any], masks: dict[str, list[Any]]) -> Any:
    """Return the masks in the format of the observation: one array, or one per component."""
    if isinstance(mask_space, spaces.Dict):
        return {key: as_observed(mask_space[key], {key: masks[key]}) for key in mask_space}
    rows = [row for part in masks.values() for row in part]
    return np.concatenate(rows).astype(mask_space.dtype).reshape(mask_space.shape)


def is_legal(
    action_space: spaces.Space[Any],
    action: Any,
    mask_space: spaces.Space[Any],
    masks: dict[str, list[Any]],
) -> bool:
    """Return whether the observed masks allow an action."""
    spaces_by_key = flat_spaces(action_space)
    values = dict(FlatView(action_space).read(action))
    keys = list(mask_space) if isinstance(mask_space, spaces.Dict) else list(masks)
    for key in keys:
        numbers = np.ravel(values[key] - np.asarray(spaces_by_key[key].start))
        if not all(mask[i] for mask, i in zip(masks[key], numbers, strict=True)):
            return False
    return True


# -- strategies ----------------------------------------------------------------------------------

small_shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)


@st.composite
def boxes(draw: Any) -> spaces.Box:
    """Boxes of 0 to 3 dimensions, with bounds on both sides, on one, on none, or mixed."""
    shape = draw(small_shapes)
    if draw(st.booleans()):
        return _float_box(draw, shape)
    dtype = np.dtype(draw(st.sampled_from(INTEGERS)))
    info = np.iinfo(dtype)
    low = draw(st.integers(max(info.min, -300), 100))
    high = draw(st.integers(low, min(info.max, 300)))
    ends = {"low": info.min if info.min else low, "high": min(info.max, 2**63 - 2)}
    kind = draw(st.sampled_from(BOUNDS))
    if kind in ("high", "none"):
        low = ends["low"]
    if kind in ("low", "none"):
        high = ends["high"]
    return spaces.Box(low, low if kind == "equal" else high, shape, dtype.type)


def _float_box(draw: Any, shape: tuple[int, ...]) -> spaces.Box:
    dtype = draw(st.sampled_from(FLOATS))
    size = math.prod(shape)
    kinds = draw(st.lists(st.sampled_from(BOUNDS[:-1]), min_size=size, max_size=size))
    if draw(st.booleans()):
        kinds = kinds[:1] * size
    numbers = st.floats(-100.0, 100.0, width=32).map(lambda x: x + 0.0)  # no -0.0: not above 0
    low, high = np.zeros(size, dtype), np.zeros(size, dtype)
    for i, kind in enumerate(kinds):
        low[i], high[i] = sorted((draw(numbers), draw(numbers)))
        if kind in ("high", "none"):
            low[i] = -np.inf
        if kind in ("low", "none"):
            high[i] = np.inf
        if kind == "equal":
            high[i] = low[i]
    return spaces.Box(low.reshape(shape), high.reshape(shape), shape, dtype)


@st.composite
def images(draw: Any) -> spaces.Box:
    """Byte images of 8 to 40 pixels, channels first, last, or none."""
    sides = (draw(st.integers(8, 40)), draw(st.integers(8, 40)))
    channels = draw(st.integers(1, 4))
    shapes = (sides, (channels, *sides), (*sides, channels))
    return spaces.Box(0, 255, draw(st.sampled_from(shapes)), np.uint8)


discretes = st.builds(
    lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 6), st.integers(-4, 4)
)


@st.composite
def multi_discretes(draw: Any) -> spaces.MultiDiscrete:
    """MultiDiscrete of 1 to 3 dimensions, with and without starts."""
    shape = draw(small_shapes.filter(len))
    size = math.prod(shape)
    counts = draw(st.lists(st.integers(1, 4), min_size=size, max_size=size))
    starts = draw(st.lists(st.integers(-3, 3), min_size=size, max_size=size))
    if draw(st.booleans()):
        starts = [0] * size
    dtype = draw(st.sampled_from((np.int64, np.int32, np.int8)))
    return spaces.MultiDiscrete(
        np.reshape(counts, shape), dtype=dtype, start=np.reshape(starts, shape)
    )


@st.composite
def multi_binaries(draw: Any) -> spaces.MultiBinary:
    """MultiBinary of 1 to 3 dimensions."""
    shape = draw(small_shapes.filter(len))
    return spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)


leaves = st.one_of(boxes(), discretes, multi_discretes(), multi_binaries())


def nested(children: Any) -> Any:
    """Dict and Tuple spaces of one to three spaces; keys sorted or in insertion order."""
    pairs = st.lists(
        st.tuples(st.sampled_from(NAMES), children),
        min_size=1,
        max_size=3,
        unique_by=lambda p: p[0],
    )
    return st.one_of(
        pairs.map(lambda p: spaces.Dict(dict(p))),
        pairs.map(lambda p: spaces.Dict(OrderedDict(p))),
        st.lists(children, min_size=1, max_size=3).map(spaces.Tuple),
    )


def shallow(leaf: Any) -> Any:
    """Leaf spaces, and spaces nested to a depth of 1, 2 or 3."""
    one = nested(leaf)
    two = nested(st.one_of(leaf, one))
    three = nested(st.one_of(leaf, two))
    return st.one_of(leaf, leaf, one, two, three)


action_spaces = shallow(leaves)


@st.composite
def observation_spaces(draw: Any) -> spaces.Space[Any]:
    """Observation spaces; one in twelve may contain an image, since images are slow."""
    if draw(st.integers(0, 11)):
        return draw(shallow(leaves))
    return draw(shallow(st.one_of(images(), images(), discretes)))


@st.composite
def mask_spaces(draw: Any, action_space: spaces.Space[Any]) -> spaces.Space[Any]:
    """One mask array for all choices, or a Dict of arrays for some components."""
    choices = choices_of(action_space)
    if "" not in choices and draw(st.booleans()):
        keys = draw(st.lists(st.sampled_from(list(choices)), min_size=1, unique=True))
        return spaces.Dict(
            {key: draw(_mask_leaf(flat_spaces(action_space)[key], choices[key])) for key in keys}
        )
    return draw(_mask_leaf(action_space, [n for counts in choices.values() for n in counts]))


@st.composite
def _mask_leaf(draw: Any, action_space: spaces.Space[Any], counts: list[int]) -> Any:
    shape: tuple[int, ...] = (sum(counts),)
    if isinstance(action_space, spaces.MultiDiscrete) and len(set(counts)) == 1:
        shape = draw(st.sampled_from((shape, (*action_space.shape, counts[0]))))
    kinds = (
        spaces.MultiBinary(shape if len(shape) > 1 else shape[0]),
        spaces.MultiDiscrete(np.full(shape, 2)),
        *(spaces.Box(0, 1, shape, dtype) for dtype in (np.int8, np.uint8, np.float32, np.bool_)),
    )
    return draw(st.sampled_from(kinds))


@st.composite
def space_pairs(draw: Any) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """Observation and action space; if possible, one in three pairs has a mask."""
    action_space = draw(action_spaces)
    observation_space = draw(observation_spaces())
    if not choices_of(action_space) or draw(st.integers(0, 2)):
        return observation_space, action_space
    if not isinstance(observation_space, spaces.Dict):
        observation_space = spaces.Dict({"obs": observation_space})
    masks = draw(mask_spaces(action_space))
    return spaces.Dict({**observation_space.spaces, MASK: masks}), action_space
