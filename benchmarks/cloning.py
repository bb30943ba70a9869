"""Training throughput of behavioral cloning, compared with the library imitation.

    python benchmarks/cloning.py [--rounds 3] [--seconds 3] [--only cartpole] [--sizes 32 256]
        [--batch-sizes 32 256 2048] [--peers-python imitation=VENV/bin/python]

All libraries train on the same 102,400 recorded transitions, from the same initial weights of a
network with two hidden tanh layers, with the same updates: mean negative log-likelihood minus 0.001
times the entropy, Adam with learning rate 0.001, no weight decay, reshuffled every epoch, one
thread. `cartpole` has 4 observations and 2 discrete actions, `halfcheetah` 17 observations and 6
continuous actions. The data are random, so no environment is needed. `imitation` uses the critic of
the library's policies (as large as the policy, evaluated but not trained); `imitation-slim` uses a
critic without hidden layers. The peer runs in a separate virtual environment. The scripts in
`cloning_peers/` describe what each one logs.

Each measurement runs in a new process; the libraries take turns. It warms up for 200 updates and
then trains for about the given time, without start-up. The table shows medians over the rounds:
samples per second of wall time; CPU microseconds per update (more reliable on a loaded machine);
the ratio of samples per second to each peer in the same round; and the loss over all transitions
before training and after the 200 updates, to verify that all libraries do the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "cloning_peers"
CASES = ("cartpole", "halfcheetah")
MOST_SECONDS = 300.0
"""Time limit in seconds for start-up, warm-up and overtime."""


@dataclass(frozen=True)
class Side:
    """A library: its Python interpreter, script and mode."""

    python: str
    script: str
    way: str = ""


SIDES = {
    "ours": Side("ours", "maze_train_bc.py"),
    "imitation": Side("imitation", "imitation_bc.py"),
    "imitation-slim": Side("imitation", "imitation_bc.py", "slim"),
}
PEERS = [name for name in SIDES if name != "ours"]


@dataclass(frozen=True)
class Setting:
    """A workload; one row of the table per library."""

    case: str
    size: int
    batch_size: int

    @property
    def title(self) -> str:
        """The first columns of the table."""
        return f"{self.case:11} {self.size:5} {self.batch_size:6}"


def run_script(command: list[str], limit: float) -> str:
    """Run a script in `cloning_peers/` with one thread and return its output.

    Raises:
        RuntimeError: If it fails or takes longer than `limit` seconds; contains its messages.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(str(error)) from error
    if result.returncode:
        end = "\n".join(result.stderr.splitlines()[-5:])
        raise RuntimeError(f"{command[1]} ended with {result.returncode}\n{end}")
    return result.stdout


def run_process(
    name: str, setting: Setting, folder: Path, arguments: argparse.Namespace
) -> dict[str, float] | None:
    """Run one measurement in a new process; on failure, print a message and return None."""
    side = SIDES[name]
    command = [arguments.pythons[side.python], str(SCRIPTS / side.script)]
    command += ["--folder", str(folder / setting.case), "--case", setting.case]
    command += ["--size", str(setting.size), "--batch-size", str(setting.batch_size)]
    command += ["--seconds", str(arguments.seconds), "--way", side.way]
    try:
        output = run_script(command, 4 * arguments.seconds + MOST_SECONDS)
        result: dict[str, float] = json.loads(output.splitlines()[-1])
    except (RuntimeError, ValueError, IndexError) as error:
        print(f"{name}, {setting.title}: left out: {error}", flush=True)
        return None
    return result


def ratio(rounds: list[dict[str, dict[str, float] | None]], name: str, peer: str) -> float | None:
    """Return the median ratio of samples per second of two libraries in the same round, if any."""
    ratios = [
        own["samples_per_second"] / other["samples_per_second"]
        for found in rounds
        if (own := found[name]) is not None and (other := found.get(peer)) is not None
    ]
    return statistics.median(ratios) if ratios else None


def compare(
    setting: Setting, names: list[str], folder: Path, arguments: argparse.Namespace
) -> None:
    """Measure all libraries in turn and print their rows of the table."""
    rounds = [
        {name: run_process(name, setting, folder, arguments) for name in names}
        for _ in range(arguments.rounds)
    ]
    for name in names:
        results = [result for found in rounds if (result := found[name]) is not None]
        if not results:
            continue
        rate, time_us, before, after = (
            statistics.median(result[key] for result in results)
            for key in ("samples_per_second", "cpu_us_per_update", "loss_before", "loss_after")
        )
        line = f"{setting.title} {name:15} {rate:11,.0f} {time_us:9,.0f}"
        for peer in PEERS:
            value = ratio(rounds, name, peer)
            line += f"{'-':>7}" if value is None else f"{value:7.2f}"
        print(f"{line} {before:8.4f} {after:8.4f}", flush=True)


def present_sides(pythons: dict[str, str]) -> list[str]:
    """Return the libraries that can be measured; print a line if the peer is missing."""
    python = pythons.get("imitation")
    if python is None:
        print("imitation is left out: give --peers-python imitation=VENV/bin/python")
        return ["ours"]
    if not Path(python).exists():
        print(f"imitation is left out: there is no {python}")
        return ["ours"]
    return list(SIDES)


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 256])
    # Divisors of the number of transitions, because the peer drops incomplete batches.
    batch_sizes = (32, 64, 128, 256, 512, 1024, 2048)
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", default=[32, 256, 2048], choices=batch_sizes
    )
    parser.add_argument("--peers-python", nargs="+", default=[], metavar="PEER=PYTHON")
    arguments = parser.parse_args()
    given = (pair.split("=", 1) for pair in arguments.peers_python)
    arguments.pythons = {"ours": sys.executable, **dict(given)}
    names = present_sides(arguments.pythons)
    print(
        f"{'data':11} {'units':>5} {'batch':>6} {'side':15} {'samples/s':>11} {'CPU us':>9}"
        f"{'ratio':>7}{'slim':>7} {'loss':>8} {'trained':>8}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for case in [arguments.only] if arguments.only else CASES:
            command = [sys.executable, str(SCRIPTS / "recordings.py"), "--case", case]
            command += ["--folder", str(folder / case), "--sizes", *map(str, arguments.sizes)]
            run_script(command, MOST_SECONDS)
            for size in arguments.sizes:
                for batch_size in arguments.batch_sizes:
                    compare(Setting(case, size, batch_size), names, folder, arguments)


if __name__ == "__main__":
    main()
