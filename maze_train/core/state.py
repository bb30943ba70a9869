"""Large parts of a state that checkpoints write only when they change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StatePart:
    """Large part of a state that is read lazily, and written again only if it changed.

    Used as a leaf of a `state_dict`; `load_state_dict` receives it in the same place.
    """

    version: str
    """Changes with the content: the same version at the same place implies the same content."""

    read: Callable[[], dict[str, Any]]
    """Returns the content: tensors, arrays and plain values by name. Must be called before the
    owner changes."""
