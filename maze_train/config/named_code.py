"""Names of code in the configuration of a run: classes, functions and packages to import."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from maze_train.config.train_config import TrainConfig
from maze_train.core.conversion import Settings, config_to_dict, join
from maze_train.core.errors import ConfigError
from maze_train.core.targets import (
    OFFERED,
    TARGET,
    InlineObject,
    has_no_name,
    is_within,
    locate,
    made_in_python,
)

REGISTRY = "pettingzoo:"
"""Prefix of ids that always select environments of a known package."""

ENV_ID = re.compile(r"env\.(id$|kwargs[.\[])")
"""Settings that are environment ids, or arguments that may contain an environment id."""


def modules_to_trust(config: TrainConfig) -> list[str]:
    """Return the modules that other users must list in `trust` to resume the run."""
    roots = {
        (module or path.replace(":", ".")).partition(".")[0]
        for _, path, module in names_in(config)
        if not is_within(path, OFFERED) and not isinstance(path, InlineObject)
    }
    return sorted(roots)


def given_in_python(config: TrainConfig) -> list[str]:
    """Return the keys of all targets that are Python objects instead of names."""
    return [key for key, path, _ in names_in(config) if isinstance(path, InlineObject)]


def check_given(settings: Mapping[str, Any]) -> None:
    """Check that no Python objects in the settings are missing.

    Raises:
        ConfigError: If objects are missing. The message lists all missing objects.
    """
    missing = {}
    for key, path, module in names_in(settings):
        if has_no_name(path) and not module:
            try:
                locate(path)
            except ConfigError:
                missing[key] = path
    if missing:
        raise made_in_python(list(missing), *missing.values())


def names_in(node: object) -> list[tuple[str, str, str]]:
    """Return all importable names in the settings, at any depth, see `with_names`."""
    found: list[tuple[str, str, str]] = []
    with_names(node, lambda *name: found.append(name))
    return found


def with_names(node: object, replaced: Callable[[str, str, str], object], key: str = "") -> Any:
    """Return a copy of the settings in which all importable names are replaced.

    Args:
        node: The settings.
        replaced: Function that returns the new value, given the key, the name, and the module to
            import for an environment id (empty for other names).
        key: Dotted key of `node`.
    """
    if isinstance(node, Settings):
        node = config_to_dict(node)
    if isinstance(node, Mapping):
        # Replace dots, so that an id with dots cannot be mistaken for nested keys.
        keys = {name: join(key, str(name).replace(".", "/")) for name in node}
        return {name: with_names(value, replaced, keys[name]) for name, value in node.items()}
    if isinstance(node, list | tuple):
        return [with_names(value, replaced, f"{key}[{i}]") for i, value in enumerate(node)]
    if key.rpartition(".")[2] == TARGET:
        name = node if node is None or isinstance(node, str) else str(node)
        return name and replaced(key, name, "")
    if isinstance(node, str) and ENV_ID.match(key):
        # Imported lazily, because gymnasium is slow to import.
        from maze_train.envs.building import module_of_argument, module_of_id

        is_id = key == "env.id"
        name = node.removeprefix(REGISTRY) if is_id else node
        module = (module_of_id if is_id else module_of_argument)(name)
        return replaced(key, node, module) if module else node
    return node
