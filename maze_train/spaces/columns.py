"""Columns of data: shape and dtype of each array, and how the arrays share a block of memory."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from gymnasium import spaces

if TYPE_CHECKING:
    from typing import Self

    from maze_train.core.types import Array

CACHE_LINE = 64

DTYPES = {
    **{name: name for name in ("float32", "uint8", "int8", "int16", "int32", "int64", "bool")},
    "uint16": "int32",
    "uint32": "int64",
}
"""Dtype in which leaves of a dtype are stored."""

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
    """Shape and dtype of arrays by name: `obs`, or `obs/goal` for a leaf of a Dict space.

    The columns alone determine where each array lies in a block of memory, so processes that build
    the same columns agree on it. Every array begins on its own cache line, so that processes do not
    contend for each other's flags.
    """

    @classmethod
    def of(
        cls, leaves: Mapping[str, spaces.Space[Any]], name: str = "", *, stored: bool = True
    ) -> Self:
        """Return the columns of values of a space.

        Args:
            leaves: Leaves of the space by key, see `maze_train.spaces.describe.flat_spaces`.
            name: Name of the values; empty: the columns are named by the keys of the leaves.
            stored: Whether to use the dtypes that training stores; otherwise those of the space.
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
        """Return the columns of arrays of these shapes and dtypes; `name` as in `of`."""
        return cls({column_name(name, key): Spec(x.shape, x.dtype) for key, x in arrays.items()})

    def batched(self, *sizes: int) -> Self:
        """Return these columns with leading dimensions."""
        return type(self)({k: Spec((*sizes, *s.shape), s.dtype) for k, s in self.items()})

    @property
    def nbytes(self) -> int:
        """Bytes of a block of memory that holds all arrays."""
        return sum(padded(spec.nbytes) for spec in self.values())

    def arrays(self, memory: Any = None, offset: int = 0) -> dict[str, Array]:
        """Return the arrays by name.

        Args:
            memory: Writable buffer that they are views of; None: new memory, filled with zeros.
            offset: First byte of the arrays in `memory`.
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
    """Return the name of the column of a leaf; the key of a lone leaf is empty."""
    return f"{name}/{key}" if name and key else name or key


def leaves_of(columns: Mapping[str, T], name: str) -> dict[str, T]:
    """Return the columns with a name, keyed by leaf; a lone leaf has the key `""`."""
    if name in columns:
        return {"": columns[name]}
    start = f"{name}/"
    return {key[len(start) :]: x for key, x in columns.items() if key.startswith(start)}


def padded(nbytes: int, unit: int = CACHE_LINE) -> int:
    """Return `nbytes` rounded up to whole units."""
    return -(-nbytes // unit) * unit


def storage_dtype(space: spaces.Space[Any]) -> np.dtype[Any]:
    """The dtype in which observations of a leaf space are stored.

    Integers, bytes of images among them, and bool are kept as they are, or in the next larger type
    that PyTorch knows (uint16 in int32, uint32 in int64). float16 becomes float32. Two types are
    rounded to float32, which is what networks compute with: float64, and uint64 with an upper bound
    beyond that of int64.
    """
    dtype = np.dtype(space.dtype if space.dtype is not None else np.float32)
    if dtype.name in DTYPES:
        return np.dtype(DTYPES[dtype.name])
    if dtype.kind != "u":
        return np.dtype(np.float32)
    exceeds = isinstance(space, spaces.Box) and (space.high > np.iinfo(np.int64).max).any()
    return np.dtype(np.float32 if exceeds else np.int64)
