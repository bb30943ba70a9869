"""Rows of metrics as a table: the order of its columns, and rows that are read again."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING

from maze_train.errors import RunDirectoryError
from maze_train.files import read_regular
from maze_train.tracking.tracker import ENV_STEPS, EPOCH, UPDATES, MetricsRow

if TYPE_CHECKING:
    from collections.abc import Iterable


MAX_NBYTES = 1 << 30


def ordered_columns(names: Iterable[str]) -> list[str]:
    """Names in the order of columns: epoch, updates, env_steps, train, eval, others, time.

    Within a group the order of `names` is kept.
    """

    def rank(name: str) -> int:
        if name in (EPOCH, UPDATES, ENV_STEPS):
            return (EPOCH, UPDATES, ENV_STEPS).index(name)
        group = name.split("/", 1)[0]
        return {"train": 3, "eval": 4, "time": 6}.get(group, 5)

    return sorted(dict.fromkeys(names), key=rank)


def read_rows(path: str | Path, last_epoch: int | None = None) -> list[MetricsRow]:
    """The rows of a `metrics.csv`.

    A last line that was cut off when its process was killed is left out.

    Args:
        path: The file; no rows if it does not exist.
        last_epoch: Epoch of the checkpoint from which a run continues: later rows, whose epochs
            will be repeated, are left out. None: all rows.

    Raises:
        RunDirectoryError: If the file is not a table of numbers.
    """
    if not Path(path).exists():
        return []
    try:
        text = read_regular(Path(path), MAX_NBYTES).decode()
        lines = list(csv.reader(text[: text.rfind("\n") + 1].splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RunDirectoryError(f"{path} is damaged: {error}") from error
    rows = []
    for number, cells in enumerate(lines[1:], start=2):
        try:
            pairs = zip(lines[0], cells, strict=True)
            rows.append({name: _number(cell) for name, cell in pairs if cell != ""})
        except ValueError as error:
            raise RunDirectoryError(f"{path} line {number} is damaged: {error}") from error
    if last_epoch is None:
        return rows
    return [row for row in rows if row.get(EPOCH, 0) <= last_epoch]


def _number(cell: str) -> float:
    # A number of any length would be no float later.
    return int(cell) if cell.lstrip("-").isdigit() and len(cell) < 19 else float(cell)
