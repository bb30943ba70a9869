"""Overrides that Hydra reads otherwise than users mean, or for which it has no message."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Quote, QuotedString
from hydra.errors import HydraException

from maze_train.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


def quoted(text: str) -> str:
    """A text in the quotes in which Hydra reads it letter by letter."""
    return QuotedString(text, Quote.single).with_quotes()


def as_path(value: str, is_sweep: bool) -> str:
    """The value of a setting that names a file or directory, in quotes where it needs some.

    Hydra reads it as it is if that gives a text, null, a list, or the values of a sweep.

    Args:
        value: What was typed: a path, several in brackets, or in a sweep several with commas.
        is_sweep: Whether commas divide the values of a sweep.
    """
    with suppress(HydraException):
        read = OverridesParser.create().parse_override(f"path={value}").value()
        if not isinstance(read, (bool, int, float)):
            return value
    if value[:1] + value[-1:] == "[]":
        return f"[{_each_as_path(value[1:-1])}]"
    return _each_as_path(value) if is_sweep and "," in value else quoted(value)


def _each_as_path(values: str) -> str:
    return ",".join(as_path(value.strip(), is_sweep=False) for value in values.split(","))


def check_choices(overrides: Iterable[str], groups: Collection[str]) -> None:
    """Refuse choices that are not names of options; Hydra has no message for them.

    Args:
        overrides: Overrides in the form in which Hydra accepts them.
        groups: All groups but those of Hydra, whose names have a slash.

    Raises:
        ConfigError: If there is such a choice.
    """
    for word in overrides:
        key = word.lstrip("+~").partition("=")[0].partition("@")[0]
        is_group = key in groups or "/" in key or key == "hydra"
        if not is_group and key != "hydra.verbose":
            continue
        with suppress(HydraException):  # Hydra reports what it cannot read
            override = OverridesParser.create().parse_override(word)
            value = override.value()
            if override.is_delete() and value is None:
                continue
            choices = value.list if isinstance(value, ChoiceSweep) else [value]
            if not all(_is_choice(choice, is_group) for choice in choices):
                expected = "the name of an option" if is_group else "true, false or names"
                raise ConfigError(key, f"expected {expected}", word.partition("=")[2])


def _is_choice(value: Any, is_group: bool) -> bool:
    """Whether a value names options; settings of a group may stand in their place."""
    entries = value if isinstance(value, list) else [value]
    texts = (str, QuotedString, Glob) if is_group else (str, QuotedString, bool)
    return (isinstance(value, dict) and is_group) or all(isinstance(e, texts) for e in entries)
