"""Throughput of evolution strategies, compared with EvoTorch and sb3-contrib's ARS.

    python benchmarks/evolution.py [--rounds 1] [--seconds 10] [--only long] [--workers 1 2]
        [--sides ours sb3] [--peers-python evotorch=VENV/bin/python sb3=VENV/bin/python]

All libraries start from the same weights of the same network (two hidden layers of 64 tanh units,
deterministic actions) and evaluate populations of 64: 32 perturbations and their mirror images, one
episode each. The optimizer's steps are so small that the policy and the episode lengths do not
change: `short` is CartPole-v1 with about 12 steps, `long` is a CartPole in which every episode has
200 steps. EvoTorch has two modes for single environments, `GymNE` (loop) and `VecGymNE` (batch). In
a third mode, `native`, `VecGymNE` uses gymnasium's vectorised CartPole; few environments have such
a version, and the other libraries cannot use it.

With one worker, everything runs in one process, otherwise in additional worker processes. Each peer
runs its script in `evolution_peers/` in a separate virtual environment. Each measurement runs in a
new process with one PyTorch thread per process; the libraries take turns. Whole updates after a
warm-up are counted, without start-up. The table shows medians over the rounds, and medians of the
ratios of steps per second to the best peer of the same round: among the modes for single
environments, and among all.
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

from asynchronous import GRACE_SECONDS, MOST_SECONDS, adopt_orphans, end_descendants

PEERS = Path(__file__).parent / "evolution_peers"
SETTINGS = ("short", "long")


@dataclass(frozen=True)
class Side:
    """A library: its Python interpreter, script and mode."""

    python: str
    script: str
    way: str = ""


SIDES = {
    "ours": Side("ours", "maze_train_es.py"),
    "evotorch-loop": Side("evotorch", "evotorch_pgpe.py", "loop"),
    "evotorch-batch": Side("evotorch", "evotorch_pgpe.py", "batch"),
    "evotorch-native": Side("evotorch", "evotorch_pgpe.py", "native"),
    "sb3-ars": Side("sb3", "sb3_ars.py"),
}
PYTHONS = tuple(dict.fromkeys(side.python for side in SIDES.values()))


def run_process(
    name: str, setting: str, workers: int, arguments: argparse.Namespace
) -> dict[str, float] | None:
    """Run one measurement in a new process; on failure, print a message and return None."""
    side = SIDES[name]
    command = [arguments.pythons[side.python], str(PEERS / side.script), "--setting", setting]
    command += ["--workers", str(workers), "--seconds", str(arguments.seconds), "--way", side.way]
    with tempfile.TemporaryDirectory() as folder:
        # Files instead of pipes, which leftover processes would keep open.
        output, log = Path(folder) / "output", Path(folder) / "log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder}
        has_ended = False
        try:
            with output.open("w") as out, log.open("w") as err:
                limit = arguments.seconds + MOST_SECONDS
                subprocess.run(
                    command, check=True, stdout=out, stderr=err, env=environment, timeout=limit
                )
            result: dict[str, float] = json.loads(output.read_text().splitlines()[-1])
            has_ended = True
        except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
            end = "\n".join(log.read_text().splitlines()[-5:])
            print(f"{name}, {setting}, {workers} worker(s): left out: {error!r}\n{end}", flush=True)
            return None
        finally:
            end_descendants(GRACE_SECONDS if has_ended else 0.0)
    return result


def is_single(name: str) -> bool:
    """Return whether a library steps single environments."""
    return SIDES[name].way != "native"


def ratio(
    rounds: list[dict[str, dict[str, float] | None]], name: str, among: list[str]
) -> float | None:
    """Return the median ratio of steps per second to the best peer of the same round, if any."""
    ratios = []
    for found in rounds:
        result = found[name]
        peers = [r["steps_per_second"] for peer in among if (r := found[peer]) is not None]
        if result is not None and peers:
            ratios.append(result["steps_per_second"] / max(peers))
    return statistics.median(ratios) if ratios else None


def compare(setting: str, workers: int, names: list[str], arguments: argparse.Namespace) -> None:
    """Measure all libraries in turn and print their rows of the table."""
    rounds = [
        {name: run_process(name, setting, workers, arguments) for name in names}
        for _ in range(arguments.rounds)
    ]
    peers = [name for name in names if name != "ours"]
    for name in names:
        results = [result for found in rounds if (result := found[name]) is not None]
        if not results:
            continue
        steps, episodes, length = (
            statistics.median(result[key] for result in results)
            for key in ("steps_per_second", "episodes_per_second", "episode_length")
        )
        line = f"{setting:7} {workers:7} {name:15} {steps:9,.0f} {episodes:10,.0f} {length:7.1f}"
        for among in (list(filter(is_single, peers)), peers):
            value = ratio(rounds, name, among)
            line += f"{'-':>8}" if value is None else f"{value:8.2f}"
        print(line, flush=True)


def present_sides(arguments: argparse.Namespace) -> list[str]:
    """Return the selected libraries that can be measured; print a line for each missing Python.

    The Python interpreters of the peers are in `arguments.pythons`.
    """
    for python in PYTHONS:
        if python not in arguments.pythons:
            print(f"{python} is left out: give --peers-python {python}=VENV/bin/python")
        elif not Path(arguments.pythons[python]).exists():
            print(f"{python} is left out: there is no {arguments.pythons[python]}")
            del arguments.pythons[python]
    return [
        name
        for name, side in SIDES.items()
        if side.python in arguments.pythons and side.python in arguments.sides
    ]


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--only", choices=SETTINGS)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sides", choices=PYTHONS, nargs="+", default=list(PYTHONS))
    parser.add_argument("--peers-python", nargs="+", default=[], metavar="PEER=PYTHON")
    arguments = parser.parse_args()
    given = (pair.split("=", 1) for pair in arguments.peers_python)
    arguments.pythons = {"ours": sys.executable, **dict(given)}
    adopt_orphans()
    names = present_sides(arguments)
    print(
        f"{'setting':7} {'workers':>7} {'side':15} {'steps/s':>9} {'episodes/s':>10} {'length':>7}"
        f"{'single':>8}{'all':>8}",
        flush=True,
    )
    for setting in [arguments.only] if arguments.only else SETTINGS:
        for workers in arguments.workers:
            compare(setting, workers, names, arguments)


if __name__ == "__main__":
    main()
