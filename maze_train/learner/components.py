"""Components of a learner's state: selection, merging and files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from maze_train.core.errors import ConfigError
from maze_train.core.files import atomic_write
from maze_train.core.state_files import dumps, loads
from maze_train.learner.modules import Chosen

FUNCTION = "<function>"
"""Placeholder for functions, which are not saved."""

WITH_PARTS = ("modules", "optimizers")
"""Components that contain one part per module or optimizer."""


def parts_of(state: Mapping[str, Any]) -> dict[str, tuple[str, str | None]]:
    """Return the components of a state by name, each as its state key and its part key or None."""
    parts: dict[str, tuple[str, str | None]] = {}
    for key, value in state.items():
        if key in WITH_PARTS:
            parts.update({f"{key}/{part}": (key, part) for part in value})
        else:
            parts[key] = (key, None)
    return parts


def select(
    state: Mapping[str, Any],
    components: Collection[str] | None,
    not_components: Collection[str] = (),
) -> dict[str, Any]:
    """Select components of a state.

    Components are the keys of a state. `modules` and `optimizers` have parts: `modules/<id>`,
    `optimizers/<id>` and `optimizers/<id>/<name>`.

    Args:
        state: Complete state.
        components: Components to include, with all their parts; None: all components.
        not_components: Components to exclude, with all their parts.

    Raises:
        ConfigError: If a component does not exist.
    """
    parts = parts_of(state)
    for name in (*(components or ()), *not_components):
        _check_known("components", name, parts)
    chosen: dict[str, Any] = {}
    for name, (key, part) in parts.items():
        wanted = components is None or any(_is_within(name, other) for other in components)
        if not wanted or any(_is_within(name, other) for other in not_components):
            continue
        if part is None:
            chosen[key] = state[key]
        else:
            chosen.setdefault(key, {})[part] = state[key][part]
    return chosen


def merged(current: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with some components replaced, see `Learner.set_state`."""
    known = parts_of(current)
    for name in parts_of(given):
        _check_known("component", name, known)
    return {
        key: {**value, **given.get(key, {})} if key in WITH_PARTS else given.get(key, value)
        for key, value in current.items()
    }


def write(state: Mapping[str, Any], path: str | Path) -> None:
    """Write a state to a file atomically.

    Args:
        state: The state.
        path: Path of the file; the parent directory must exist.
    """
    data = dumps(dict(state))
    with atomic_write(Path(path)) as file:
        file.write(data)


def read(path: str | Path, component: str | None = None) -> dict[str, Any]:
    """Read a state written by `write`.

    Args:
        path: The file.
        component: Component to read, see `select`; None: all components.

    Raises:
        ConfigError: If the path is a directory, or the component does not exist.
        RunDirectoryError: If the file is damaged.
    """
    if Path(path).is_dir():
        problem = f"expected a file written by save_to_path; for a run: load_learner({str(path)!r})"
        raise ConfigError("path", problem, str(path))
    state = loads(Path(path).read_bytes(), path)
    return select(state, None if component is None else [component])


def check_chosen(modules: Collection[str], chosen: Chosen) -> None:
    """Raise ConfigError if `policies_to_train` contains unknown module IDs.

    Raises:
        ConfigError: If an ID is unknown, or `chosen` is a str.
    """
    if chosen is None or callable(chosen):
        return
    known = ", ".join(modules)
    if isinstance(chosen, str):
        raise ConfigError("policies_to_train", f"expected a list of ids from: {known}", chosen)
    for module_id in chosen:
        if module_id not in modules:
            problem = f"no such module; available: {known}"
            raise ConfigError("policies_to_train", problem, module_id)


def _is_within(name: str, component: str) -> bool:
    return name == component or name.startswith(f"{component}/")


def _check_known(key: str, name: str, parts: Mapping[str, Any]) -> None:
    if not any(_is_within(part, name) for part in parts):
        known = ", ".join(parts)
        raise ConfigError(key, f"no such component; available: {known}", name)
