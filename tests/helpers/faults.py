"""Faults of the machine, injected into the calling process."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import torch

from maze_train.algorithms.ppo.learner import PPOLearner
from maze_train.algorithms.sac.learner import SACLearner
from maze_train.tracking import tracker
from maze_train.tracking.tracker import Tracker
from maze_train.training import checkpoints

RUN = Path("run")


def disk_full() -> None:
    """Simulate a full disk from the second checkpoint on."""
    original = checkpoints.write_synced

    def write(path: Path, data: bytes) -> None:
        if "epoch_00000" in str(path) and "epoch_000001" not in str(path):
            path.write_bytes(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        original(path, data)

    checkpoints.write_synced = write


def disk_full_for_a_while() -> None:
    """Simulate a full disk for the rows and checkpoints of the second and third epoch."""
    full = False
    write_line, write_file = tracker.csv_text, checkpoints.write_synced

    def line(*args: Any, **kwargs: Any) -> str:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_line(*args, **kwargs)

    def write(path: Path, data: bytes) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_file(path, data)

    def switch(row: Any) -> None:
        nonlocal full
        full = row["epoch"] in (2, 3)

    tracker.csv_text = line
    checkpoints.write_synced = write
    original = Tracker.write

    def write_row(self: Tracker, row: Any) -> None:
        switch(row)
        original(self, row)

    Tracker.write = write_row  # type: ignore[method-assign]


def after_epoch(epoch: int, function: Any) -> None:
    """Call a function once, after the row of an epoch is written."""
    original = Tracker.write

    def write(self: Tracker, row: Any) -> None:
        original(self, row)
        if row["epoch"] == epoch:
            function()

    Tracker.write = write  # type: ignore[method-assign]


def remove(path: Path) -> None:
    """Remove a directory atomically, even if another process writes into it."""
    path.rename("removed")
    shutil.rmtree("removed", ignore_errors=True)


def checkpoints_vanish() -> None:
    """Remove the checkpoints while the run continues."""
    after_epoch(3, lambda: remove(RUN / "checkpoints"))


def run_dir_vanishes() -> None:
    """Remove the run directory while the run continues."""
    after_epoch(3, lambda: remove(RUN))


def run_dir_is_moved() -> None:
    """Rename the run directory while the run continues."""
    after_epoch(3, lambda: RUN.rename("moved"))


def run_dir_is_half_removed() -> None:
    """Remove some files of the run directory, as an interrupted `rm` does."""

    def begin() -> None:
        for path in (RUN / ".lock", RUN / "config.yaml", RUN / "metrics.csv"):
            path.unlink()
        shutil.rmtree(RUN / "policies")

    after_epoch(3, begin)


def read_only() -> None:
    """Make checkpoints impossible to write, even for root."""

    def replace() -> None:
        remove(RUN / "checkpoints")
        (RUN / "checkpoints").write_text("not a directory")

    after_epoch(3, replace)


def nan_gradients() -> None:
    """Multiply the value loss of one minibatch of the eighth update by NaN."""
    original, calls = PPOLearner.value_loss, 0

    def value_loss(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        loss = original(self, *args)
        bad = self.weights_seq_no == 7 and calls % 2 == 0
        return loss * torch.nan if bad else loss

    PPOLearner.value_loss = value_loss  # type: ignore[method-assign]


def ctrl_c_in_a_gradient_step() -> None:
    """Send SIGINT to all processes in the twentieth gradient step of SAC."""
    original, calls = SACLearner.policy_loss, 0

    def policy_loss(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 20:
            print("asked to end", flush=True)
            os.killpg(0, signal.SIGINT)
        return original(*args)

    SACLearner.policy_loss = policy_loss  # type: ignore[method-assign]
