"""Fraction of training time spent on writing a checkpoint after every epoch.

    python benchmarks/checkpointing.py [--rounds 3]

Runs each problem alternately with and without checkpoints. Prints the time in checkpoints
(`time/checkpoint_s`), the ratio of the wall times, and the size of a checkpoint.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from maze_train import train

PROBLEMS: dict[str, dict[str, Any]] = {
    "CartPole-v1, PPO": {"env": "CartPole-v1", "algorithm": "ppo", "total_steps": 60_000},
    "CartPole-v1, A2C": {"env": "CartPole-v1", "algorithm": "a2c", "total_steps": 60_000},
    "HalfCheetah-v5, PPO": {"env": "HalfCheetah-v5", "algorithm": "ppo", "total_steps": 60_000},
    "ALE/Pong-v5, PPO": {
        "env": "ALE/Pong-v5",
        "algorithm": "ppo",
        "algorithm.epoch_length": 2,
        "total_steps": 8_192,
        "evaluation.max_episode_steps": 100,
    },
}


def run(settings: dict[str, Any], interval: int) -> tuple[float, float, float]:
    """Return wall time, seconds in checkpoints, and the last checkpoint's size in MB of a run."""
    with tempfile.TemporaryDirectory(dir=".") as directory:
        started = time.perf_counter()
        result = train(
            **settings,
            run_dir=f"{directory}/run",
            seed=0,
            **{
                "checkpoint.interval": interval,
                "tracking.progress": "quiet",
                "tracking.plot": False,
                "evaluation.n_episodes": 2,
            },
        )
        seconds = time.perf_counter() - started
        files = Path(directory, "run", "checkpoints").glob(f"epoch_{result.summary.epochs:06d}/*")
        megabytes = sum(path.stat().st_size for path in files) / 1e6
        return seconds, sum(r.get("time/checkpoint_s", 0.0) for r in result.history), megabytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    print(f"{'':22} {'epoch':>9} {'checkpoint':>11} {'share':>7} {'with/without':>13} {'size':>9}")
    for name, settings in PROBLEMS.items():
        if arguments.only not in name:
            continue
        with_, without, inside, size = [], [], [], 0.0
        for _ in range(arguments.rounds):
            seconds, saving, size = run(settings, 1)
            with_.append(seconds)
            inside.append(saving / seconds)
            without.append(run(settings, 0)[0])
        share = statistics.median(inside)
        ratio = statistics.median(with_) / statistics.median(without)
        seconds = statistics.median(with_)
        print(
            f"{name:22} {'':>9} {1e3 * share * seconds:8.1f} ms {share:7.2%} {ratio:13.3f} "
            f"{size:6.2f} MB"
        )


if __name__ == "__main__":
    main()
