"""Rows of metrics: order, file, and formatting of values."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import pytest

from maze_train.core.errors import RunDirectoryError
from maze_train.core.files import atomic_write
from maze_train.core.run_directory import read_rows
from maze_train.core.text import compact, duration, readable
from maze_train.tracking.tracker import ordered_columns

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_columns_are_ordered_by_group() -> None:
    """Counters, train, eval, others, time; within a group, the order of appearance."""
    names = ["time/a", "x/b", "eval/c", "train/z", "env_steps", "train/a", "epoch", "updates"]
    expected = ["epoch", "updates", "env_steps", "train/z", "train/a", "eval/c", "x/b", "time/a"]
    assert ordered_columns([*names, *names]) == expected


def test_read_rows_skips_incomplete_lines(tmp_path: Path) -> None:
    """Incomplete lines and rows after the checkpoint are skipped; a pipe raises an error."""
    path = tmp_path / "metrics.csv"
    assert read_rows(path) == []
    path.touch()
    assert read_rows(path) == []
    path.write_text("epoch,env_steps,train/x\n1,10,0.5\n2,20,nan\n3,30,0.12")
    rows = read_rows(path)
    assert rows[0] == {"epoch": 1, "env_steps": 10, "train/x": 0.5}
    assert math.isnan(rows[1]["train/x"])
    assert len(rows) == 2
    assert read_rows(path, last_epoch=1) == rows[:1]
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RunDirectoryError, match="not a regular file"):
        read_rows(path)


@pytest.mark.parametrize("line", [b"1,2,3", b"1", b"one,2", b"1,2\xff", b"1,\0", b"1" * 200_000])
def test_read_rows_of_a_damaged_file_raises(tmp_path: Path, line: bytes) -> None:
    """The error names the file, whose path may be a string."""
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"epoch,env_steps\n" + line + b"\n")
    with pytest.raises(RunDirectoryError, match=r"metrics\.csv (line 2 )?is damaged"):
        read_rows(str(path))


def test_atomic_write_replaces_links(tmp_path: Path) -> None:
    """Links in place of the file or of its temporary file are replaced, not followed."""
    other = tmp_path / "other.txt"
    other.write_text("mine")
    for name in ("x.txt", f".x.txt.{os.getpid()}.tmp"):
        (tmp_path / name).symlink_to(other)
    with atomic_write(tmp_path / "x.txt") as file:
        file.write(b"new")
    assert (tmp_path / "x.txt").read_text() == "new"
    assert other.read_text() == "mine"


def test_failed_atomic_write_keeps_the_old_file(tmp_path: Path) -> None:
    """The file is replaced completely or not at all, and no temporary file remains."""
    path = tmp_path / "below" / "x.txt"
    with atomic_write(path) as file:
        file.write(b"old")

    def fail() -> None:
        with atomic_write(path) as file:
            file.write(b"ne")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert path.read_bytes() == b"old"
    assert [p.name for p in path.parent.iterdir()] == ["x.txt"]


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        (compact, {0: "0", 0.42: "0.4", 950: "950", 999: "999", 1234: "1.2k", 40_000: "40k"}),
        (compact, {123_456: "123k", 999_960: "1M", 1_250_000: "1.25M", 12_340_000: "12.3M"}),
        (compact, {2e9: "2G"}),
        (duration, {0: "0:00:00", 65.2: "0:01:05", 59.6: "0:01:00", 36_000: "10:00:00"}),
        (duration, {90_061: "1d 1:01:01", math.nan: "-:--:--"}),
        (readable, {0.0: "0.0000", 0.01234: "0.0123", -21.0: "-21.00", 195.26: "195.3"}),
        (readable, {12_345.6: "12,346", 1.5e8: "1.5e+08", 1e-5: "1e-05", -math.inf: "-inf"}),
    ],
)
def test_numbers_and_durations_are_formatted(
    form: Callable[[float], str], texts: dict[float, str]
) -> None:
    """Counts, durations, and returns with about four significant digits."""
    assert {number: form(number) for number in texts} == texts
