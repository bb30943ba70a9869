"""Fields of configuration dataclasses and their keys in YAML."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

from maze_train.targets import TARGET

__all__ = ["TUPLE", "dotted_name", "field_of_key", "hints_of", "join", "key_of_field"]

TUPLE = "_tuple_"
"""The only key of a mapping that stands for a tuple, which YAML does not have."""


def field_of_key(cls: type) -> dict[str, str]:
    """The fields of a dataclass by their key in YAML: the name, or `_target_` for `target`."""
    return {key_of_field(f.name): f.name for f in fields(cls) if f.init}


def key_of_field(name: str) -> str:
    """The key of a field in YAML."""
    return TARGET if name == "target" else name


def hints_of(cls: type) -> dict[str, Any]:
    """The type hints of a dataclass, evaluated."""
    return get_type_hints(cls)


def dotted_name(cls: Any) -> str:
    """The dotted path of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def join(path: str, key: str) -> str:
    """A dotted key."""
    return f"{path}.{key}" if path else str(key)
