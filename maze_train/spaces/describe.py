"""Description, comparison and storage of gymnasium spaces.

A nested space becomes one flat mapping from the joined keys of its leaves to the leaves. The inside
of a Tuple is keyed by its index, so `Dict(robot=Tuple(Box, Box), goal=Discrete)` has the leaves
`goal, robot/0, robot/1`. A space that is a leaf already has the one key `""`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from gymnasium import spaces

from maze_train.core.errors import ConfigError, SpaceError

if TYPE_CHECKING:
    from maze_train.core.types import Array


MASK_KEY = "action_mask"
"""The key of a Dict observation that holds the legal actions."""

LEAF_TYPES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
NESTED_TYPES = (spaces.Dict, spaces.Tuple)

LEFT_OUT = (
    "leave it out of observations by env.wrappers=[{_target_: "
    "gymnasium.wrappers.FilterObservation, filter_keys: [<keys that stay>]}], or "
)


class FlatView:
    """Reads and builds values of one space, leaf by leaf.

    The paths to the leaves are found once, so reading a value costs one look-up per level.

    Args:
        space: Any nesting of Dict and Tuple over Box, Discrete, MultiDiscrete and MultiBinary, or
            one of these alone.
        left_out: Joined keys of leaves that are passed over; values may lack them.

    Attributes:
        space: The space as given.
        leaves: Its leaves by joined key, in the order of the space.
        is_single: Whether the space itself is a leaf, which then has the key `""`.

    Raises:
        SpaceError: If the space holds no leaf, two leaves with the same joined key, or a leaf of
            another kind.
    """

    def __init__(self, space: spaces.Space[Any], left_out: Collection[str] = ()) -> None:
        self.space = space
        self.is_single = not isinstance(space, NESTED_TYPES)
        self.leaves: dict[str, spaces.Space[Any]] = {}
        self._paths: dict[str, tuple[Any, ...]] = {}
        for path, leaf in walk_leaves(space, ()):
            key = join_keys(path)
            if not key and not self.is_single:
                raise SpaceError(f"a key of {space} is empty: give it a name")
            if key in left_out:
                continue
            if key in self.leaves:
                raise SpaceError(f"two leaves of {space} have the joined key {key!r}: rename one")
            self.leaves[key] = leaf
            self._paths[key] = path
        if not self.leaves:
            raise SpaceError(f"{space} has no leaves: expected at least one")
        self._assemble = assembler(space, ())

    def read(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Key and value of every leaf of `value`, in the order of `leaves`.

        Raises:
            SpaceError: If a leaf is missing.
        """
        for key, path in self._paths.items():
            leaf = value
            try:
                for part in path:
                    leaf = leaf[part]
            except (KeyError, IndexError, TypeError) as error:
                given = sorted(map(str, value)) if isinstance(value, dict) else type(value).__name__
                raise SpaceError(f"the leaf {key!r} is missing: got {given}") from error
            yield key, leaf

    def build(self, flat: Mapping[str, Any]) -> Any:
        """The nested value whose leaves are `flat`; the inverse of `read`.

        Raises:
            SpaceError: If a leaf is missing.
        """
        try:
            return self._assemble(flat)
        except KeyError as error:
            raise SpaceError(
                f"the leaf {error.args[0]!r} is missing: got {sorted(flat)}, "
                f"expected {list(self.leaves)}"
            ) from error


def flat_spaces(space: spaces.Space[Any]) -> dict[str, spaces.Space[Any]]:
    """The leaves of a space by joined key; a lone leaf has the key `""`.

    Raises:
        SpaceError: If the space cannot be flattened, see `FlatView`.
    """
    return FlatView(space).leaves


def flat_space(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """The space itself when it is a leaf, else one flat `Dict` of its leaves.

    Raises:
        SpaceError: If the space cannot be flattened, see `FlatView`.
    """
    view = FlatView(space)
    # An OrderedDict keeps its order in a Dict space; a plain dict would be sorted, and "10" put
    # before "2".
    return space if view.is_single else spaces.Dict(OrderedDict(view.leaves))


def flatten_value(space: spaces.Space[Any] | FlatView, value: Any) -> Any:
    """A value of `space` as a flat dict of leaves, or as it is when the space is a leaf.

    Pass a `FlatView` where this is called often.

    Raises:
        SpaceError: If a leaf is missing.
    """
    view = space if isinstance(space, FlatView) else FlatView(space)
    return value if view.is_single else dict(view.read(value))


def unflatten_value(space: spaces.Space[Any] | FlatView, flat: Any) -> Any:
    """The nested value of `space` that `flatten_value` turned into `flat`.

    Raises:
        SpaceError: If a leaf is missing.
    """
    view = space if isinstance(space, FlatView) else FlatView(space)
    return flat if view.is_single else view.build(flat)


def join_keys(path: tuple[Any, ...]) -> str:
    """The joined key of a path; that of a lone leaf is empty."""
    return "/".join(map(str, path))


def walk_leaves(
    space: spaces.Space[Any], path: tuple[Any, ...]
) -> Iterator[tuple[tuple[Any, ...], spaces.Space[Any]]]:
    """Path and space of every leaf below `space`, in its order."""
    if isinstance(space, spaces.Dict):
        for name, child in space.spaces.items():
            yield from walk_leaves(child, (*path, name))
    elif isinstance(space, spaces.Tuple):
        for index, child in enumerate(space.spaces):
            yield from walk_leaves(child, (*path, index))
    elif isinstance(space, LEAF_TYPES):
        yield path, space
    else:
        left_out = LEFT_OUT if path else ""
        where = f"the space at {join_keys(path)!r}" if path else "the space"
        raise SpaceError(
            f"{where} is {space}: expected Box, Discrete, MultiDiscrete or MultiBinary, alone or "
            f"in Dict and Tuple; {left_out}convert it by a wrapper of your own: "
            "env.wrappers=[{_target_: my_module.MyWrapper}]"
        )


def assembler(
    space: spaces.Space[Any], path: tuple[Any, ...]
) -> Callable[[Mapping[str, Any]], Any]:
    """A function that builds a value of `space` from leaves under the joined keys below `path`."""
    if isinstance(space, spaces.Dict):
        parts = {name: assembler(sub, (*path, name)) for name, sub in space.spaces.items()}
        return partial(_dict_of, parts)
    if isinstance(space, spaces.Tuple):
        entries = [assembler(sub, (*path, i)) for i, sub in enumerate(space.spaces)]
        return partial(_tuple_of, entries)
    return itemgetter(join_keys(path))


def _dict_of(parts: Mapping[str, Callable[[Any], Any]], flat: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part(flat) for name, part in parts.items()}


def _tuple_of(parts: Sequence[Callable[[Any], Any]], flat: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(part(flat) for part in parts)


SMALLEST_SIDE = 7
"""Pixels that each side of an image has at least: MiniGrid's view."""

SMALLEST_GREY_SIDE = 16
"""The same where there are no channels: less is a table."""


class ImageLayout(NamedTuple):
    """Meaning of the dimensions of an image."""

    channels: int
    """Channels of all frames together."""
    height: int
    width: int
    channels_last: bool
    """Whether the last dimension holds channels; false without channels."""


def is_image(space: spaces.Space[Any]) -> bool:
    """Whether observations are pictures, which convolutions can read.

    Such a space is a Box of bytes (uint8) with

    - three dimensions, height and width at least 7, whatever its bounds: (7, 7, 3), (4, 84, 84);
    - four dimensions: a stack of such pictures, (4, 96, 96, 3); or
    - two dimensions of at least 16 and the bounds 0 and 255: (84, 84).

    All else is read as numbers: bytes in one dimension (the memory of an Atari console), tables
    with few rows or columns or their own bounds, and whatever is not uint8.
    """
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8:
        return False
    if len(space.shape) == 2:
        has_all_bytes = bool(np.all(space.low == 0) and np.all(space.high == 255))
        return has_all_bytes and min(space.shape) >= SMALLEST_GREY_SIDE
    if len(space.shape) in (3, 4):
        layout = image_layout(space)
        return min(layout.height, layout.width) >= SMALLEST_SIDE
    return False


def image_layout(space: spaces.Box) -> ImageLayout:
    """Decide which dimension of an image holds the channels: the first one or the last one.

    If the remaining two are equal for one of the choices only, it is that one: (7, 7, 20) has 20
    channels. Otherwise it is the smaller one, and the last one of equals. A first dimension of four
    counts frames.

    Args:
        space: A Box with two (no channels), three or four (frames) dimensions.
    """
    if len(space.shape) == 2:
        return ImageLayout(1, *space.shape, channels_last=False)
    *stack, first, middle, last = space.shape
    frames = stack[0] if stack else 1
    channels_last = last <= first
    if (first == middle) != (middle == last):
        channels_last = first == middle
    if channels_last:
        return ImageLayout(frames * last, first, middle, channels_last=True)
    return ImageLayout(frames * first, middle, last, channels_last=False)


def holds_images(space: spaces.Space[Any]) -> bool:
    """Whether a flat space is an image, or a Dict with an image in it."""
    return any(is_image(leaf) for leaf in flat_spaces(space).values())


def is_mask_key(key: str) -> bool:
    """Whether a key of a flat observation is the mask, or a part of it."""
    return key == MASK_KEY or key.startswith(f"{MASK_KEY}/")


def choice_sizes(space: spaces.Space[Any]) -> tuple[int, ...]:
    """Number of actions of each choice of an action leaf; empty if it cannot be masked."""
    if isinstance(space, spaces.Discrete):
        return (int(space.n),)
    if isinstance(space, spaces.MultiDiscrete):
        return tuple(int(n) for n in np.ravel(space.nvec))
    return ()


MAX_CATEGORIES = 2**24
"""Most categories of a leaf: networks have an input, or an output, for each of them."""


def check_categories(name: str, space: spaces.Space[Any]) -> None:
    """Raise SpaceError if a leaf has so many categories that no network can be built for it."""
    count = sum(choice_sizes(space))
    if count > MAX_CATEGORIES:
        raise SpaceError(
            f"{name} {space} has {count:,} categories, at most {MAX_CATEGORIES:,} are supported: "
            "describe it by numbers (Box), or by digits (MultiDiscrete)"
        )


MAX_ENTRIES = 8
"""Entries of a MultiDiscrete space that are written out."""


def check_same_spaces(
    key: str,
    problem: str,
    found: Sequence[spaces.Space[Any]],
    wanted: Sequence[spaces.Space[Any]],
    value: Any = ...,
) -> None:
    """Refuse a setting that brings other spaces than the rest of a run has.

    Args:
        key: Dotted name of the setting.
        problem: The fault, with the places of three words in braces: `{kind}` (observation or
            action), `{found}` and `{wanted}` (the spaces in short), such as `"its policy has the
            {kind} space {found}, the environment has {wanted}"`.
        found: Observation and action space that the setting brings.
        wanted: Observation and action space of the rest.
        value: Value of the setting; left out of the message when it is not passed.

    Raises:
        ConfigError: If they differ.
        SpaceError: If they differ and one cannot be described, see `FlatView`.
    """
    for kind, one, other in zip(("observation", "action"), found, wanted, strict=True):
        if one != other:
            first, second = space_difference(one, other)
            text = problem.format(kind=kind, found=first, wanted=second)
            raise ConfigError(key, text, value)


def space_difference(one: spaces.Space[Any], other: spaces.Space[Any]) -> tuple[str, str]:
    """Two spaces that are not equal in a few words each: of nested ones, the first other leaf.

    Bounds are named only where nothing else differs, and then those of the first such entry.

    Raises:
        SpaceError: If one cannot be described, see `FlatView`.
    """
    leaves, others = flat_spaces(one), flat_spaces(other)
    if type(one) is not type(other) and not (leaves.keys() == others.keys() == {""}):
        return _outline(one), _outline(other)
    for key in {**leaves, **others}:
        leaf, counterpart = leaves.get(key), others.get(key)
        if leaf == counterpart:
            continue
        texts = _leaf(leaf, counterpart), _leaf(counterpart, leaf)
        return texts if not key else (f"{texts[0]} at {key!r}", f"{texts[1]} at {key!r}")
    return f"{type(one).__name__} nested in one way", f"{type(other).__name__} nested in another"


def _outline(space: spaces.Space[Any]) -> str:
    """A space in short, with the number of its leaves."""
    leaves = flat_spaces(space)
    if leaves.keys() == {""}:
        return _leaf(space, None)
    return f"{type(space).__name__} ({len(leaves)} {'leaf' if len(leaves) == 1 else 'leaves'})"


def _leaf(leaf: spaces.Space[Any] | None, other: spaces.Space[Any] | None) -> str:
    """A leaf in short, with what distinguishes it from another one.

    Bounds and choices are those of the first entry with others, where all else is equal.
    """
    if leaf is None:
        return "nothing"
    if isinstance(leaf, spaces.Box):
        text = f"Box(shape={list(leaf.shape)}, dtype={leaf.dtype})"
        is_like = isinstance(other, spaces.Box) and leaf.dtype == other.dtype
        numbers, entry = ("low", "high"), " with bounds [{}, {}]"
    elif isinstance(leaf, spaces.MultiDiscrete):
        if leaf.nvec.size <= MAX_ENTRIES:
            return f"MultiDiscrete(nvec={leaf.nvec.tolist()}, start={leaf.start.tolist()})"
        text = f"MultiDiscrete(shape={list(leaf.shape)})"
        is_like = isinstance(other, spaces.MultiDiscrete)
        numbers, entry = ("nvec", "start"), " with {} choices from {}"
    else:
        return str(leaf)
    if other is None or not is_like or leaf.shape != other.shape:
        return text
    ours, theirs = ([getattr(space, name) for name in numbers] for space in (leaf, other))
    differs = np.logical_or(*(own != their for own, their in zip(ours, theirs, strict=True)))
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(differs)), differs.shape))
    place = f" at {list(index)}" if index else ""
    return text + entry.format(*(array[index] for array in ours)) + place


MAX_NUMBERS = 1 << 26
"""Most numbers that a value of one leaf may have: an image of 4,096 x 4,096 x 4."""

MAX_LEVELS = 64


def space_to_dict(space: spaces.Space[Any]) -> dict[str, Any]:
    """A space as a mapping of plain values, which JSON keeps.

    A bound that is the same for all entries of a Box is one number: an image has thousands.

    Raises:
        SpaceError: If the space is of a kind that has no such form, or has keys that are neither
            strings nor integers.
    """
    if isinstance(space, spaces.Box):
        return {
            "type": "Box",
            "low": _compact(space.low),
            "high": _compact(space.high),
            "shape": list(space.shape),
            "dtype": str(space.dtype),
        }
    if isinstance(space, spaces.Discrete):
        return {
            "type": "Discrete",
            "n": int(space.n),
            "start": int(space.start),
            "dtype": str(space.dtype),
        }
    if isinstance(space, spaces.MultiDiscrete):
        return {
            "type": "MultiDiscrete",
            "nvec": space.nvec.tolist(),
            "start": space.start.tolist(),
            "dtype": str(space.dtype),
        }
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else [*space.shape]}
    if isinstance(space, spaces.Dict):
        parts = [[_checked_key(key), space_to_dict(part)] for key, part in space.spaces.items()]
        return {"type": "Dict", "spaces": parts}
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "spaces": [space_to_dict(part) for part in space.spaces]}
    raise SpaceError(f"{space} cannot be saved: expected Box, Discrete, Multi*, Dict or Tuple")


def _compact(bound: Array) -> Any:
    """Nested lists, or one number where all entries are equal."""
    values = np.unique(bound)
    return values.item() if values.size == 1 else bound.tolist()


def _checked_key(key: Any) -> str | int:
    if isinstance(key, str | int):
        return key
    raise SpaceError(f"a Dict with the key {key!r} cannot be saved: expected strings as keys")


def space_from_dict(data: dict[str, Any]) -> spaces.Space[Any]:
    """The space that `space_to_dict` described.

    Raises:
        SpaceError: If the description is of an unknown type, damaged, or that of a space which no
            memory holds.
    """
    try:
        return _space(data, MAX_LEVELS)
    except SpaceError:
        raise
    except Exception as error:  # whatever a description of unknown origin leads to
        raise SpaceError(f"not the description of a space: {error!r}") from error


def _space(data: dict[str, Any], levels: int) -> spaces.Space[Any]:
    """The space of a description that may be nested `levels` deep."""
    if not levels:
        raise SpaceError(f"spaces are nested deeper than {MAX_LEVELS} levels")
    kind = data["type"]
    if kind == "Box":
        dtype, shape = np.dtype(data["dtype"]), _checked_shape(data["shape"])
        low, high = (np.full(shape, np.array(data[k], dtype)) for k in ("low", "high"))
        return spaces.Box(low, high, shape, dtype.type)
    if kind == "Discrete":
        dtype = np.dtype(data["dtype"])
        # Older versions of Gymnasium have no such argument.
        settings = {} if dtype == np.int64 else {"dtype": dtype.type}
        return spaces.Discrete(data["n"], start=data["start"], **settings)
    if kind == "MultiDiscrete":
        dtype = np.dtype(data["dtype"])
        nvec, start = (np.array(data[k], dtype) for k in ("nvec", "start"))
        return spaces.MultiDiscrete(nvec, dtype=dtype.type, start=start)
    if kind == "MultiBinary":
        n = data["n"]
        _checked_shape(n if isinstance(n, list) else [n])
        return spaces.MultiBinary(n)
    if kind == "Dict":
        return spaces.Dict([(key, _space(part, levels - 1)) for key, part in data["spaces"]])
    if kind == "Tuple":
        return spaces.Tuple([_space(part, levels - 1) for part in data["spaces"]])
    raise SpaceError(f"unknown type of space {kind!r}")


def _checked_shape(shape: list[int]) -> tuple[int, ...]:
    """The shape, before memory is taken for it."""
    if (count := math.prod(shape)) > MAX_NUMBERS:
        raise SpaceError(f"a space has {count:.3g} numbers: at most {MAX_NUMBERS} can be read")
    return tuple(shape)
