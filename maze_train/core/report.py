"""Reports from plain data: text tables, Markdown, CSV, and plots of curves."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from io import StringIO
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

import numpy as np
from numpy.typing import ArrayLike

from maze_train.core.errors import printable
from maze_train.core.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def write_report(directory: Path, texts: Mapping[str, str], pictures: Mapping[str, Figure]) -> None:
    """Write text files and figures; the keys are file names.

    Raises:
        OSError: If a file cannot be written.
    """
    for name, text in texts.items():
        with atomic_write(directory / name) as file:
            file.write(text.encode())
    for name, figure in pictures.items():
        save_picture(figure, directory / name, dpi=110)


def csv_text(
    rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None, header: bool = True
) -> str:
    """Format rows as CSV without loss of precision; missing values are empty, NaN is `NaN`.

    Characters that are not printable are escaped, because texts may come from untrusted files.

    Args:
        rows: Numbers and strings by column.
        columns: Column names; None: all columns in the order of first appearance.
        header: Whether to write a header line.
    """
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row) if columns is None else columns
    buffer = StringIO()
    table = csv.writer(buffer, lineterminator="\n")
    table.writerows([map(printable, names)] if header else [])
    table.writerows([_cell(row.get(name)) for name in names] for row in rows)
    return buffer.getvalue()


def _cell(value: str | SupportsFloat | None) -> str:
    if value is None or isinstance(value, str):
        return printable(value or "")
    # The repr of NumPy scalars is not a plain number.
    number = int(value) if isinstance(value, Integral) else float(value)
    return "NaN" if math.isnan(number) else repr(number)


def text_table(
    rows: Sequence[Mapping[str, str]], most: int | None = None, file: Path | None = None
) -> list[str]:
    """Format rows as a table, with text aligned left and numbers aligned right.

    Args:
        rows: Texts by column; the first row has all columns.
        most: Maximum number of rows; None: no limit. If rows are omitted, the last line
            contains their number.
        file: File with all rows, mentioned in the last line.
    """
    if not rows:
        return []
    columns = list(rows[0])
    cells = [[row.get(name, "") for name in columns] for row in rows[:most]]
    numbers = {i for line in cells for i, text in enumerate(line) if text.lstrip("-")[:1].isdigit()}
    lines = aligned([columns, *cells], left={*range(len(columns))} - numbers)
    more = len(rows) - len(cells)
    return [*lines, f"and {more} more in {file}"] if more else lines


def aligned(rows: Sequence[Sequence[str]], left: Container[int]) -> list[str]:
    """Format rows of equal length as lines, with columns in `left` aligned left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if i in left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def field_lines(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Format names and values as indented lines."""
    return [f"  {line}" for line in aligned(rows, left=range(2))]


def markdown_table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Format rows as a Markdown table."""
    columns = list(rows[0]) if rows else []
    lines = [columns, ["---"] * len(columns)] if rows else []
    lines[:1] = [[markdown_text(name) for name in columns]] if rows else []
    lines += [[markdown_text(row.get(name, "")) for name in columns] for row in rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def markdown_text(text: str) -> str:
    """Escape HTML, links, tables, code and line breaks, so that a text is shown literally."""
    escaped = re.sub(r"[\\`<|]|\](?=[(\[:])", r"\\\g<0>", printable(text))
    return " ".join(escaped.split())


def markdown_code(text: str) -> str:
    """Format a text, such as the name of a file, as code in Markdown."""
    return f"`{' '.join(printable(text).replace('`', '').split())}`"


BLUE, GREY, RED = "#1f6feb", "#9aa5b1", "#d1242f"
TEXT_COLOR = "#3d444d"

FEW_POINTS = 40
"""Maximum number of points of a curve drawn with markers."""


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches, without the global state of pyplot."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def save_picture(figure: Figure, path: Path, dpi: int = 150) -> None:
    """Write a figure as PNG, SVG or PDF, selected by the file suffix; PNG without a suffix.

    Raises:
        OSError: If the file cannot be written.
    """
    with atomic_write(path) as file:
        figure.savefig(file, format=path.suffix[1:] or "png", dpi=dpi)


def curve(axes: Axes, x: ArrayLike, y: ArrayLike, label: str = "", **style: Any) -> None:
    """Draw a curve, with a legend entry if a label is given.

    Args:
        axes: The axes.
        x: Positions.
        y: Values.
        label: Text of the legend.
        **style: Arguments of matplotlib's `Axes.plot`.
    """
    # Lines through few points are only visible with markers.
    marker = "o" if np.size(x) <= FEW_POINTS else ""
    style = {"linewidth": 1.8, "marker": marker, "markersize": 3.5, **style}
    axes.plot(x, y, label=label or "_", **style)


def band(
    axes: Axes, x: ArrayLike, low: ArrayLike, high: ArrayLike, label: str = "", color: str = BLUE
) -> None:
    """Draw the area between two curves, with a legend entry if a label is given."""
    axes.fill_between(x, low, high, color=color, alpha=0.16, linewidth=0, label=label or "_")


def decorate(
    axes: Axes,
    x_label: str,
    y_label: str,
    *,
    title: str = "",
    note: str = "",
    counts: bool = True,
) -> None:
    """Label the axes, start the x axis at 0, and draw the grid.

    Args:
        axes: The axes.
        x_label: Name of the x axis.
        y_label: Name of the y axis.
        title: Title, on the left.
        note: Small text on the right.
        counts: Whether to format the x axis as counts: 1.5k.
    """
    from matplotlib.ticker import EngFormatter

    axes.set_title(title, loc="left", fontsize=12, color=TEXT_COLOR, fontweight="bold")
    axes.set_title(note, loc="right", fontsize=8, color=TEXT_COLOR)
    axes.set_xlabel(x_label, color=TEXT_COLOR)
    axes.set_ylabel(y_label, color=TEXT_COLOR)
    axes.xaxis.set_major_formatter(EngFormatter(sep="") if counts else "{x:g}")
    axes.set_xlim(left=0)
    axes.grid(visible=True, color="#d8dee4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=TEXT_COLOR)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b0b8c1")


def add_legend(figure: Figure, columns: int = 4) -> None:
    """Add one legend without duplicates for all axes, below the axes.

    Outside the axes, a legend does not hide data.
    """
    pairs = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in figure.axes]
    found = {label: handle for own in pairs for handle, label in own}
    if found:
        place: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "fontsize": 9}
        figure.legend(list(found.values()), list(found), ncols=columns, **place)
