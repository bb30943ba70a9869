"""Formatting of numbers, tables and CSV."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from io import StringIO
from numbers import Integral
from pathlib import Path
from typing import Any

_NOT_JSON = re.compile(r'"(?:[^"\\]|\\.)*"|-?Infinity|NaN')
_AS_JSON = {"Infinity": "1e999", "-Infinity": "-1e999", "NaN": "null"}


def json_text(value: Any, indent: int | None = None, sort_keys: bool = False) -> str:
    """Format a value as JSON that every parser reads, unlike `json.dumps`.

    JSON has no infinity, but parsers read an overflowing number as infinity, so infinite values are
    written as `1e999` and `-1e999`; NaN is written as null.

    Raises:
        TypeError: If the value contains other types than those of JSON.
    """
    text = json.dumps(value, indent=indent, sort_keys=sort_keys)
    return _NOT_JSON.sub(lambda found: _AS_JSON.get(found[0], found[0]), text)


def csv_text(
    rows: Iterable[Mapping[str, Any]],
    columns: Sequence[Any] | None = None,
    header: bool = True,
    nan: str = "nan",
) -> str:
    """Format rows as CSV; values survive a round trip, missing ones are empty.

    Args:
        rows: Numbers and strings by column.
        columns: Column names; None: all columns in the order of first appearance.
        header: Whether to write a header line.
        nan: Text for NaN.
    """
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row) if columns is None else columns
    buffer = StringIO()
    table = csv.writer(buffer, lineterminator="\n")
    table.writerows([names] if header else [])
    table.writerows([_cell(row.get(name), nan) for name in names] for row in rows)
    return buffer.getvalue()


def _cell(value: Any, nan: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    # NumPy scalars are numbers too, but their repr is not a number.
    number = int(value) if isinstance(value, Integral) else float(value)
    return nan if math.isnan(number) else repr(number)


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings, keys joined by dots; lists and empty mappings are values."""
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
        # With this margin 999,960 becomes 1M instead of 1000k.
        if abs(number) >= size * 0.9995:
            scaled = number / size
            digits = f"{scaled:.2f}" if size > 1e3 and abs(scaled) < 9.995 else f"{scaled:.1f}"
            digits = f"{scaled:.0f}" if abs(scaled) >= 99.95 else digits
            return (digits.rstrip("0").rstrip(".") if "." in digits else digits) + unit
    return f"{number:.0f}" if abs(number) >= 10 or number == int(number) else f"{number:.1f}"


def duration(seconds: float) -> str:
    """Format a time span as hours, minutes, seconds, such as 0:01:05, after any days."""
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


def text_table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Format rows as aligned lines: words to the left, numbers to the right."""
    columns = list(rows[0])
    cells = [[row.get(name, "") for name in columns] for row in rows]
    numbers = {i for line in cells for i, text in enumerate(line) if text.lstrip("-")[:1].isdigit()}
    return aligned([columns, *cells], left={*range(len(columns))} - numbers)


def markdown_table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Format rows as a Markdown table."""
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns)]
    lines += [[row.get(name, "").replace("|", "\\|") for name in columns] for row in rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def aligned(rows: Sequence[Sequence[str]], left: Container[int]) -> list[str]:
    """Format rows of equal length as lines; columns in `left` are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if i in left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def table_lines(
    rows: Sequence[Mapping[str, str]], most: int, file: Path, indent: str = ""
) -> list[str]:
    """Format rows as aligned lines.

    Args:
        rows: The rows.
        most: Maximum number of rows; a final line states how many were omitted.
        file: File that contains all rows.
        indent: Prefix of each line.
    """
    lines = text_table(rows[:most]) if rows else []
    if len(rows) > most:
        lines.append(f"and {len(rows) - most} more in {file}")
    return [f"{indent}{line}" for line in lines]
