"""Formatting of numbers and shell arguments, and flat names of nested values."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

_NOT_JSON = re.compile(r'"(?:[^"\\]|\\.)*"|-?Infinity|NaN')
_AS_JSON = {"Infinity": "1e999", "-Infinity": "-1e999", "NaN": "null"}


def json_text(value: object, indent: int | None = None, sort_keys: bool = False) -> str:
    """Format a value as standard JSON; `json.dumps` writes NaN and infinity as invalid JSON.

    Infinite values are written as `1e999` and `-1e999`, which parsers read as infinity because of
    the overflow. NaN is written as null.

    Raises:
        TypeError: If the value contains types that JSON does not support.
    """
    text = json.dumps(value, indent=indent, sort_keys=sort_keys)
    return _NOT_JSON.sub(lambda found: _AS_JSON.get(found[0], found[0]), text)


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to keys joined by dots; lists and empty mappings are values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat.update(flattened(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def compact(number: float) -> str:
    """Format a count in at most five characters: 950, 1.2k, 40k, 1.25M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # With this margin, 999,960 is formatted as 1M instead of 1000k.
        if abs(number) >= size * 0.9995:
            scaled = number / size
            digits = f"{scaled:.2f}" if size > 1e3 and abs(scaled) < 9.995 else f"{scaled:.1f}"
            digits = f"{scaled:.0f}" if abs(scaled) >= 99.95 else digits
            return (digits.rstrip("0").rstrip(".") if "." in digits else digits) + unit
    return f"{number:.0f}" if abs(number) >= 10 or number == int(number) else f"{number:.1f}"


def duration(seconds: float) -> str:
    """Format a time span as hours, minutes, seconds, such as 0:01:05, with days if necessary."""
    if not math.isfinite(seconds):
        return "-:--:--"
    minutes, rest = divmod(int(max(seconds, 0) + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{days}d {clock}" if days else clock


def readable(number: float) -> str:
    """Format a value with about four significant digits: 0.01234, 195.3, 12,345."""
    if not math.isfinite(number):
        return str(float(number))
    size = abs(number)
    if size >= 1e7 or 0 < size < 1e-3:
        return f"{number:.3g}"
    if size >= 1000:
        return f"{number:,.0f}"
    return f"{number:.1f}" if size >= 100 else f"{number:.2f}" if size >= 1 else f"{number:.4f}"


def importable(modules: Iterable[str]) -> list[str]:
    """Return the names that can be modules; names from untrusted files could contain commands."""
    return [name for name in modules if all(map(str.isidentifier, name.split(".")))]


PLAIN = re.compile(r"[A-Za-z0-9_/.:+%@-]+")
"""Values that Hydra parses without quotes."""


def shell_word(key: str, value: str) -> str:
    """Return the override `key=value`, quoted for Hydra's grammar and the shell if necessary."""
    is_plain = PLAIN.fullmatch(value) is not None
    word = f"{key}={value if is_plain else quoted(value)}"
    return shlex.quote(word) if is_plain or set(word) & set('"$`\\!') else f'"{word}"'


def quoted(text: str) -> str:
    """Quote and escape a string for Hydra."""
    escaped = re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
    return f"'{escaped}'"
