"""Checkpoints for tests of damage: a store, failing disks, killed processes."""

from __future__ import annotations

import errno
import io
import os
import shutil
from contextlib import suppress

import numpy as np
import pytest
import torch

from maze_train.core.state import StatePart
from maze_train.training.checkpoints import CheckpointStore
from maze_train.training.config import CheckpointConfig
from maze_train.training.outcome import Position

MANIFEST, STATE = "MANIFEST.json", "state.pt"

FULL = OSError(errno.ENOSPC, "No space left on device")


class Segments:
    """State with large parts; records which parts are read."""

    def __init__(self, n=3, size=4):
        self.size = size
        self.values = [float(i) for i in range(n)]
        self.versions = [0] * n
        self.changes = 0
        self.reads = []

    def change(self, i, value):
        """Change a part; its version changes, too."""
        self.changes += 1
        self.values[i], self.versions[i] = float(value), self.changes

    def part(self, i):
        """Return the current state of one part."""

        def read():
            self.reads.append(i)
            return {"column": np.full(self.size, self.values[i]), "rows": (i, self.size)}

        return StatePart(str(self.versions[i]), read)

    def state_dict(self):
        """Return the parts within lists and dicts."""
        parts = [self.part(i) for i in range(len(self.values))]
        return {"changes": self.changes, "segments": {"first": parts[0], "more": tuple(parts[1:])}}

    def load_state_dict(self, state):
        """Restore the parts and their versions."""
        found = [state["segments"]["first"], *state["segments"]["more"]]
        self.changes = state["changes"]
        self.versions = [int(part.version) for part in found]
        self.values = contents(state)


def contents(state):
    """Return the value of each part of a loaded state."""
    values = []
    for i, part in enumerate((state["segments"]["first"], *state["segments"]["more"])):
        content = part.read()
        assert content["rows"] == (i, len(content["column"]))
        assert len(set(content["column"])) == 1
        values.append(float(content["column"][0]))
    return values


def save(store, epoch, owner=None, *, updates=None, tag="", **more):
    """Save a checkpoint after `epoch` epochs of 10 updates; `tag` identifies it."""
    updates = epoch * 10 if updates is None else updates
    state = {"epoch": epoch, "tag": tag, "weight": torch.full((2,), float(epoch))}
    state |= {} if owner is None else owner.state_dict()
    return store.save(state, Position(epoch, updates, updates * 8, **more))


def saved(directory):
    """Return a store with epochs 1 and 2, and the owner of three parts; only part 1 changed."""
    store, _ = make_store(directory)
    owner = Segments()
    save(store, 1, owner)
    owner.change(1, 50)
    save(store, 2, owner)
    owner.reads.clear()
    return store, owner


def loaded(store):
    """Load a checkpoint; return its epoch and tag, or None."""
    found = store.load()
    if found is None:
        return None
    assert found.epoch == found.state["epoch"]
    assert found.state["weight"].tolist() == [float(found.epoch)] * 2
    return found.epoch, found.state["tag"]


def inodes(path):
    """Return the inodes of the part files of a checkpoint by name."""
    return {file.name: file.stat().st_ino for file in path.glob("part_*")}


def new_files(path, earlier):
    """Return the names of part files that an earlier checkpoint does not share."""
    known = set(inodes(earlier).values())
    return [name for name, inode in inodes(path).items() if inode not in known]


def refuse_links(*args, **kwargs):
    """Simulate a file system without hard links."""
    raise OSError(errno.EPERM, "Operation not permitted")


def make_store(directory, **settings):
    """Return a store and the list of its warnings."""
    warnings = []
    kept = {key: settings.pop(key) for key in ("keep_last", "keep_best") if key in settings}
    config = CheckpointConfig(**kept)
    return CheckpointStore(directory, config, warn=warnings.append, **settings), warnings


def names(directory):
    """Return the names of all files in a directory, including hidden files."""
    return sorted(path.name for path in directory.iterdir())


def flip(offset, mask):
    """Return a function that flips bits of one byte of a file."""

    def damage(path, whole):
        data = bytearray(whole)
        data[offset] ^= mask
        path.write_bytes(bytes(data))

    return damage


class Killed(BaseException):
    """Simulated end of the process."""


OPERATIONS = ("replace", "rename", "link", "fsync", "unlink", "rmdir", "mkdir")


class Faults:
    """Disk operations that are counted and of which the k-th fails.

    Args:
        k: Index of the failing operation; -1: none.
        error: Exception that is raised.
        mode: before, after: the operation is not done, or done; dead: all later ones fail, too.
        names: Operations that are counted.
    """

    def __init__(self, k, error, mode="before", names=(*OPERATIONS, "open")):
        self.k, self.error, self.mode, self.names = k, error, mode, names
        self.calls = 0

    def patch(self, monkeypatch):
        """Patch the disk operations."""
        for name in set(self.names) - {"open"}:
            monkeypatch.setattr(os, name, self.wrap(name, getattr(os, name)))
        if "open" in self.names:
            original = io.open

            def opened(file, mode="r", *args, **kwargs):
                function = self.wrap("open", original) if set(mode) & {"w", "x"} else original
                return function(file, mode, *args, **kwargs)

            monkeypatch.setattr(io, "open", opened)
        return self

    def wrap(self, name, function):
        """Return the operation with its fault."""

        def call(*args, **kwargs):
            self.calls += 1
            hit = self.calls - 1 == self.k or (self.mode == "dead" and 0 <= self.k < self.calls)
            if hit and self.mode == "after":
                with suppress(OSError):  # the operation may fail by itself
                    result = function(*args, **kwargs)
                    if name == "open":
                        result.close()
            if hit:
                if name == "fsync" and os.path.isfile(f"/proc/self/fd/{args[0]}"):
                    # Unsynced data may be lost.
                    os.ftruncate(args[0], os.fstat(args[0]).st_size // 2)
                raise self.error
            return function(*args, **kwargs)

        return call


def attempt(directory, scenario, faults, **settings):
    """Run the scenario with faults; return its result or the exception, and the warnings."""
    store, warnings = make_store(directory, **settings)
    with pytest.MonkeyPatch.context() as monkeypatch:
        faults.patch(monkeypatch)
        try:
            result = scenario(store)
        except Killed as killed:
            result = killed
    return result, warnings


def restored(directory, backup):
    """Restore the directory from a backup."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(backup, directory)
