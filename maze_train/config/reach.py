"""Check for settings of an untrusted run that access the network or other directories."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from maze_train.config.compose import place_of
from maze_train.core.conversion import join
from maze_train.core.errors import ConfigError
from maze_train.core.targets import TARGET, is_within
from maze_train.core.text import shell_word
from maze_train.training.config import RANDOM

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
