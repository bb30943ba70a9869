"""YAML of plain values; uses libyaml (about 10 times faster) if available."""

from __future__ import annotations

from typing import Any

import yaml

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]  # one of two
    """Dumper that writes subclasses of `str` as strings."""


_Dumper.add_multi_representer(str, lambda dumper, text: dumper.represent_str(str(text)))


def load_yaml(text: str) -> Any:
    """Parse YAML into plain values.

    Raises:
        yaml.YAMLError: If the text is not valid YAML.
    """
    return yaml.load(text, LOADER)


def dump_yaml(values: object, **style: Any) -> str:
    """Dump plain values with keys in insertion order; `style` is passed to `yaml.dump`."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, **style)
    return text
