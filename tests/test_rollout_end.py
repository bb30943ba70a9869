"""End of a real `maze-run rollout`: exit codes, complete files, clean-up."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import time
from typing import TYPE_CHECKING

import pytest
from leftovers import left_in
from test_process_end import Start, start

from maze_train.data.datasets import open_dataset

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["start"]

pytestmark = pytest.mark.slow

ENDLESS = (
    "-cn", "rollout", "policy=random", "env=CartPole-v1", "n_episodes=10_000_000",
    "output_dir=out", "record=true", "max_episode_steps=20",
)  # fmt: skip
LOCAL = ("runner=local", "runner.n_workers=2")


def numbers(folder: Path) -> list[int]:
    """Return the episode numbers in evaluation.csv, whose rows are all complete."""
    with (folder / "out/evaluation.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert all(None not in row.values() for row in rows)
    return [int(row["number"]) for row in rows]


@pytest.mark.exhaustive
def test_ctrl_c(start: Start, tmp_path: Path) -> None:
    """Exit code 130 within 5 s, complete files of all finished episodes, no process left.

    Finished episodes are included even if an episode with a smaller number is not finished.
    """
    process = start(*ENDLESS, *LOCAL)
    patience = max(5.0, process.wait_for(r"episode +[1-9]\d*/"))  # as in `test_process_end.py`
    os.killpg(process.popen.pid, signal.SIGINT)
    asked = time.monotonic()
    assert process.end() == 130
    assert time.monotonic() - asked < patience
    assert left_in(process.popen.pid) == {}
    found = numbers(tmp_path)
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert found == sorted(set(found))
    assert len(found) > 0
    assert (summary["stop_reason"], summary["episodes"]) == ("interrupted", len(found))
    assert len(open_dataset(tmp_path / "out/trajectories")) >= len(found)
    output = tmp_path / "out"
    stopped = f"stopped after {len(found):,} of 10,000,000 episodes; results: {output}"
    assert stopped in process.output
    assert "maze-run: interrupted" in process.output
    assert "Traceback" not in process.output


@pytest.mark.exhaustive
def test_a_process_that_is_killed(start: Start, tmp_path: Path) -> None:
    """The file contains the rows of all finished episodes; the last row may be incomplete."""
    process = start(*ENDLESS)
    process.wait_for(r"episode +[1-9]\d*/")
    os.kill(process.popen.pid, signal.SIGKILL)
    assert process.end() == -signal.SIGKILL
    header, *rows, _ = (tmp_path / "out/evaluation.csv").read_text().split("\n")
    assert header.startswith("number,seed,return,")
    assert [int(row.split(",")[0]) for row in rows] == list(range(len(rows)))
    shown = re.findall(r"episode +(\d+)/", process.output)[-1]
    assert len(rows) >= int(shown) > 0
    assert not (tmp_path / "out/summary.json").exists()
