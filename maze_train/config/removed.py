"""Settings of earlier versions that no longer exist."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from maze_train.core.conversion import join
from maze_train.core.errors import ConfigError

ANY: Final = object()
"""Default of a removed setting whose value is always ignored."""


class Removed(NamedTuple):
    """A removed setting."""

    default: object
    """Value with which the current version gives the same results."""

    remedy: str
    """What to do instead of other values, as in the changelog."""


REMOVED: Mapping[str, Removed] = MappingProxyType(
    {
        "runner.check_repeatability": Removed(ANY, "use maze-run check"),
        "learner_group.queue_size": Removed(0, "learners update between batches"),
        "learner_group.drop_when_full": Removed(False, "learners update between batches"),
        "evaluation.asynchronous": Removed(False, "evaluations take place between two updates"),
    }
)
"""Removed settings of all commands by dotted name (`model.x` also means `policies.<id>.model.x`).
Loading a policy ignores them. Starting and resuming a run raise an error for values other than the
default."""


def without_removed(
    values: Mapping[str, Any], path: str = ""
) -> tuple[dict[str, Any], dict[str, ConfigError | None]]:
    """Return nested settings without removed ones.

    Args:
        values: Nested settings; not modified.
        path: Dotted name of the section.

    Returns:
        The settings, and for each removed setting the error for its value (None for the default).
    """
    kept: dict[str, Any] = {}
    errors: dict[str, ConfigError | None] = {}
    for key, value in values.items():
        name = join(path, key)
        owner, model, rest = name.partition(".model.")
        removed = REMOVED.get(f"model.{rest}" if model and owner[:9] == "policies." else name)
        if removed is not None:
            is_default = removed.default is ANY or value == removed.default
            errors[name] = (
                None if is_default else ConfigError(name, f"removed; {removed.remedy}", value)
            )
        elif isinstance(value, Mapping):
            kept[key], below = without_removed(value, name)
            errors |= below
        else:
            kept[key] = value
    return kept, errors


def check_removed(errors: Mapping[str, ConfigError | None]) -> None:
    """Raise the first error of `without_removed`, if any."""
    for error in errors.values():
        if error is not None:
            raise error
