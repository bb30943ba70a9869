"""Rows of arrays and infos that hold one row per environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from maze_train.envs.buffers import Array

    Mask = npt.NDArray[np.bool_]

__all__ = ["column_of", "masked", "reordered"]


def column_of(space: Any, n: int) -> Array:
    """A zeroed array for n values of a leaf."""
    return np.zeros((n, *(space.shape or ())), space.dtype)


def reordered(arrays: Mapping[str, Any], order: Array) -> dict[str, Any]:
    """The values, arrays with one row per environment in `order`."""
    return {
        key: value[order] if isinstance(value, np.ndarray) and len(value) == len(order) else value
        for key, value in arrays.items()
    }


def masked(infos: Mapping[str, Any], rows: Mask) -> dict[str, Any]:
    """Infos of a step, under masks that leave only these rows."""
    result: dict[str, Any] = {}
    for key, value in infos.items():
        if not key.startswith("_"):
            result[key] = value
            result[f"_{key}"] = rows & infos.get(f"_{key}", True)
    return result
