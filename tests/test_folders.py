"""Symbolic links in run, study and sweep directories are not followed."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from maze_train import CSVWriter, JSONSummaryWriter, LearningCurveWriter, RunInfo, TensorBoardWriter
from maze_train.collect.recording import VideoWriter
from maze_train.core import folders
from maze_train.core.errors import MazeTrainError, RunDirectoryError
from maze_train.core.files import atomic_write, open_own, write_synced
from maze_train.core.folders import check_enclosed, files_below, make_folders
from maze_train.core.run_directory import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Callable

    from maze_train import MetricsWriter

MARKS = {"run": ("config.yaml", "metrics.csv"), "study": ("study.yaml",), "sweep": ("jobs.csv",)}
"""Files that identify each kind of directory."""

ROW = {"epoch": 1, "env_steps": 10, "train/return": 1.0}


def write(path: Path) -> None:
    """Write a file atomically."""
    with atomic_write(path) as file:
        file.write(b"x")


def record(path: Path) -> None:
    """Write a video of one frame."""
    video = VideoWriter(path)
    try:
        video.add(np.zeros((16, 16, 3), np.uint8))
        video.close()
    finally:
        video.discard()


def track(writer: MetricsWriter, path: Path, name: str = "") -> None:
    """Call all methods of a writer, for a run three folders above `path`."""
    try:
        writer.start(RunInfo(run_dir=path.parents[2], name=name))
        writer.write(ROW)
        writer.finish({"a": 1})
    finally:
        writer.close()


NAME = "a/b/file"
WRITES: dict[str, Callable[[Path], object]] = {
    "atomic_write": write,
    "write_synced": lambda path: write_synced(path, b"x"),
    "open_own": lambda path: os.close(open_own(path, os.O_WRONLY)),
    "make_folders": make_folders,
    "RunDirectory.new": lambda path: ExitStack().enter_context(RunDirectory.new(str(path), Path())),
    "VideoWriter": record,
    "CSVWriter": lambda path: track(CSVWriter(NAME, ["x"]), path),
    "JSONSummaryWriter": lambda path: track(JSONSummaryWriter(NAME), path),
    "LearningCurveWriter": lambda path: track(LearningCurveWriter(NAME), path),
    "TensorBoardWriter": lambda path: track(TensorBoardWriter(), path, NAME),
}


def everything(folder: Path) -> dict[Path, bytes]:
    """Return the content of all files in a folder."""
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.mark.parametrize("opens_below", [True, False])
@pytest.mark.parametrize("name", WRITES)
def test_links_below_a_run_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, opens_below: bool
) -> None:
    """Links are rejected, also on systems that cannot open files relative to a folder."""
    monkeypatch.setattr(folders, "OPENS_BELOW", opens_below)
    own = tmp_path / "own"
    (own / "b").mkdir(parents=True)
    (own / "file").write_text("mine")
    before = everything(own)
    for kind, marks in MARKS.items():
        for level in ("a", "a/b", "a/b/file"):
            run = tmp_path / f"{kind} {level.replace('/', ' ')}"
            (run / level).parent.mkdir(parents=True)
            for mark in marks:
                (run / mark).touch()
            is_file = level == NAME
            (run / level).symlink_to(own / "file" if is_file else own)
            (run / "a/b").mkdir(exist_ok=True, parents=True)
            try:
                WRITES[name](run / NAME)
            except (OSError, MazeTrainError) as error:
                refusal = str(error)
            else:
                refusal = ""
            assert everything(own) == before, (kind, level)
            # Writers that replace a file also replace a link.
            if not is_file:
                assert "is a symbolic link inside a run" in refusal, (kind, level)


def test_links_above_a_run_are_followed(tmp_path: Path) -> None:
    """Links above a run, and outside of runs, are followed."""
    (tmp_path / "disk/run").mkdir(parents=True)
    (tmp_path / "disk/run/jobs.csv").touch()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    write(tmp_path / "link/run/a/file")
    write(tmp_path / "link/other/file")
    # A project may have such a file, and `..` is resolved lexically if no link comes before it.
    (tmp_path / "config.yaml").touch()
    write(tmp_path / "link/run/../other/file")
    write(tmp_path / "disk/run/../file")
    found = {path.relative_to(tmp_path / "disk").as_posix() for path in tmp_path.rglob("file")}
    assert found == {"run/a/file", "other/file", "file"}
    (tmp_path / "disk/run/x").symlink_to(tmp_path)
    for place in ("disk/run/x/../file", "disk/run/x/new"):
        with pytest.raises(OSError, match="is a symbolic link inside a run"):
            write(tmp_path / place)
        with pytest.raises(RunDirectoryError, match="disk/run/x is a symbolic link"):
            check_enclosed(tmp_path / place)


@pytest.mark.parametrize("place", ["x", ".git/x", ".venv/bin/x", "venv/x", "a/wandb/x"])
def test_every_directory_of_a_run_is_checked_for_links(tmp_path: Path, place: str) -> None:
    """Folders with names used by other programs are checked, too."""
    (tmp_path / "run" / place).parent.mkdir(parents=True)
    (tmp_path / "run" / place).symlink_to(tmp_path)
    with pytest.raises(RunDirectoryError, match=f"{place} is a symbolic link"):
        check_enclosed(tmp_path / "run")


def test_only_regular_files_are_uploaded(tmp_path: Path) -> None:
    """Regular files below a directory, by name; links to files and folders are not followed."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/a.mp4").touch()
    (tmp_path / "run/a/b").mkdir(parents=True)
    for name in ("run/a/b/own.mp4", "run/own.mp4", "run/own.csv"):
        (tmp_path / name).touch()
    (tmp_path / "run/a/link.mp4").symlink_to(tmp_path / "secret/a.mp4")
    (tmp_path / "run/folder").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "run/pipe.mp4")
    found = files_below(tmp_path / "run", "*.mp4")
    assert found == [tmp_path / "run/a/b/own.mp4", tmp_path / "run/own.mp4"]
