"""Kills whole `maze-run` processes at random moments, and compares what they leave.

    python tests/resuming/kill_at_random.py --runner local --kills 20 [--only sac]

Every case of `test_killed_runs.py` is trained for longer, once undisturbed on `dev`, and once on
the given runner (IMPALA on `dev`, where alone it can be repeated), killed with SIGKILL so many
times at random moments and continued each time. One line per case says whether all rows of metrics
and all state, weights included, are equal. Takes about 25 minutes.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from continued_runs import words
from killed_runs import PARTS, differences, final_state, rows_of
from test_killed_runs import CASES, OTHERS, settings

LONGER = {"ppo": 92_160, "a2c": 92_160, "sac": 5_000, "impala": 92_160, "es": 60_000, "bc": 0}
"""Steps of a run by algorithm; BC has epochs."""
COMMAND = [sys.executable, "-c", "import sys; from maze_train.cli import main; sys.exit(main())"]


def start(run_dir: Path, case: str, runner: str) -> subprocess.Popen[bytes]:
    """Start or continue a run."""
    given = settings(run_dir, case, runner)
    longer: dict[str, Any] = {"total_steps": LONGER[given["algorithm"]]}
    if given["algorithm"] in ("es", "bc"):
        longer["algorithm.n_epochs"] = 400 * (given["algorithm"] == "bc")
    argv = [*COMMAND, *words({**given, **longer})]
    path = f"{PARTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})


def kill_at_random(process: subprocess.Popen[bytes], run_dir: Path, rng: random.Random) -> bool:
    """Kill a run some time after it began to train; returns whether it was running still."""
    lock = run_dir / ".lock"
    while process.poll() is None:
        if lock.exists() and lock.read_text().startswith(f"pid {process.pid} "):
            break
        time.sleep(0.005)
    try:
        process.wait(rng.random() * rng.choice([0.3, 1.0, 2.0, 3.0]))
        return False
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True


def main() -> None:
    """Kill and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runner", default="dev")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", default="", help="part of the names of the cases")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    for case in [case for case in (*CASES, *OTHERS) if arguments.only in case]:
        with tempfile.TemporaryDirectory() as folder:
            straight, killed = Path(folder, "straight"), Path(folder, "killed")
            assert start(straight, case, "dev").wait() == 0
            kills = 0
            while True:
                process = start(killed, case, arguments.runner)
                if kills == arguments.kills or not kill_at_random(process, killed, rng):
                    assert process.wait() == 0
                    break
                kills += 1
            rows = "equal" if rows_of(straight) == rows_of(killed) else "DIFFERENT"
            state = differences(final_state(straight), final_state(killed))
            told = "equal" if not state else f"DIFFERENT: {state[:3]}"
            print(f"{case:24} {kills} kills  rows {rows}  state {told}", flush=True)


if __name__ == "__main__":
    main()
