"""Data columns: shapes and dtypes of arrays, and their layout in a memory block."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from gymnasium import spaces

if TYPE_CHECKING:
    from typing import Self

    from maze_train.core.types import Array, Buffer

CACHE_LINE = 64

DTYPES = {
    **{np.dtype(x): np.dtype(x) for x in ("float32", "uint8", "int8", "int16", "int32", "int64")},
    np.dtype("bool"): np.dtype("bool"),
    np.dtype("uint16"): np.dtype("int32"),
    np.dtype("uint32"): np.dtype("int64"),
}
"""Storage dtype of observation leaves by the dtype of their space."""

T = TypeVar("T")


class Spec(NamedTuple):
    """Shape and dtype of one array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return prod(self.shape) * self.dtype.itemsize


class Columns(dict[str, Spec]):
    """Shapes and dtypes of arrays, keyed by name: `obs`, or `obs/goal` for a leaf of a Dict space.

    The memory layout depends only on the columns, so processes with the same columns use the same
    layout. Every array starts on a new cache line, so processes that write different arrays do not
    share cache lines.
    """

    @classmethod
    def of(
        cls, leaves: Mapping[str, spaces.Space[Any]], name: str = "", *, stored: bool = True
    ) -> Self:
        """Return the columns for values of a space.

        Args:
            leaves: Leaves of the space by key, see `maze_train.spaces.describe.flat_spaces`.
            name: Name of the values; if empty, the columns are named by the keys of the leaves.
            stored: Whether to use the storage dtypes; if False, the dtypes of the space are used.
        """
        return cls(
            {
                column_name(name, key): Spec(
                    tuple(leaf.shape or ()),
                    storage_dtype(leaf) if stored else np.dtype(leaf.dtype),
                )
                for key, leaf in leaves.items()
            }
        )

    @classmethod
    def like(cls, arrays: Mapping[str, Array], name: str = "") -> Self:
        """Return the columns for existing arrays; `name` as in `of`."""
        return cls({column_name(name, key): Spec(x.shape, x.dtype) for key, x in arrays.items()})

    def batched(self, *sizes: int) -> Self:
        """Return a copy of the columns with additional leading dimensions."""
        return type(self)({k: Spec((*sizes, *s.shape), s.dtype) for k, s in self.items()})

    @property
    def nbytes(self) -> int:
        """Bytes of a memory block for all arrays."""
        return sum(padded(spec.nbytes) for spec in self.values())

    def arrays(self, memory: Buffer | None = None, offset: int = 0) -> dict[str, Array]:
        """Return the arrays, keyed by name.

        Args:
            memory: Writable buffer to create views of; None: new memory filled with zeros.
            offset: Offset in `memory` of the first array, in bytes.
        """
        found: dict[str, Array] = {}
        for name, spec in self.items():
            if memory is None:
                found[name] = np.zeros(spec.shape, spec.dtype)
            else:
                found[name] = np.ndarray(spec.shape, spec.dtype, memory, offset)
            offset += padded(spec.nbytes)
        return found


def column_name(name: str, key: str) -> str:
    """Return the column name of a leaf; the key of a single leaf is empty."""
    return f"{name}/{key}" if name and key else name or key


def leaves_of(columns: Mapping[str, T], name: str) -> dict[str, T]:
    """Return the columns with a given name, keyed by leaf; a single leaf has the key `""`."""
    if name in columns:
        return {"": columns[name]}
    start = f"{name}/"
    return {key[len(start) :]: x for key, x in columns.items() if key.startswith(start)}


def padded(nbytes: int, unit: int = CACHE_LINE) -> int:
    """Return `nbytes` rounded up to a multiple of `unit`."""
    return -(-nbytes // unit) * unit


def storage_dtype(space: spaces.Space[Any]) -> np.dtype[Any]:
    """Return the storage dtype for observations of a leaf space.

    Integer and bool dtypes, including uint8 images, are kept, or widened to the next dtype that
    PyTorch supports (uint16 to int32, uint32 to int64). Floats are stored as float32, the dtype of
    the networks. uint64 is also stored as float32 if the upper bound exceeds the int64 range.
    """
    dtype = np.dtype(space.dtype if space.dtype is not None else np.float32).newbyteorder("=")
    if dtype in DTYPES:
        return DTYPES[dtype]
    if dtype.kind != "u":
        return np.dtype(np.float32)
    exceeds = isinstance(space, spaces.Box) and (space.high > np.iinfo(np.int64).max).any()
    return np.dtype(np.float32 if exceeds else np.int64)
