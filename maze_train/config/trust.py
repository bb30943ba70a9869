"""What untrusted settings may reach: names of code to import, the network and directories."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from maze_train.config.compose import place_of
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
from maze_train.core.text import shell_word
from maze_train.training.config import RANDOM

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


REACHES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "algorithm.initial_demonstration_trajectories": (),
        "base_run": (),
        "evaluation.opponents": (RANDOM,),
        "policies.source": (RANDOM,),
        "run_dir": (),
        "runner.address": ("auto", "local"),
        "runner.dataset": (),
        "runner.working_dir": (),
    }
)
"""Settings for a cluster, a repository, a dataset or a directory, with their allowed values. Values
of all other settings are matched against `ELSEWHERE`."""

SERVICES: Mapping[str, str | None] = MappingProxyType(
    {"WandbWriter": None, "MLflowWriter": "tracking_uri"}
)
"""Writers that upload metrics, each with the argument for the server; None: the writer always
uploads."""

ELSEWHERE = re.compile(r"[/\\~$]|[A-Za-z]:[/\\]|.*(://|(^|[/\\])\.\.([/\\]|$))", re.DOTALL)
"""Pattern of URLs and of paths that may lead outside the working directory."""

HOSTS = ("address", "api_key", "host", "hostname", "ip", "server", "token", "uri", "url")
"""Names of arguments of environments and other classes that select a server."""

_MISSING = object()


def check_reach(settings: Mapping[str, Any], own: object, where: str) -> None:
    """Raise an error if untrusted settings access the network or other directories.

    Args:
        settings: Settings of the untrusted run, overridden by the user's settings.
        own: The user's settings; settings with the same value are allowed.
        where: Name of the settings file, for the message.

    Raises:
        ConfigError: If a setting is not allowed. The message lists all such settings and the
            overrides that allow them.
    """
    found = dict(_reaching(settings, own if isinstance(own, Mapping) else {}))
    if not found:
        return
    rows = "".join(f"\n  {key} = {value!r}" for key, value in found.items())
    words = dict.fromkeys(
        shlex.quote(f"{key.partition('[')[0]}=[...]") if "[" in key else shell_word(key, str(value))
        for key, value in found.items()
    )
    raise ConfigError(
        next(iter(found)),
        f"access to the network or to other directories requires your consent, since {where} is "
        f"not signed by you; nothing was accessed:{rows}\nTo allow access, set these settings "
        f"explicitly, with the same or other values: {' '.join(words)}",
    )


def _reaching(node: object, own: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield the settings that access other directories or the network, except user settings."""
    if node is own or (type(node) is type(own) and not isinstance(node, Mapping) and node == own):
        return
    if isinstance(node, Mapping):
        if _is_service(node):
            yield key, dict(node)
            return
        for name, value in node.items():
            given = own.get(name, _MISSING) if isinstance(own, Mapping) else _MISSING
            if name != TARGET:  # Class names are checked against `trust`.
                yield from _reaching(value, given, join(key, str(name).replace(".", "/")))
    elif isinstance(node, list | tuple):
        for i, value in enumerate(node):
            yield from _reaching(value, _MISSING, f"{key}[{i}]")
    elif isinstance(node, str):
        place = place_of(key)
        local = [values for name, values in REACHES.items() if is_within(place, [name])]
        is_host = not local and key.rpartition(".")[2] in HOSTS
        if (local and node not in local[0]) or is_host or ELSEWHERE.match(node):
            yield key, node


def _is_service(node: Mapping[str, Any]) -> bool:
    """Return whether a node names a writer that uploads metrics."""
    name = str(node.get(TARGET)).replace(":", ".").rpartition(".")[2]
    if name not in SERVICES:
        return False
    argument = SERVICES[name]
    return argument is None or node.get(argument) is not None
