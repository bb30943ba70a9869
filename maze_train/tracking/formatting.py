"""Numbers and tables for people."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Sequence


def compact(number: float) -> str:
    """A count in at most five characters: 950, 1.2k, 40k, 1.25M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # The margin makes 999,960 read 1M and not 1000k.
        if abs(number) >= size * 0.9995:
            scaled = number / size
            digits = f"{scaled:.2f}" if size > 1e3 and abs(scaled) < 9.995 else f"{scaled:.1f}"
            digits = f"{scaled:.0f}" if abs(scaled) >= 99.95 else digits
            return (digits.rstrip("0").rstrip(".") if "." in digits else digits) + unit
    return f"{number:.0f}" if abs(number) >= 10 or number == int(number) else f"{number:.1f}"


def duration(seconds: float) -> str:
    """A time span as hours, minutes, seconds: 0:01:05; days in front once there are any."""
    if not math.isfinite(seconds):
        return "-:--:--"
    minutes, rest = divmod(int(max(seconds, 0) + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{days}d {clock}" if days else clock


def readable(number: float) -> str:
    """A return or loss with about four significant digits: 0.01234, 195.3, 12,345."""
    if not math.isfinite(number):
        return str(float(number))
    size = abs(number)
    if size >= 1e7 or 0 < size < 1e-3:
        return f"{number:.3g}"
    if size >= 1000:
        return f"{number:,.0f}"
    return f"{number:.1f}" if size >= 100 else f"{number:.2f}" if size >= 1 else f"{number:.4f}"


def aligned(rows: Sequence[Sequence[str]], left: Container[int]) -> list[str]:
    """Rows of equal length as lines: these columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if i in left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
