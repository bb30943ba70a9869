"""Probes return the result of a function or None, and leave no processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from maze_train.core.files import process_runs
from maze_train.run.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PATIENCE_S = 30.0
HERE = os.getpid()


def prints() -> dict[str, Any]:
    """Write to every stream, also below Python."""
    print("printed")
    os.write(2, b"written")
    return {"elsewhere": os.getpid() != HERE, "in": sys.stdin is None or os.read(0, 1)}


def raises() -> NoReturn:
    """Exit as sys.exit() does."""
    raise SystemExit("no")


def dies() -> None:
    """Die as if memory were exhausted."""
    os.kill(os.getpid(), signal.SIGKILL)


def is_not_sent() -> Any:
    """Return an object that cannot be pickled."""
    return lambda: None


def test_a_result(capfd: pytest.CaptureFixture[str]) -> None:
    """Printed text is discarded; the result remains available."""
    with Probe(prints, PATIENCE_S) as probe:
        assert probe.result(PATIENCE_S) == {"elsewhere": True, "in": b""}
        assert probe.is_over
    assert probe.result() == {"elsewhere": True, "in": b""}
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("function", [raises, dies, is_not_sent])
def test_a_failure_is_no_result(function: Callable[[], Any]) -> None:
    """If the function fails, the result is None and the process has exited."""
    with Probe(function, PATIENCE_S) as probe:
        assert probe.result(PATIENCE_S) is None
        assert probe.is_over
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("ends", ["time is over", "closed", "finished"])
def test_what_it_starts_ends_with_it(tmp_path: Path, ends: str) -> None:
    """Child processes are killed at the time limit, on close, and after the function returns."""
    note = tmp_path / "pid"

    def function() -> str:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        note.with_suffix(".tmp").write_text(str(child.pid))
        note.with_suffix(".tmp").rename(note)
        if ends != "finished":
            time.sleep(PATIENCE_S)
        return ends

    with Probe(function, 2.0 if ends == "time is over" else PATIENCE_S) as probe:
        if ends == "closed":
            while not note.exists():
                assert probe.result(0.01) is None
        else:
            assert probe.result(PATIENCE_S) == ("finished" if ends == "finished" else None)
            assert probe.is_over
    deadline = time.monotonic() + PATIENCE_S
    while process_runs(int(note.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)
