"""Checkpoints survive killed processes and failing disks."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys

import pytest
import torch
from cases import everyday
from stored_checkpoints import (
    FULL,
    MANIFEST,
    STATE,
    Faults,
    Killed,
    Segments,
    attempt,
    contents,
    inodes,
    loaded,
    make_store,
    names,
    new_files,
    refuse_links,
    restored,
    save,
    saved,
)

from maze_train import CheckpointStore
from maze_train.training.outcome import Position


@pytest.fixture
def directory(tmp_path):
    """Checkpoints after epochs 1 and 2, which share two of their three parts."""
    saved(tmp_path / "checkpoints")
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "backup")
    return tmp_path / "checkpoints"


def continued(store, epoch, **more):
    """Resume as a run does: load, change a part, save."""
    owner = Segments()
    owner.load_state_dict(store.load().state)
    owner.change(2, 90)
    return save(store, epoch, owner, tag="new", **more)


def new_epoch(store):
    """Save a new epoch, the usual case."""
    return continued(store, 3)


def same_place(store):
    """Save at the position of an existing checkpoint, which is not replaced."""
    return continued(store, 2)


def other_branch(store):
    """Resume from the first checkpoint; the second belongs to an abandoned branch."""
    return continued(store, 1, updates=13, within_epoch=True)


def older_place(store):
    """Save at the position of a checkpoint that is not the newest."""
    return continued(store, 1)


def without_links(store):
    """Save on a file system without hard links, where files are copied."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "link", refuse_links)
        return continued(store, 3)


def first_save(store):
    """Save without loading first, so that all parts are written."""
    owner = Segments()
    owner.values, owner.versions = [0.0, 50.0, 90.0], [4, 4, 4]
    return save(store, 3, owner, tag="new")


SCENARIOS = (new_epoch, same_place, other_branch, older_place, without_links, first_save)
CONTENTS = {"": [0.0, 50.0, 2.0], "new": [0.0, 50.0, 90.0]}


@pytest.mark.parametrize(
    ("scenario", "mode"),
    everyday(
        3,
        [
            *((new_epoch, mode) for mode in ("before", "after", "dead")),
            *((scenario, "dead") for scenario in SCENARIOS[1:]),
        ],
        are_rows=True,
    ),
)
def test_save_killed_at_any_call_leaves_a_complete_checkpoint(directory, tmp_path, scenario, mode):
    """After a kill at any time, the old or new checkpoint is complete, and saving works again."""
    counted = Faults(-1, Killed())
    result, _ = attempt(directory, scenario, counted)
    assert counted.calls > 10
    places, seen = {"": "epoch_000002", "new": result.name}, set()
    for k in range(counted.calls):
        restored(directory, tmp_path / "backup")
        result, _ = attempt(directory, scenario, Faults(k, Killed(), mode))
        assert isinstance(result, Killed)
        restored(tmp_path / "copy", directory)
        store, _ = make_store(directory)
        found = store.load()
        tag = found.state["tag"]
        assert found.path.name == places[tag]
        assert contents(found.state) == CONTENTS[tag]
        seen.add(tag)
        store.clean()
        assert store.load().path.name == places[tag]
        assert not [name for name in names(directory) if name.startswith(".tmp-")]
        owner = Segments()
        owner.load_state_dict(store.load().state)
        owner.change(0, 5)
        path = save(store, 4, owner, tag="next")
        assert (owner.reads, len(inodes(path))) == ([0], 3)
        assert loaded(make_store(directory)[0]) == (4, "next")
        assert not [name for name in names(directory) if name.startswith(".")]
        assert store.list()[-1].epoch == 4
        check_saving_at_once(tmp_path / "copy", scenario)
    assert seen == {"new", ""}


def check_saving_at_once(directory, scenario):
    """Save at the same position in a new process, without cleaning."""
    store, warnings = make_store(directory)
    assert scenario(store) is not None
    state = store.load().state
    assert (state["tag"], contents(state)) == ("new", CONTENTS["new"])
    assert warnings == []


def test_save_scenarios_link_or_copy_parts(directory):
    """Scenarios share parts by hard links, or copy them if links are not available."""
    for scenario, n_links, n_written in ((new_epoch, 2, 1), (without_links, 0, 3)):
        store, _ = make_store(directory, keep_last=9)
        path = scenario(store)
        new = new_files(path, path.with_name("epoch_000002"))
        assert (len(inodes(path)) - len(new), len(new)) == (n_links, n_written)


@pytest.mark.parametrize("mode", ["before", "dead"])
@pytest.mark.parametrize("scenario", everyday(1, SCENARIOS))
def test_full_disk_keeps_the_last_checkpoint_with_a_warning(directory, tmp_path, scenario, mode):
    """On a full disk, a warning names the last valid checkpoint, and training continues."""
    # Operations that need space. Removals work, but renaming fails if it is the only fault.
    operations = ("open", "mkdir", "fsync", *(("rename", "replace") if mode == "before" else ()))
    counted = Faults(-1, FULL, names=operations)
    attempt(directory, scenario, counted)
    outcomes = []
    for k in range(counted.calls):
        restored(directory, tmp_path / "backup")
        before = names(directory)
        result, warnings = attempt(directory, scenario, Faults(k, FULL, mode, operations))
        outcomes.append(result)
        store, none = make_store(directory)
        if result is None:
            assert len(warnings) == 1
            assert "No space left on device" in warnings[0]
            assert "last valid checkpoint is epoch_000002" in warnings[0]
            assert names(directory) == before
            assert loaded(store) == (2, "")
        # Otherwise only an operation after completion of the new checkpoint failed.
        assert contents(store.load().state) == CONTENTS["" if result is None else "new"]
        assert none == []
        assert save(store, 4) is not None
    assert outcomes[0] is None
    assert outcomes.count(None) >= 7


def test_file_size_limit_leaves_the_directory_unchanged(directory):
    """A write that exceeds the file size limit leaves the directory unchanged."""
    resource = pytest.importorskip("resource")
    store, warnings = make_store(directory)
    before = names(directory)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    state = {"epoch": 3, "weight": torch.zeros(100_000)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        assert store.save(state, Position(3, 30, 0)) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(warnings) == 1
    assert "File too large" in warnings[0]
    assert names(directory) == before
    assert store.save(state, Position(3, 30, 0)) is not None


def test_removed_run_directory_is_not_recreated(tmp_path, capsys):
    """A removed run directory is not created again, since its disk may be unmounted."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    store = CheckpointStore(run_dir / "checkpoints")
    assert save(store, 1) is not None
    shutil.rmtree(run_dir)
    assert save(store, 2) is None
    assert not run_dir.exists()
    text = capsys.readouterr().err
    assert text.startswith("warning: checkpoint ")
    assert text.count("\n") == 1
    assert "no checkpoint exists; training continues" in text
    run_dir.mkdir()
    assert save(store, 3) is not None


def test_unremovable_old_checkpoints_are_a_warning(directory, monkeypatch):
    """If old checkpoints cannot be removed, a warning is printed and the new one is kept."""
    rename, rmtree = os.rename, shutil.rmtree

    def fail(path, *args, **kwargs):
        if "epoch_000001" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        return (rename if args else rmtree)(path, *args, **kwargs)

    monkeypatch.setattr(os, "rename", fail)
    monkeypatch.setattr(shutil, "rmtree", fail)
    store, warnings = make_store(directory)
    assert save(store, 3) is not None
    assert len(warnings) == 1
    assert "epoch_000001 could not be removed: [Errno 13] Permission denied" in warnings[0]
    assert loaded(store) == (3, "")


def test_unreadable_checkpoints_are_kept(directory, monkeypatch):
    """Checkpoints that cannot be read now are kept, since the disk may recover."""
    fstat = os.fstat
    bad = (directory / "epoch_000001" / MANIFEST).stat().st_ino

    def fail(descriptor):
        if fstat(descriptor).st_ino == bad:
            raise OSError(errno.EIO, "Input/output error")
        return fstat(descriptor)

    store, warnings = make_store(directory, keep_last=1)
    monkeypatch.setattr(os, "fstat", fail)
    save(store, 3)
    assert names(directory) == ["epoch_000001", "epoch_000003", "latest"]
    monkeypatch.undo()
    save(store, 4)
    assert names(directory) == ["epoch_000004", "latest"]
    assert warnings == []


# -- leftovers -----------------------------------------------------------------------------------


def dead_pid():
    """Return the id of a process that has exited."""
    process = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL)
    process.wait()
    return process.pid


def test_temporary_files_of_dead_processes_are_removed(directory):
    """Temporary files of dead processes are removed; all other files are kept."""
    dead = dead_pid()
    for pid in (dead, os.getpid(), os.getppid(), 10**20):
        (directory / f".tmp-epoch_000009-{pid}").mkdir()
        (directory / f".tmp-epoch_000009-{pid}" / STATE).write_bytes(b"x")
    (directory / f".latest.{dead}.tmp").write_bytes(b"x")
    (directory / "notes.txt").write_text("mine")
    (directory / ".hidden").write_text("mine")
    store, warnings = make_store(directory)
    assert loaded(store) == (2, "")
    store.clean()
    alive = os.getppid()
    assert names(directory) == [
        *(".hidden", f".tmp-epoch_000009-{alive}"),
        *("epoch_000001", "epoch_000002", "latest", "notes.txt"),
    ]
    assert warnings == []
