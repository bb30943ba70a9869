"""Flattening, comparison and serialisation of gymnasium spaces.

A nested space is flattened to a mapping from flattened keys to leaves. The entries of a Tuple are
keyed by index, so `Dict(robot=Tuple(Box, Box), goal=Discrete)` has the leaves
`goal, robot/0, robot/1`. A space that is itself a leaf has the single key `""`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from gymnasium import spaces

from maze_train.core.errors import ConfigError, SpaceError

if TYPE_CHECKING:
    from maze_train.core.types import Array


MASK_KEY = "action_mask"
"""Key of a Dict observation that contains the mask of legal actions."""

LEAF_TYPES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
NESTED_TYPES = (spaces.Dict, spaces.Tuple)

OMITTED = (
    "exclude it from observations with env.wrappers=[{_target_: "
    "gymnasium.wrappers.FilterObservation, filter_keys: [<keys to keep>]}], or "
)


class FlatView:
    """Flattens and rebuilds values of one space.

    The paths to the leaves are computed once, and all leaves of one mapping are read together.

    Args:
        space: A Box, Discrete, MultiDiscrete or MultiBinary space, or any nesting of Dict and Tuple
            spaces with such leaves.
        left_out: Joined keys of leaves to skip; values need not contain these leaves.

    Attributes:
        space: The unmodified space.
        leaves: Leaves by flattened key, in the order of the space.
        is_single: Whether the space itself is a leaf, with the key `""`.

    Raises:
        SpaceError: If the space has no leaves, if two leaves have the same flattened key, or if a
            leaf has an unsupported type.
    """

    def __init__(self, space: spaces.Space[Any], left_out: Collection[str] = ()) -> None:
        self.space = space
        self.is_single = not isinstance(space, NESTED_TYPES)
        self.leaves: dict[str, spaces.Space[Any]] = {}
        self._paths: dict[str, tuple[Any, ...]] = {}
        for path, leaf in walk_leaves(space, ()):
            key = join_keys(path)
            if not key and not self.is_single:
                raise SpaceError(f"{space} has an empty key: give it a name")
            if key in left_out:
                continue
            if key in self.leaves:
                raise SpaceError(
                    f"two leaves of {space} have the flattened key {key!r}: rename one"
                )
            self.leaves[key] = leaf
            self._paths[key] = path
        if not self.leaves:
            raise SpaceError(f"{space} has no leaves: expected at least one")
        self._assemble = assembler(space, ())
        self._branches: list[tuple[tuple[Any, ...], Sequence[str], Callable[[Any], Any]]] = []
        for parent, below in groupby(self._paths.items(), lambda item: item[1][:-1]):
            keys, paths = zip(*below, strict=True)
            names = [path[-1] for path in paths if path]
            # `itemgetter` of one name returns a value instead of a tuple.
            get = itemgetter(*names) if len(names) > 1 else partial(_only, names)
            self._branches.append((parent, keys, get))

    def read(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield key and value of every leaf of `value`, in the order of `leaves`.

        Raises:
            SpaceError: If a leaf is missing.
        """
        for parent, keys, get in self._branches:
            branch = value
            try:
                for part in parent:
                    branch = branch[part]
                leaves = get(branch)
            except (KeyError, IndexError, TypeError) as error:
                raise self._missing(value) from error
            yield from zip(keys, leaves, strict=True)

    def _missing(self, value: Any) -> SpaceError:
        """Return the error that names the first missing leaf of `value`."""
        key = ""
        for key, path in self._paths.items():  # noqa: B007 (`key` is used after the loop)
            leaf = value
            try:
                for part in path:
                    leaf = leaf[part]
            except (KeyError, IndexError, TypeError):
                break
        given = sorted(map(str, value)) if isinstance(value, dict) else type(value).__name__
        return SpaceError(f"the leaf {key!r} is missing: got {given}")

    def row(self, columns: Mapping[str, Any], i: int) -> Any:
        """Return a copy of row `i` of the leaf columns as a nested value."""
        return self.build({key: column[i].copy() for key, column in columns.items()})

    def build(self, flat: Mapping[str, Any]) -> Any:
        """Build a nested value from the leaves `flat`; the inverse of `read`.

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
    """Return the leaves of a space by flattened key; a single leaf has the key `""`.

    Raises:
        SpaceError: If the space cannot be flattened, see `FlatView`.
    """
    return FlatView(space).leaves


def flat_space(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the space itself if it is a leaf, else a flat `Dict` of its leaves.

    Raises:
        SpaceError: If the space cannot be flattened, see `FlatView`.
    """
    view = FlatView(space)
    # A Dict space keeps the order of an OrderedDict, but sorts the keys of a plain dict as strings.
    return space if view.is_single else spaces.Dict(OrderedDict(view.leaves))


def flatten_value(space: spaces.Space[Any] | FlatView, value: object) -> Any:
    """Flatten a value of `space` to a dict of leaves; values of leaf spaces are unchanged.

    Pass a `FlatView` in hot loops.

    Raises:
        SpaceError: If a leaf is missing.
    """
    view = space if isinstance(space, FlatView) else FlatView(space)
    return value if view.is_single else dict(view.read(value))


def unflatten_value(space: spaces.Space[Any] | FlatView, flat: Any) -> Any:
    """Rebuild the nested value of `space` from the result of `flatten_value`.

    Raises:
        SpaceError: If a leaf is missing.
    """
    view = space if isinstance(space, FlatView) else FlatView(space)
    return flat if view.is_single else view.build(flat)


def join_keys(path: tuple[Any, ...]) -> str:
    """Join the keys of a path; the key of a single leaf is empty."""
    return "/".join(map(str, path))


def walk_leaves(
    space: spaces.Space[Any], path: tuple[Any, ...]
) -> Iterator[tuple[tuple[Any, ...], spaces.Space[Any]]]:
    """Yield path and space of every leaf below `space`, in order."""
    if isinstance(space, spaces.Dict):
        for name, child in space.spaces.items():
            yield from walk_leaves(child, (*path, name))
    elif isinstance(space, spaces.Tuple):
        for index, child in enumerate(space.spaces):
            yield from walk_leaves(child, (*path, index))
    elif isinstance(space, LEAF_TYPES):
        yield path, space
    else:
        left_out = OMITTED if path else ""
        where = f"the space at {join_keys(path)!r}" if path else "the space"
        raise SpaceError(
            f"{where} is {space}: expected Box, Discrete, MultiDiscrete or MultiBinary, alone or "
            f"in Dict and Tuple; {left_out}convert it with a custom wrapper: "
            "env.wrappers=[{_target_: my_module.MyWrapper}]"
        )


def assembler(
    space: spaces.Space[Any], path: tuple[Any, ...]
) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function that builds a value of `space` from leaves with flattened keys."""
    if isinstance(space, spaces.Dict):
        parts = {name: assembler(sub, (*path, name)) for name, sub in space.spaces.items()}
        return partial(_dict_of, parts)
    if isinstance(space, spaces.Tuple):
        entries = [assembler(sub, (*path, i)) for i, sub in enumerate(space.spaces)]
        return partial(_tuple_of, entries)
    return itemgetter(join_keys(path))


def _only(names: Sequence[Any], branch: Any) -> tuple[object]:
    """Return the only value of a branch as a tuple; if `names` is empty, the branch itself."""
    return (branch[names[0]] if names else branch,)


def _dict_of(parts: Mapping[str, Callable[[Any], Any]], flat: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part(flat) for name, part in parts.items()}


def _tuple_of(parts: Sequence[Callable[[Any], Any]], flat: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(part(flat) for part in parts)


SMALLEST_SIDE = 7
"""Minimum height and width of an image in pixels; MiniGrid observations are 7 x 7."""

SMALLEST_GREY_SIDE = 16
"""Minimum height and width of an image without channels; smaller arrays are treated as tables."""


class ImageLayout(NamedTuple):
    """Meaning of the dimensions of an image."""

    channels: int
    """Number of channels summed over all frames."""
    height: int
    width: int
    channels_last: bool
    """Whether the last dimension contains the channels; False if there is no channel dimension."""


def is_image(space: spaces.Space[Any]) -> bool:
    """Return whether observations are images to be processed by convolutions.

    An image space is a Box of dtype uint8 with

    - three dimensions, height and width at least 7, and any bounds: (7, 7, 3), (4, 84, 84);
    - four dimensions: a stack of such images, (4, 96, 96, 3); or
    - two dimensions of at least 16 with the bounds 0 and 255: (84, 84).

    All other spaces are processed as vectors: one-dimensional bytes (Atari RAM), tables with few
    rows or columns or with different bounds, and all dtypes except uint8.
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
    """Determine which dimension of an image contains the channels: the first or the last.

    If only one of the two candidates implies a square image, this candidate is selected:
    (7, 7, 20) has 20 channels. Otherwise the smaller dimension is selected, or the last dimension
    if both are equal. The first of four dimensions counts frames.

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
    """Return whether a flat space is an image, or a Dict that contains an image."""
    return any(is_image(leaf) for leaf in flat_spaces(space).values())


def is_mask_key(key: str) -> bool:
    """Return whether a key of a flat observation selects the action mask or a leaf of the mask."""
    return key == MASK_KEY or key.startswith(f"{MASK_KEY}/")


def choice_sizes(space: spaces.Space[Any]) -> tuple[int, ...]:
    """Return the number of categories per entry of a Discrete or MultiDiscrete leaf; else `()`."""
    if isinstance(space, spaces.Discrete):
        return (int(space.n),)
    if isinstance(space, spaces.MultiDiscrete):
        return tuple(int(n) for n in np.ravel(space.nvec))
    return ()


MAX_CATEGORIES = 2**24
"""Maximum number of categories of a leaf. Networks have one input or output per category."""


def check_categories(name: str, space: spaces.Space[Any]) -> None:
    """Raise SpaceError if a leaf has too many categories to build a network."""
    count = sum(choice_sizes(space))
    if count > MAX_CATEGORIES:
        raise SpaceError(
            f"{name} {space} has {count:,} categories, at most {MAX_CATEGORIES:,} are supported: "
            "represent it as a Box, or as several digits (MultiDiscrete)"
        )


MAX_ENTRIES = 8
"""Maximum number of entries of a MultiDiscrete space to list in a message."""


def check_same_spaces(
    key: str,
    problem: str,
    found: Sequence[spaces.Space[Any]],
    wanted: Sequence[spaces.Space[Any]],
    value: object = ...,
) -> None:
    """Raise if the spaces of a setting differ from the spaces of the run.

    Args:
        key: Dotted name of the setting.
        problem: Message with the placeholders `{kind}` (observation or action), `{found}` and
            `{wanted}` (short descriptions of the spaces), such as `"its policy has the {kind} space
            {found}, the environment has {wanted}"`.
        found: Observation and action space of the setting.
        wanted: Observation and action space of the run.
        value: Value of the setting; omitted from the message if not given.

    Raises:
        ConfigError: If the spaces differ.
        SpaceError: If the spaces differ and one of the spaces cannot be flattened, see `FlatView`.
    """
    for kind, one, other in zip(("observation", "action"), found, wanted, strict=True):
        if one != other:
            first, second = space_difference(one, other)
            text = problem.format(kind=kind, found=first, wanted=second)
            raise ConfigError(key, text, value)


def space_difference(one: spaces.Space[Any], other: spaces.Space[Any]) -> tuple[str, str]:
    """Return short descriptions of two spaces, or of the first leaf that differs if nested.

    Bounds are included only if nothing else differs, and only for the first entry that differs.

    Raises:
        SpaceError: If a space cannot be flattened, see `FlatView`.
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
    """Return a short description of a space, with the number of leaves."""
    leaves = flat_spaces(space)
    if leaves.keys() == {""}:
        return _leaf(space, None)
    return f"{type(space).__name__} ({len(leaves)} {'leaf' if len(leaves) == 1 else 'leaves'})"


def _leaf(leaf: spaces.Space[Any] | None, other: spaces.Space[Any] | None) -> str:
    """Return a short description of a leaf, including its difference from `other`.

    If only bounds or categories differ, the first entry that differs is included.
    """
    if leaf is None:
        return "nothing"
    if isinstance(leaf, spaces.Box):
        text = f"Box(shape={list(leaf.shape)}, dtype={leaf.dtype})"
        is_like = isinstance(other, spaces.Box) and leaf.dtype == other.dtype
        entry = " with bounds [{}, {}]"
    elif isinstance(leaf, spaces.MultiDiscrete):
        if leaf.nvec.size <= MAX_ENTRIES:
            return f"MultiDiscrete(nvec={leaf.nvec.tolist()}, start={leaf.start.tolist()})"
        text = f"MultiDiscrete(shape={list(leaf.shape)})"
        is_like = isinstance(other, spaces.MultiDiscrete)
        entry = " with {} choices from {}"
    else:
        return str(leaf)
    if not isinstance(other, spaces.Box | spaces.MultiDiscrete) or not is_like:
        return text
    if leaf.shape != other.shape:
        return text
    ours, theirs = _bounds_of(leaf), _bounds_of(other)
    differs = np.logical_or(*(own != their for own, their in zip(ours, theirs, strict=True)))
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(differs)), differs.shape))
    place = f" at {list(index)}" if index else ""
    return text + entry.format(*(array[index] for array in ours)) + place


def _bounds_of(leaf: spaces.Box | spaces.MultiDiscrete) -> tuple[Array, Array]:
    """Return the bounds of a Box, or the numbers and first values of MultiDiscrete categories."""
    return (leaf.low, leaf.high) if isinstance(leaf, spaces.Box) else (leaf.nvec, leaf.start)


MAX_NUMBERS = 1 << 26
"""Maximum number of elements of a leaf (an image of 4,096 x 4,096 x 4)."""

MAX_LEVELS = 64


def space_to_dict(space: spaces.Space[Any]) -> dict[str, Any]:
    """Serialise a space to plain JSON values.

    If all entries of a Box bound are equal, the bound is stored as one number, which keeps image
    spaces small. Infinite bounds are stored as `"inf"` and `"-inf"`, since JSON has no infinity.

    Raises:
        SpaceError: If the type of the space is not supported, or keys are neither strings nor
            integers.
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


def _compact(bound: Array) -> object:
    """Return nested lists, or a single value if all entries are equal."""
    values = np.unique(bound)
    entries = bound.astype(object)
    entries[np.isinf(bound)] = bound[np.isinf(bound)].astype(str)
    return entries.flat[0] if values.size == 1 else entries.tolist()


def _checked_key(key: object) -> str | int:
    if isinstance(key, str | int):
        return key
    raise SpaceError(f"a Dict with the key {key!r} cannot be saved: expected strings as keys")


def space_from_dict(data: dict[str, Any]) -> spaces.Space[Any]:
    """Rebuild a space from the result of `space_to_dict`.

    Raises:
        SpaceError: If the description has an unknown type, is damaged, or describes a space that is
            too large.
    """
    try:
        return _space(data, MAX_LEVELS)
    except SpaceError:
        raise
    except Exception as error:  # The description may be untrusted.
        raise SpaceError(f"not a valid description of a space: {error!r}") from error


def _space(data: dict[str, Any], levels: int) -> spaces.Space[Any]:
    """Build a space from a description nested at most `levels` deep."""
    if not levels:
        raise SpaceError(f"spaces are nested deeper than {MAX_LEVELS} levels")
    kind = data["type"]
    if kind == "Box":
        dtype, shape = np.dtype(data["dtype"]), _checked_shape(data["shape"])
        low, high = (np.full(shape, np.array(data[k], dtype)) for k in ("low", "high"))
        return spaces.Box(low, high, shape, dtype.type)
    if kind == "Discrete":
        dtype = np.dtype(data["dtype"])
        # Older versions of Gymnasium do not have this argument.
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
    """Return the shape if it is not too large, before memory is allocated."""
    if (count := math.prod(shape)) > MAX_NUMBERS:
        raise SpaceError(f"a space has {count:.3g} elements; at most {MAX_NUMBERS} are supported")
    return tuple(shape)
