"""Large pieces of a state that checkpoints write once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StatePart:
    """A large piece of a state, asked for when it is written, and not again unless it changed.

    A leaf of a `state_dict`; `load_state_dict` gets one in the same place.
    """

    version: str
    """Changes whenever the content does: one place in a state with one version is one content."""

    read: Callable[[], dict[str, Any]]
    """Gives the content: tensors, arrays and plain values by name. To be called before the owner
    changes."""
