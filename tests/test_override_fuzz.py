"""No override of any command ends in a traceback, in an abort, or in a long wait."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COUNTS = {"train": 80, "rollout": 20, "compare": 15, "export": 10, "push": 12, "search": 8}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("command", COUNTS)
def test_no_override_is_a_surprise(tmp_path: Path, command: str) -> None:
    """Random values of random keys: done, or one message and exit code 1 or 2."""
    script = Path(__file__).parent / "helpers" / "override_fuzz.py"
    ended = subprocess.run(
        [sys.executable, script, command, "0", str(COUNTS[command])],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.stdout == ""
    last = (tmp_path / "command.txt").read_text(encoding="utf-8")
    assert ended.returncode == 0, f"ended in {last}:\n{ended.stderr}"
