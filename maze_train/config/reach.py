"""Settings that reach the network or other directories, which no run of a stranger decides."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from maze_train.config.loading import place_of
from maze_train.config.overrides import shell_word
from maze_train.core.conversion import is_within, join
from maze_train.core.errors import ConfigError
from maze_train.core.targets import TARGET
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
"""Settings whose texts name a cluster, a repository, a dataset or a directory, each with the values
that do not. Texts of all other settings are judged by `ELSEWHERE`."""

SERVICES: Mapping[str, str | None] = MappingProxyType(
    {"WandbWriter": None, "MLflowWriter": "tracking_uri"}
)
"""Writers that send metrics away, each with the argument that says where; None: they always do."""

ELSEWHERE = re.compile(r"[/\\~$]|[A-Za-z]:[/\\]|.*(://|(^|[/\\])\.\.([/\\]|$))", re.DOTALL)
"""Texts that are an address, or a path that may leave the working directory."""

_MISSING = object()


def check_reach(settings: Mapping[str, Any], own: Any, where: str) -> None:
    """Refuse settings of a stranger that reach the network or other directories.

    Args:
        settings: Those of the stranger, changed by those of the user.
        own: Settings of the user: what is given there, with the same value, is allowed.
        where: The file, for the message.

    Raises:
        ConfigError: If there are any; it lists all of them with the words that allow them.
    """
    found = dict(_reaching(settings, own if isinstance(own, Mapping) else {}))
    if not found:
        return
    rows = "".join(f"\n  {key} = {value!r}" for key, value in found.items())
    words = dict.fromkeys(
        shell_word(key, str(value)) if "[" not in key else f"{key.partition('[')[0]}=[...]"
        for key, value in found.items()
    )
    raise ConfigError(
        next(iter(found)),
        f"the network and other directories are reached only where you say so, and {where} is not "
        f"signed by you; nothing was reached:{rows}\nGive these settings yourself, as they are "
        f"or with values of your own: {' '.join(words)}",
    )


def _reaching(node: Any, own: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The settings that reach elsewhere, without those that the user gives."""
    if node is own or (type(node) is type(own) and not isinstance(node, Mapping) and node == own):
        return
    if isinstance(node, Mapping):
        if _is_service(node):
            yield key, dict(node)
            return
        for name, value in node.items():
            given = own.get(name, _MISSING) if isinstance(own, Mapping) else _MISSING
            if name != TARGET:  # names of classes are a matter of trust
                yield from _reaching(value, given, join(key, str(name).replace(".", "/")))
    elif isinstance(node, list | tuple):
        for i, value in enumerate(node):
            yield from _reaching(value, _MISSING, f"{key}[{i}]")
    elif isinstance(node, str):
        place = place_of(key)
        local = [values for name, values in REACHES.items() if is_within(place, [name])]
        if (local and node not in local[0]) or ELSEWHERE.match(node):
            yield key, node


def _is_service(node: Mapping[str, Any]) -> bool:
    """Whether a node names a writer that sends metrics away."""
    name = str(node.get(TARGET)).replace(":", ".").rpartition(".")[2]
    if name not in SERVICES:
        return False
    argument = SERVICES[name]
    return argument is None or node.get(argument) is not None
