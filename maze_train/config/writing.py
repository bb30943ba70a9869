"""Conversion of the configuration of a run to plain values and YAML, and strict parsing of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from maze_train.config.signature import signed
from maze_train.config.train_config import TrainConfig
from maze_train.core.conversion import Settings
from maze_train.core.errors import ConfigError
from maze_train.core.files import atomic_write, writable
from maze_train.core.names import CONFIG
from maze_train.core.plain_yaml import LOADER, dump_yaml

MAX_BYTES, MAX_DEPTH, MAX_NUMBER = 250_000, 50, 1_000
"""Limits: file size in bytes, nesting depth, and digits of a number."""


def config_to_dict(config: Settings) -> dict[str, Any]:
    """Return settings as plain values for YAML.

    `load_config` rebuilds a `TrainConfig` from the result, `build_dataclass` any other class.
    """
    dumped: dict[str, Any] = config.to_plain(type(config))
    return dumped


def config_text(config: TrainConfig) -> str:
    """Return the configuration of a run as YAML, signed by this user.

    Omits `run_dir`, `resume`, `trust` and `moved`, so that the file can be used for another run.
    """
    config = replace(config, run_dir=None, resume=None, trust=[], moved=[])
    return signed(dump_yaml(config_to_dict(config)))


def write_config(run_dir: Path, text: str) -> None:
    """Write the configuration of a run.

    Raises:
        ConfigError: If the configuration cannot be written, or could not be read again.
    """
    try:
        plain_values(text)
    except ValueError as error:
        raise ConfigError(CONFIG, f"could not be read again: it would be {error}") from error
    with writable("run_dir", run_dir), atomic_write(run_dir / CONFIG) as file:
        file.write(text.encode())


def plain_values(text: str) -> Any:
    """Parse a YAML text, accepting only the features that `config_text` writes.

    Each YAML event is checked before a value is constructed from it.

    Raises:
        ValueError: If the text contains aliases, tags, duplicate keys or multiple documents, or
            exceeds a limit.
        yaml.YAMLError: If the text is not valid YAML.
    """
    if len(text) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES:,} bytes")
    documents: list[Any] = []
    open_nodes = [_Node(documents)]
    resolver, constructor = yaml.resolver.Resolver(), yaml.constructor.SafeConstructor()
    events: Iterator[Any] = yaml.parse(text, LOADER)
    for event in events:
        where = f"in line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) is not None:
            raise ValueError(f"an alias or a tag {where}, which is not allowed")
        if isinstance(event, yaml.CollectionEndEvent):
            open_nodes.pop()
        elif isinstance(event, yaml.CollectionStartEvent):
            content: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
            open_nodes[-1].add(content, where)
            open_nodes.append(_Node(content))
            if len(open_nodes) > MAX_DEPTH + 1:
                raise ValueError(f"nested deeper than {MAX_DEPTH} levels {where}")
        elif isinstance(event, yaml.ScalarEvent):
            given = event.value
            if event.implicit[0] and len(given) > MAX_NUMBER and given[0] in "+-.0123456789":
                raise ValueError(f"a number of {len(given):,} digits {where}")
            tag = resolver.resolve(yaml.ScalarNode, given, event.implicit)  # type: ignore[no-untyped-call]  # no stub
            open_nodes[-1].add(constructor.construct_object(yaml.ScalarNode(tag, given)), where)
    if len(documents) > 1:
        raise ValueError(f"{len(documents)} documents in one file")
    return documents[0] if documents else None


@dataclass(slots=True)
class _Node:
    """A list or a mapping that is filled while parsing."""

    content: list[Any] | dict[Any, Any]
    keys: list[Any] = field(default_factory=list)
    """The key that is waiting for its value, if any."""

    def add(self, value: Any, where: str) -> None:
        """Append an entry of a list, or a key or a value of a mapping."""
        if isinstance(self.content, list):
            self.content.append(value)
        elif self.keys:
            self.content[self.keys.pop()] = value
        elif isinstance(value, (dict, list)):
            raise ValueError(f"a key {where} is a mapping or a list")
        elif value in self.content:
            raise ValueError(f"duplicate key {value!r} {where}")
        else:
            self.keys.append(value)
