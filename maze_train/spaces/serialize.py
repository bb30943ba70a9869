"""Spaces as plain data: a saved policy knows what it acts on without unpickling anything."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from maze_train.errors import SpaceError

__all__ = ["space_from_dict", "space_to_dict"]


def space_to_dict(space: spaces.Space[Any]) -> dict[str, Any]:
    """A space as a mapping of plain values.

    Raises:
        SpaceError: If the space is of a kind that has no such form.
    """
    if isinstance(space, spaces.Box):
        return {
            "type": "Box",
            "low": space.low.tolist(),
            "high": space.high.tolist(),
            "shape": list(space.shape),
            "dtype": str(space.dtype),
        }
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {
            "type": "MultiDiscrete",
            "nvec": space.nvec.tolist(),
            "start": space.start.tolist(),
            "dtype": str(space.dtype),
        }
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "n": list(space.shape)}
    if isinstance(space, spaces.Dict):
        parts = {key: space_to_dict(part) for key, part in space.spaces.items()}
        return {"type": "Dict", "spaces": parts}
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "spaces": [space_to_dict(part) for part in space.spaces]}
    raise SpaceError(f"{space} can not be saved: expected Box, Discrete, Multi*, Dict or Tuple")


def space_from_dict(data: dict[str, Any]) -> spaces.Space[Any]:
    """The space that `space_to_dict` described.

    Raises:
        SpaceError: If the description is of an unknown type.
    """
    kind = data["type"]
    if kind == "Box":
        dtype = np.dtype(data["dtype"])
        low, high = (np.array(data[k], dtype=dtype) for k in ("low", "high"))
        shape = tuple(data["shape"])
        return spaces.Box(low.reshape(shape), high.reshape(shape), shape, dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(data["n"], start=data["start"])
    if kind == "MultiDiscrete":
        dtype = np.dtype(data["dtype"])
        return spaces.MultiDiscrete(data["nvec"], dtype=dtype.type, start=data["start"])
    if kind == "MultiBinary":
        shape = tuple(data["n"])
        return spaces.MultiBinary(shape if len(shape) != 1 else shape[0])
    if kind == "Dict":
        return spaces.Dict([(key, space_from_dict(part)) for key, part in data["spaces"].items()])
    if kind == "Tuple":
        return spaces.Tuple([space_from_dict(part) for part in data["spaces"]])
    raise SpaceError(f"unknown type of space {kind!r} in a saved policy")
