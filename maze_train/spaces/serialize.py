"""Spaces as plain data: a saved policy knows what it acts on without unpickling anything."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from maze_train.errors import SpaceError

if TYPE_CHECKING:
    from maze_train.types import Array


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
    raise SpaceError(f"{space} can not be saved: expected Box, Discrete, Multi*, Dict or Tuple")


def _compact(bound: Array) -> Any:
    """Nested lists, or one number where all entries are equal."""
    values = np.unique(bound)
    return values.item() if values.size == 1 else bound.tolist()


def _checked_key(key: Any) -> str | int:
    if isinstance(key, str | int):
        return key
    raise SpaceError(f"a Dict with the key {key!r} can not be saved: expected strings as keys")


def space_from_dict(data: dict[str, Any]) -> spaces.Space[Any]:
    """The space that `space_to_dict` described, now or in earlier versions.

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
        dtype = np.dtype(data.get("dtype", np.int64))
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
        parts = data["spaces"]
        pairs = parts.items() if isinstance(parts, dict) else parts
        return spaces.Dict([(key, _space(part, levels - 1)) for key, part in pairs])
    if kind == "Tuple":
        return spaces.Tuple([_space(part, levels - 1) for part in data["spaces"]])
    raise SpaceError(f"unknown type of space {kind!r}")


def _checked_shape(shape: list[int]) -> tuple[int, ...]:
    """The shape, before memory is taken for it."""
    if (count := math.prod(shape)) > MAX_NUMBERS:
        raise SpaceError(f"a space has {count:.3g} numbers: at most {MAX_NUMBERS} can be read")
    return tuple(shape)
