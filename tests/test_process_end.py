"""End of a real `maze-run`: exit codes, messages, clean-up."""

from __future__ import annotations

import csv
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

from maze_train.data.datasets import open_dataset

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

    def wait_for(self, pattern: str) -> None:
        """Read until the output matches a pattern."""
        while not re.search(pattern, self.output):
            assert time.monotonic() - self.started < STARTUP_S, self.output
            assert self.read(0.1), self.output

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
def test_finished_run_leaves_no_process(start: Start, tmp_path: Path) -> None:
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
def test_signals_end_a_run_with_summary_and_exit_code(
    start: Start, tmp_path: Path, runner: tuple[str, ...], number: int, code: int, terminal: bool
) -> None:
    """All processes end, with a summary and without a traceback."""
    process = start(*ENDLESS, *runner, terminal=terminal)
    process.wait_for(r"epoch +[1-9]")
    if number == signal.SIGINT:
        os.killpg(process.popen.pid, number)
    else:
        process.popen.terminate()
    assert process.end() == code
    assert stop_reason(tmp_path) == "interrupted"
    assert f"maze-run: {'interrupted' if code == 130 else 'terminated'}" in process.output
    assert "Traceback" not in process.output
    assert left_in(process.popen.pid) == {}
    if terminal:  # the hidden cursor is visible again
        assert process.output.rindex("\x1b[?25h") > process.output.rindex("\x1b[?25l")


@pytest.mark.exhaustive
def test_sighup_saves_and_exits_with_129(start: Start, tmp_path: Path) -> None:
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
def test_run_continues_when_stdout_is_closed(start: Start, tmp_path: Path) -> None:
    """A run whose standard output is closed, as by `| head -1`, continues to its end."""
    process = start(*ENDLESS, "total_steps=20000")
    process.wait_for(r"epoch +[1-9]")
    process.stop_reading()
    assert process.popen.wait(STARTUP_S) == 0
    assert stop_reason(tmp_path) == "total_steps"


@pytest.mark.exhaustive
def test_workers_exit_when_the_main_process_is_killed(start: Start) -> None:
    """The workers notice that the main process has died, and exit."""
    process = start(*ENDLESS, *LOCAL)
    process.wait_for(r"epoch +[1-9]")
    assert len(members(process.popen.pid)) >= 3
    process.popen.kill()
    process.popen.wait()
    assert left_in(process.popen.pid) == {}


EVALUATE = (
    "rollout", "policy=random", "env=CartPole-v1", "n_episodes=10_000_000", "output_dir=out",
    "record=true", "max_episode_steps=20",
)  # fmt: skip


@pytest.mark.exhaustive
def test_interrupted_rollout_keeps_finished_episodes(start: Start, tmp_path: Path) -> None:
    """Finished episodes are complete, even if one with a smaller number is not finished."""
    process = start(*EVALUATE, *LOCAL)
    process.wait_for(r"episode +[1-9]\d*/")
    os.killpg(process.popen.pid, signal.SIGINT)
    assert process.end() == 130
    assert left_in(process.popen.pid) == {}
    rows = list(csv.DictReader((tmp_path / "out/evaluation.csv").read_text().splitlines()))
    assert all(None not in row.values() for row in rows)
    numbers = [int(row["number"]) for row in rows]
    assert numbers == sorted(set(numbers))
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert (summary["stop_reason"], summary["episodes"]) == ("interrupted", len(rows))
    assert len(open_dataset(tmp_path / "out/trajectories")) >= len(rows) > 0
    assert "maze-run: interrupted" in process.output
    assert "Traceback" not in process.output


@pytest.mark.exhaustive
def test_killed_rollout_keeps_rows_of_finished_episodes(start: Start, tmp_path: Path) -> None:
    """The last row may be incomplete; there is no summary."""
    process = start(*EVALUATE)
    process.wait_for(r"episode +[1-9]\d*/")
    process.popen.kill()
    assert process.end() == -signal.SIGKILL
    _, *rows, _ = (tmp_path / "out/evaluation.csv").read_text().split("\n")
    assert [int(row.split(",")[0]) for row in rows] == list(range(len(rows)))
    assert len(rows) >= int(re.findall(r"episode +(\d+)/", process.output)[-1]) > 0
    assert not (tmp_path / "out/summary.json").exists()


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
def test_spawned_workers_of_an_unguarded_script_raise(tmp_path: Path) -> None:
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
