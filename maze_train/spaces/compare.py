"""Comparison of the spaces of two places, in a few words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from maze_train.errors import ConfigError
from maze_train.spaces.describe import flat_spaces

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["check_same_spaces", "space_difference"]

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
    """A leaf in short, with what distinguishes it from another one."""
    if leaf is None:
        return "nothing"
    if isinstance(leaf, spaces.Box):
        text = f"Box(shape={list(leaf.shape)}, dtype={leaf.dtype})"
        return text + _bounds(leaf, other) if isinstance(other, spaces.Box) else text
    if isinstance(leaf, spaces.MultiDiscrete):
        if leaf.nvec.size <= MAX_ENTRIES:
            return f"MultiDiscrete(nvec={leaf.nvec.tolist()}, start={leaf.start.tolist()})"
        return f"MultiDiscrete(shape={list(leaf.shape)})" + _choices(leaf, other)
    return str(leaf)


def _bounds(leaf: spaces.Box, other: spaces.Box) -> str:
    """The bounds of the first entry whose bounds are others, if all else is equal."""
    if leaf.shape != other.shape or leaf.dtype != other.dtype:
        return ""
    index = _first((leaf.low != other.low) | (leaf.high != other.high))
    return f" with bounds [{leaf.low[index]}, {leaf.high[index]}]{_place(index)}"


def _choices(leaf: spaces.MultiDiscrete, other: spaces.Space[Any] | None) -> str:
    """The choices of the first entry with others, if the shapes are equal."""
    if not isinstance(other, spaces.MultiDiscrete) or leaf.shape != other.shape:
        return ""
    index = _first((leaf.nvec != other.nvec) | (leaf.start != other.start))
    return f" with {leaf.nvec[index]} choices from {leaf.start[index]}{_place(index)}"


def _first(differs: Any) -> tuple[int, ...]:
    """Index of the first entry that is true."""
    flat = int(np.argmax(differs))
    return tuple(int(i) for i in np.unravel_index(flat, np.shape(differs)))


def _place(index: tuple[int, ...]) -> str:
    return f" at {list(index)}" if index else ""
