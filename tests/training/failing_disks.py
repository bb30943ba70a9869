"""Stores of checkpoints on a disk that fails, in a process that ends in the middle."""

from __future__ import annotations

import errno
import io
import os
import shutil
from contextlib import suppress

import pytest

from maze_train.training.checkpoints import CheckpointStore

FULL = OSError(errno.ENOSPC, "No space left on device")


def make_store(directory, **settings):
    """A store and the list of its warnings."""
    warnings = []
    return CheckpointStore(directory, warn=warnings.append, **settings), warnings


def names(directory):
    """What is in a directory, hidden things included."""
    return sorted(path.name for path in directory.iterdir())


def flip(offset, mask):
    """Flips bits of one byte."""

    def damage(path, whole):
        data = bytearray(whole)
        data[offset] ^= mask
        path.write_bytes(bytes(data))

    return damage


class Killed(BaseException):
    """The process ended here."""


OPERATIONS = ("replace", "rename", "link", "fsync", "unlink", "rmdir", "mkdir")


class Faults:
    """Counts what is done to the disk, and lets the k-th of it fail.

    Args:
        k: Which one fails; -1: none.
        error: What is raised.
        mode: before, after: the operation is not done, or done; dead: nothing is done from then on.
        names: Operations that are counted.
    """

    def __init__(self, k, error, mode="before", names=(*OPERATIONS, "open")):
        self.k, self.error, self.mode, self.names = k, error, mode, names
        self.calls = 0

    def patch(self, monkeypatch):
        """Put the faults between the program and the disk."""
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
        """The operation with its fault."""

        def call(*args, **kwargs):
            self.calls += 1
            hit = self.calls - 1 == self.k or (self.mode == "dead" and 0 <= self.k < self.calls)
            if hit and self.mode == "after":
                with suppress(OSError):  # it may fail by itself
                    result = function(*args, **kwargs)
                    if name == "open":
                        result.close()
            if hit:
                if name == "fsync" and os.path.isfile(f"/proc/self/fd/{args[0]}"):
                    # What was not synced may be lost.
                    os.ftruncate(args[0], os.fstat(args[0]).st_size // 2)
                raise self.error
            return function(*args, **kwargs)

        return call


def attempt(directory, scenario, faults, **settings):
    """Run the scenario with faults; returns what it returned, or the exception, and warnings."""
    store, warnings = make_store(directory, **settings)
    with pytest.MonkeyPatch.context() as monkeypatch:
        faults.patch(monkeypatch)
        try:
            result = scenario(store)
        except Killed as killed:
            result = killed
    return result, warnings


def restored(directory, backup):
    """The directory as it was."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(backup, directory)
