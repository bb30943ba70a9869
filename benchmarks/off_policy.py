"""Environment steps per second of SAC against Stable-Baselines3, same settings, in one run.

    python benchmarks/off_policy.py [--rounds 3] [--seconds 12] [--threads 1]

One gradient step on 256 transitions per environment step, two hidden layers of 256 units, Adam,
targets moved after each step, temperature tuned, one environment. Each measurement is a fresh
process, ours and the peer's in turn. A measurement warms up for 300 gradient steps; start-up,
evaluation and files are outside of it on both sides. The table shows medians over the rounds and
the median of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

WARM_UP = 300
STARTS = 1_000
BUFFER = 100_000
SIDES = ("SB3", "dev", "local", "dev medium", "local medium")


def measure_ours(side: str, env: str, seconds: float) -> dict[str, float]:
    """Steps per second of this package, and the share of time in updates."""
    from maze_train.runners.factory import build_runner

    from maze_train import Statistics, TrainerServices, load_config

    runner_name, _, precision = side.partition(" ")
    config = load_config(
        {
            "env": env,
            "algorithm": "sac",
            "algorithm.initial_buffer_size": STARTS,
            "algorithm.replay_buffer_size": BUFFER,
            "algorithm.matmul_precision": precision or "highest",
            "runner": runner_name,
            "runner.concurrency": 1,
            "seed": 0,
        }
    )
    with build_runner(config) as runner:
        trainer = runner.builder.build(TrainerServices())
        statistics = Statistics()
        for _ in range(STARTS + WARM_UP):
            trainer.update_once(trainer.progress(), statistics)
        statistics.clear()
        steps, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            steps += trainer.update_once(trainer.progress(), statistics)
        elapsed = time.perf_counter() - started
    times = statistics.reduce()
    return {"rate": steps / elapsed, "update": times["time/update_s"] / elapsed}


def measure_peer(env: str, seconds: float) -> dict[str, float]:
    """Steps per second of Stable-Baselines3 with the same settings."""
    from stable_baselines3 import SAC
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    class Clock(BaseCallback):
        """Starts after the warm-up, stops after the given time."""

        started = elapsed = 0.0
        steps = 0

        def _on_step(self) -> bool:
            if self.num_timesteps == STARTS + WARM_UP:
                self.started = time.perf_counter()
            if self.started:
                self.elapsed = time.perf_counter() - self.started
                self.steps = self.num_timesteps - STARTS - WARM_UP
            return not self.started or self.elapsed < seconds

    model = SAC(
        "MlpPolicy",
        make_vec_env(env, 1, seed=0),
        buffer_size=BUFFER,
        learning_starts=STARTS,
        device="cpu",
        seed=0,
    )
    clock = Clock()
    model.learn(10**9, callback=clock)
    return {"rate": clock.steps / clock.elapsed, "update": float("nan")}


def run_process(side: str, arguments: argparse.Namespace) -> dict[str, float]:
    """One measurement in a fresh process."""
    command = [sys.executable, __file__, "--one", side, "--env", arguments.env]
    command += ["--seconds", str(arguments.seconds), "--threads", str(arguments.threads)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def compare(arguments: argparse.Namespace) -> None:
    """Measure all sides in turn and print the table."""
    rounds = [
        {side: run_process(side, arguments) for side in SIDES} for _ in range(arguments.rounds)
    ]
    print(f"{arguments.env}, {arguments.threads} thread(s)")
    print(f"{'side':14} {'steps/s':>9} {'ratio':>6}   share of time in updates")
    for side in SIDES:
        rate = statistics.median(r[side]["rate"] for r in rounds)
        ratio = statistics.median(r[side]["rate"] / r["SB3"]["rate"] for r in rounds)
        update = statistics.median(r[side]["update"] for r in rounds)
        print(f"{side:14} {rate:9,.1f} {ratio:6.2f}   {update:.0%}", flush=True)


def main() -> None:
    """Compare, or measure once when called by itself."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch, on both sides")
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--one", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is None:
        compare(arguments)
        return
    import torch

    torch.set_num_threads(arguments.threads)
    if arguments.one == "SB3":
        result = measure_peer(arguments.env, arguments.seconds)
    else:
        result = measure_ours(arguments.one, arguments.env, arguments.seconds)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
