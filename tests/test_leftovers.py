"""What one test leaves behind does not disturb the next, wherever the tests are started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FOLDERS = (Path(__file__).parent, Path(__file__).parent / "helpers")
TESTS = """
import multiprocessing, os, signal, time
import pytest

def test_interruption():
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)

@pytest.mark.parametrize("fails", [True, False])
def test_leaves_a_process(fails):
    multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600.0,)).start()
    assert not fails

@pytest.mark.usefixtures("no_file_is_left")
@pytest.mark.parametrize("closes", [True, False])
def test_leaves_a_pipe(closes):
    for descriptor in os.pipe():
        if closes:
            os.close(descriptor)

def test_neighbour():
    assert multiprocessing.active_children() == []
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_each_test_looks_after_itself(tmp_path: Path) -> None:
    """Started with Ctrl-C ignored: leftovers are ended, and told of the test that made them."""
    (tmp_path / "test_some.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-rA"],
        cwd=tmp_path,
        env={"PYTHONPATH": os.pathsep.join([*map(str, FOLDERS)])},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = {line.split(" - ")[0] for line in done.stdout.splitlines() if "test_some.py::" in line}
    assert told == {
        "PASSED test_some.py::test_interruption",
        "FAILED test_some.py::test_leaves_a_process[True]",
        "ERROR test_some.py::test_leaves_a_process[True]",
        "PASSED test_some.py::test_leaves_a_process[False]",
        "ERROR test_some.py::test_leaves_a_process[False]",
        "PASSED test_some.py::test_leaves_a_pipe[True]",
        "PASSED test_some.py::test_leaves_a_pipe[False]",
        "ERROR test_some.py::test_leaves_a_pipe[False]",
        "PASSED test_some.py::test_neighbour",
    }, done.stdout
