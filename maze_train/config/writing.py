"""Conversion of configurations to plain values and YAML, and strict parsing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from maze_train.config.signature import signed
from maze_train.config.train_config import TrainConfig
from maze_train.core.conversion import config_to_dict
from maze_train.core.errors import ConfigError
from maze_train.core.files import atomic_write, writable
from maze_train.core.names import CONFIG
from maze_train.core.plain_yaml import LOADER, dump_yaml

MAX_BYTES, MAX_DEPTH, MAX_NUMBER = 250_000, 50, 1_000
"""Limits: file size in bytes, nesting depth, and digits of a number."""


def config_text(config: TrainConfig) -> str:
    """Return the configuration of a run as YAML, signed by this user.

    `run_dir`, `resume`, `trust` and `moved` are omitted, so that the file can be used for new runs.
    """
    config = replace(config, run_dir=None, resume=None, trust=[], moved=[])
    return signed(dump_yaml(config_to_dict(config)))


def check_text(text: str) -> None:
    """Check that a configuration file will be readable.

    Raises:
        ConfigError: If the text would not be valid, for example because the text is too large.
    """
    try:
        plain_values(text)
    except ValueError as error:
        raise ConfigError(CONFIG, f"would not be a valid file: {error}") from error


def write_config(run_dir: Path, text: str) -> None:
    """Write the configuration of a run.

    Raises:
        ConfigError: If the file cannot be written.
    """
    with writable("run_dir", run_dir), atomic_write(run_dir / CONFIG) as file:
        file.write(text.encode())


def plain_values(text: str) -> Any:
    """Parse a YAML text; only the features used by `config_text` are allowed.

    All YAML events are checked before any value is constructed.

    Raises:
        ValueError: If the text contains aliases, tags or duplicate keys, or exceeds a limit.
        yaml.YAMLError: If the text is not valid YAML, or has multiple documents.
    """
    if len(text) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES:,} bytes")
    depth = 0
    events: Iterator[Any] = yaml.parse(text, LOADER)
    for event in events:
        depth -= isinstance(event, yaml.CollectionEndEvent)
        is_node, is_start = (
            isinstance(event, kind) for kind in (yaml.NodeEvent, yaml.CollectionStartEvent)
        )
        if not is_node:
            continue
        depth += is_start
        where = f"in line {event.start_mark.line + 1}"
        if not (is_start or isinstance(event, yaml.ScalarEvent)) or event.tag is not None:
            raise ValueError(f"an alias or a tag {where} is not allowed")
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels {where}")
        given = "" if is_start or not event.implicit[0] else event.value
        if len(given) > MAX_NUMBER and given[0] in "+-.0123456789":
            raise ValueError(f"a number of {len(given):,} digits {where}")
    return yaml.load(text, _StrictLoader)


class _StrictLoader(LOADER):  # type: ignore[misc]  # a class that is a value
    """Loader that rejects duplicate and merged keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        """Construct a mapping; raise ValueError for duplicate keys."""
        keys: set[object] = set()
        for entry, _ in node.value:
            key = self.construct_object(entry, deep=True)
            is_scalar = not isinstance(key, (dict, list))
            if not is_scalar or key in keys:
                problem = f"duplicate key {key!r}" if is_scalar else "a key that is a collection"
                raise ValueError(f"{problem} in line {entry.start_mark.line + 1}")
            keys.add(key)
        mapping: dict[object, object] = super().construct_mapping(node, deep)
        return mapping
