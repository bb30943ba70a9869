"""A run on a disk without space."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from short_runs import file_contents, rows, short_run

from maze_train import Callback, ConfigError, TrainingView, train
from maze_train.core.files import read_json

if TYPE_CHECKING:
    from collections.abc import Iterator

FILLER = Path("filler")
SETTINGS = {
    "env": {"id": "CartPole-v1"},
    "total_steps": 800,
    "checkpoint.interval": 1,
    "tracking.progress": "lines",
    "tracking.tensorboard": False,
}


class FillsDisk(Callback):
    """Callback that fills the disk after four updates."""

    def on_update_end(self, run: TrainingView) -> None:
        """Write a file until the disk is full."""
        if run.progress.updates == 4:
            with FILLER.open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(4096))


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Change to a file system of 2 MiB; skip the test where mounting is not allowed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no small file system: {getattr(error, 'stderr', '') or error}")
    monkeypatch.chdir(disk)
    yield
    monkeypatch.undo()
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_reported_and_loses_nothing(
    small_disk: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run names missing files; with space again, it continues from the last checkpoint."""
    short_run("../whole", **SETTINGS)
    missing = short_run("run", **SETTINGS, callbacks=[FillsDisk()]).missing
    assert {"run.log", "metrics.csv", "summary.json", "the last checkpoint"} <= {*missing}
    told = capfd.readouterr().err
    assert told.count("run.log cannot be written: [Errno 28] No space left on device") == 1
    assert "the last valid checkpoint is epoch_000001; training continues" in told
    before = file_contents("run")
    with pytest.raises(ConfigError, match=r"cannot be written: .* No space left on device"):
        train(resume="run", callbacks=[])
    assert file_contents("run") == before
    os.unlink(FILLER)
    assert not train(resume="run", callbacks=[]).missing
    assert rows("run") == rows("../whole")
    assert len(read_json(Path("run/environment.json"))["starts"]) == 2
