"""End of a real `maze-run`: exit codes, messages, clean-up."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from leftovers import left_in, members

pytestmark = pytest.mark.slow

# Like the installed command; `python -m` would add the working directory to the path.
MAZE_RUN = [
    sys.executable,
    "-c",
    "import sys; sys.path.remove(''); from maze_train.cli import main; sys.exit(main())",
]
PARTS = Path(__file__).parent / "helpers"
ENDLESS = (
    "algorithm=ppo", "env=CartPole-v1", "total_steps=0", "runner.max_wall_time_s=120",
    "algorithm.epoch_length=1", "evaluation.n_episodes=0", "run_dir=run", "tracking.plot=false",
)  # fmt: skip
LOCAL = ("runner=local", "runner.n_workers=2")
STARTUP_S = 90.0


class Process:
    """`maze-run` in its own process group, with output that is read while it runs."""

    def __init__(self, cwd: Path, argv: tuple[str, ...], terminal: bool = False) -> None:
        self.output = ""
        self.started = time.monotonic()
        self.read_end, write_end = pty.openpty() if terminal else os.pipe()
        self.popen = subprocess.Popen(
            [*MAZE_RUN, *argv],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(PARTS), "TERM": "xterm"},
            stdin=subprocess.DEVNULL,
            stdout=write_end,
            stderr=write_end,
            start_new_session=True,
        )
        os.close(write_end)

    def read(self, seconds: float) -> bool:
        """Read output for at most `seconds`; return False at its end."""
        if not select.select([self.read_end], [], [], seconds)[0]:
            return True
        try:
            chunk = os.read(self.read_end, 65536)
        except OSError:  # raised by a pseudo-terminal without a writer
            return False
        self.output += chunk.decode(errors="replace")
        return bool(chunk)

    def wait_for(self, pattern: str) -> float:
        """Read until the output matches a pattern; return the seconds since the start."""
        while not re.search(pattern, self.output):
            assert time.monotonic() - self.started < STARTUP_S, self.output
            assert self.read(0.1), self.output
        return time.monotonic() - self.started

    def end(self) -> int:
        """Read to the end of the output; return the exit code."""
        while self.read(1.0):
            assert time.monotonic() - self.started < STARTUP_S, self.output
        return self.popen.wait(STARTUP_S)

    def stop_reading(self) -> None:
        """Close the end of the pipe or terminal from which the output is read."""
        os.close(self.read_end)
        self.read_end = os.open(os.devnull, os.O_RDONLY)

    def kill(self) -> None:
        """Kill all remaining processes."""
        for pid in members(self.popen.pid):
            os.kill(pid, signal.SIGKILL)
        self.popen.wait()
        os.close(self.read_end)


Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts `maze-run` in an empty directory; kill its processes later."""
    processes: list[Process] = []

    def start(*argv: str, terminal: bool = False) -> Process:
        processes.append(Process(tmp_path, argv, terminal))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


def stop_reason(folder: Path) -> str:
    """Return the stop reason in the summary of the run in `folder`."""
    return str(json.loads((folder / "run/summary.json").read_text())["stop_reason"])


DEV = ("runner=dev",)


@pytest.mark.exhaustive
def test_how_a_run_ends_by_itself(start: Start, tmp_path: Path) -> None:
    """The outcome is printed, modules in the working directory are found, no process remains."""
    (tmp_path / "near.py").write_text("from own_envs import SpacesEnv as Near\n")
    env = ("env=default", "env._target_=near.Near", "total_steps=2048")
    process = start(*ENDLESS, *LOCAL, *env)
    assert process.end() == 0
    assert re.search(r"stopped +total_steps", process.output)
    assert stop_reason(tmp_path) == "total_steps"
    assert left_in(process.popen.pid) == {}


@pytest.mark.parametrize(
    ("runner", "number", "code", "terminal"),
    [
        (LOCAL, signal.SIGINT, 130, False),
        pytest.param(  # as sent by a cluster
            *(LOCAL, signal.SIGTERM, 143, False), marks=pytest.mark.exhaustive
        ),
        pytest.param(DEV, signal.SIGINT, 130, True, marks=pytest.mark.exhaustive),
    ],
    ids=["ctrl-c, pipe", "sigterm", "ctrl-c, terminal"],
)
def test_a_run_that_is_asked_to_end(
    start: Start, tmp_path: Path, runner: tuple[str, ...], number: int, code: int, terminal: bool
) -> None:
    """All processes end in 5 s, with a summary and without a traceback."""
    process = start(*ENDLESS, *runner, terminal=terminal)
    patience = max(5.0, process.wait_for(r"epoch +[1-9]"))  # a busy machine is slow at the end, too
    if number == signal.SIGINT:
        os.killpg(process.popen.pid, number)
    else:
        process.popen.terminate()
    asked = time.monotonic()
    assert process.end() == code
    assert time.monotonic() - asked < patience
    assert stop_reason(tmp_path) == "interrupted"
    assert f"maze-run: {'interrupted' if code == 130 else 'terminated'}" in process.output
    assert "Traceback" not in process.output
    assert left_in(process.popen.pid) == {}
    if terminal:  # the hidden cursor is visible again
        assert process.output.rindex("\x1b[?25h") > process.output.rindex("\x1b[?25l")


@pytest.mark.exhaustive
def test_a_terminal_that_is_closed(start: Start, tmp_path: Path) -> None:
    """After SIGHUP and without a terminal, the run saves and exits with code 129."""
    process = start(*ENDLESS, *LOCAL, terminal=True)
    process.wait_for(r"epoch +[1-9]")
    process.stop_reading()
    os.killpg(process.popen.pid, signal.SIGHUP)
    assert process.popen.wait(STARTUP_S) == 128 + signal.SIGHUP
    assert stop_reason(tmp_path) == "interrupted"
    epochs = json.loads((tmp_path / "run/summary.json").read_text())["epochs"]
    assert (tmp_path / "run/checkpoints/latest").read_text().startswith(f"epoch_{epochs:06d}")
    assert left_in(process.popen.pid) == {}


@pytest.mark.exhaustive
def test_a_reader_that_goes_away(start: Start, tmp_path: Path) -> None:
    """A run whose standard output is closed, as by `| head -1`, continues to its end."""
    process = start(*ENDLESS, "total_steps=20000")
    process.wait_for(r"epoch +[1-9]")
    process.stop_reading()
    assert process.popen.wait(STARTUP_S) == 0
    assert stop_reason(tmp_path) == "total_steps"


@pytest.mark.exhaustive
def test_the_main_process_is_killed(start: Start) -> None:
    """The workers notice that the main process has died, and exit."""
    process = start(*ENDLESS, *LOCAL)
    process.wait_for(r"epoch +[1-9]")
    assert len(members(process.popen.pid)) >= 3
    process.popen.kill()
    process.popen.wait()
    assert left_in(process.popen.pid) == {}


UNGUARDED = """
import maze_train
print("begin", flush=True)
short = {"total_steps": 64, "evaluation.n_episodes": 0}
maze_train.train("CartPole-v1", "a2c", run_dir="first", **short)
print("middle", flush=True)
local = {"runner": "local", "runner.n_workers": 2}
maze_train.train("CartPole-v1", "a2c", run_dir="second", **local, **short)
"""


@pytest.mark.exhaustive
def test_a_script_without_guard(tmp_path: Path) -> None:
    """Workers, which import the script, do not train; one message explains the missing guard."""
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    ended = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120.0
    )
    assert ended.returncode == 1
    assert (ended.stdout.count("begin"), ended.stdout.count("middle")) == (3, 1)
    assert ended.stderr.count("Traceback") == 1
    assert 'needs the guard `if __name__ == "__main__":`' in ended.stderr.splitlines()[-1]
