"""Large parts of states, which are written only after changes, and copies of plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from maze_train.core.errors import EnvError


@dataclass(frozen=True)
class StatePart:
    """Large part of a state, which is read lazily, and written only after changes.

    Used as a leaf of a `state_dict`; `load_state_dict` receives the part under the same key.
    """

    version: str
    """Version of the content. Equal versions at the same path imply equal content."""

    read: Callable[[], dict[str, Any]]
    """Returns the content: tensors, arrays and plain values, keyed by name. Must be called before
    the object that created the part changes."""


def plain_copy(value: Any, path: str) -> Any:
    """Return a deep copy of scalars, lists, tuples, dicts with str keys, and numeric arrays.

    Args:
        value: The value to copy.
        path: Name in messages.

    Raises:
        EnvError: If the value contains other types. The message contains the path.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        return value.copy()
    if type(value) in (list, tuple):
        return type(value)(plain_copy(part, f"{path}[{i}]") for i, part in enumerate(value))
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: plain_copy(part, f"{path}[{key!r}]") for key, part in value.items()}
    raise EnvError(
        f"{path} is {type(value).__name__} {str(value)[:80]!r}: expected None, bool, int, float, "
        "str, lists, dicts with str keys, or numpy arrays of numbers"
    )
