"""Training in processes that are killed, and comparison of the resulting files."""

from __future__ import annotations

import csv
import multiprocessing
import os
import signal
import sys
import time
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from leftovers import left_in

from maze_train.core.state import StatePart

PARTS = Path(__file__).parent
CONTEXT = multiprocessing.get_context("forkserver")
# Children are forked from a process with all imports, so they start in milliseconds.
CONTEXT.set_forkserver_preload(
    [
        "maze_train.run.runner",
        "maze_train.algorithms.actor_critic.trainer",
        "maze_train.algorithms.impala.trainer",
        "maze_train.algorithms.off_policy.trainer",
        "tensorboard.summary.writer",
    ]
)

# Clocks, and values that must differ.
NOT_COMPARED = {"wall_time_s", "_epoch_began_s"}

MOMENTS: dict[str, tuple[str, str]] = {
    "rollout": ("maze_train.collect.collector", "as_arrays"),
    "playing": ("maze_train.core.signals:Interruption", "check"),
    "update": ("maze_train.learner.learner:Learner", "apply_gradients"),
    "evaluation": ("maze_train.collect.row_policies:BatchRows", "act"),
    "writing": ("maze_train.tracking.tracker:Tracker", "write"),
    "saving": ("maze_train.training.checkpoints", "write_synced"),
    "renaming": ("maze_train.training.checkpoints", "fsync_directory"),
}
CALLS = {
    "rollout": 70,
    "playing": 20,
    "update": 3,
    "evaluation": 10,
    "writing": 1,
    "saving": 2,
    "renaming": 2,
}
"""Call in each phase of a run during which the process is killed."""


def kill_at(moment: str, call: int) -> None:
    """Kill this process with SIGKILL at the given call of the function of `MOMENTS[moment]`."""
    where, name = MOMENTS[moment]
    module, _, owner_name = where.partition(":")
    owner: Any = __import__(module, fromlist=["_"])
    owner = getattr(owner, owner_name) if owner_name else owner
    original, calls = getattr(owner, name), 0

    @wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            print("killed", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def train_here(settings: dict[str, Any], output: str, moment: str = "", call: int = 0) -> None:
    """Train in this process; optionally kill it at a call."""
    sys.path.insert(0, str(PARTS))
    with open(output, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    if moment:
        kill_at(moment, call)
    from maze_train import train

    train(**settings)


def run_in_child(settings: dict[str, Any], moment: str = "", call: int = 0) -> int:
    """Train in a child process; return its exit code, -9 after SIGKILL."""
    output = f"{settings['run_dir']}.txt"
    child = CONTEXT.Process(target=train_here, args=(settings, output, moment, call))
    child.start()
    child.join(120)
    code = child.exitcode
    assert code in (0, -9), f"exit code {code}:\n{Path(output).read_text()}"
    return code


def rows_of(run_dir: Path) -> list[dict[str, str]]:
    """Return the rows of metrics.csv without times."""
    with (run_dir / "metrics.csv").open() as file:
        return [
            {name: cell for name, cell in row.items() if not name.startswith("time/")}
            for row in csv.DictReader(file)
        ]


def final_state(run_dir: Path) -> dict[str, Any]:
    """Return the state in the last checkpoint."""
    from maze_train.training.checkpoints import CheckpointStore

    checkpoint = CheckpointStore(run_dir / "checkpoints").load()
    assert checkpoint is not None
    return checkpoint.state


def differences(one: Any, other: Any, path: str = "state") -> list[str]:
    """Return the bitwise differences of two states; clocks are ignored."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        keys = [key for key in one if key not in NOT_COMPARED]
        keys = [key for key in keys if not str(key).startswith("time/")]
        return [d for key in keys for d in differences(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return [f"{path}: {len(one)} and {len(other)} entries"]
        pairs = enumerate(zip(one, other, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, f"{path}[{i}]")]
    if isinstance(one, StatePart) and isinstance(other, StatePart):
        return differences(one.read(), other.read(), path)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        one, other = one.numpy(), other.numpy()
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        same = one.shape == other.shape and one.tobytes() == other.tobytes()
    else:
        same = type(one) is type(other) and repr(one) == repr(other)
    return [] if same else [f"{path}: {str(one)[:80]} and {str(other)[:80]}"]


def assert_equal_runs(run_dir: Path, other: Path) -> None:
    """Check that metrics, final state and best policy are identical."""
    assert rows_of(run_dir) == rows_of(other)
    found = differences(final_state(run_dir), final_state(other))
    assert found == [], found
    best, other_best = run_dir / "best" / "policy.pt", other / "best" / "policy.pt"
    assert differences(torch.load(best), torch.load(other_best)) == []


def command_here(argv: list[str], output: str, prepare: str) -> None:
    """Run `maze-run` as the leader of a new session, after calling a function of `faults`."""
    os.setsid()
    sys.path.insert(0, str(PARTS))
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    if prepare:
        import faults

        getattr(faults, prepare)()
    from maze_train.cli import main

    sys.exit(main(argv))


def maze_run(output: Path, *argv: str, prepare: str = "", signals: tuple[Any, ...] = ()) -> Any:
    """Run `maze-run` in a child process, and check that no process remains.

    Args:
        output: File for the output of the command.
        *argv: Arguments of the command.
        prepare: Name of a function in `faults` that the child calls first.
        signals: Pairs of a file and a signal that all processes receive once the file exists.

    Returns:
        Exit code and output.
    """
    child = CONTEXT.Process(target=command_here, args=(list(argv), str(output), prepare))
    child.start()
    for path, number in signals:
        wait_for(path, child)
        os.killpg(child.pid or 0, number)
    child.join(120)
    assert child.exitcode is not None, output.read_text()
    assert left_in(child.pid or 0) == {}
    return child.exitcode, output.read_text()


def wait_for(path: Path, child: Any) -> None:
    """Wait until a file exists."""
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline and child.is_alive():
        time.sleep(0.01)
