"""YAML of plain values, by libyaml where PyYAML has it, which most wheels do: 10 times as fast."""

from __future__ import annotations

from typing import Any

import yaml

from maze_train.core.targets import Given

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]  # one of two
    """Writes an object that was given in Python as its name."""


_Dumper.add_representer(Given, lambda dumper, name: dumper.represent_str(str(name)))


def load_yaml(text: str) -> Any:
    """The plain values of a text.

    Raises:
        yaml.YAMLError: If it is not YAML.
    """
    return yaml.load(text, LOADER)


def dump_yaml(values: Any, **style: Any) -> str:
    """Plain values as a text, keys in their order; `style` as for `yaml.dump`."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, **style)
    return text
