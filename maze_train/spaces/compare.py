"""Comparison of the spaces of two places, in a few words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from maze_train.errors import ConfigError
from maze_train.spaces.describe import flat_spaces

if TYPE_CHECKING:
    from collections.abc import Sequence


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
        SpaceError: If they differ and one can not be described, see `FlatView`.
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
        SpaceError: If one can not be described, see `FlatView`.
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
