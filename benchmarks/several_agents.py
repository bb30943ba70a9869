"""Steps per second of PPO with several agents beside Stable-Baselines3, same settings, in one run.

    python benchmarks/several_agents.py [--rounds 3] [--seconds 20]

simple_spread_v3 with three agents that share one policy, two hidden layers of 64 units, 8
environments, rollouts of 128 steps, 10 passes in minibatches of 256 turns. The peer trains on
SuperSuit's vector environment of the same 24 agents (`pip install supersuit`). Rates are steps of
the environments, in each of which three agents act. Each measurement is a fresh process with one
thread, ours and the peer's in turn, and warms up for one update. The table shows medians over the
rounds and the median of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

ENVS, STEPS, AGENTS = 8, 128, 3
SIDES = ("SB3", "dev", "local")


def measure_ours(runner: str, seconds: float) -> float:
    """Steps per second of this package."""
    from maze_train import Statistics, TrainerServices, load_config
    from maze_train.config.pipeline import prepare
    from maze_train.runners.base import TrainingRunner

    config = load_config(
        {
            "env": {"_target_": "mpe2.simple_spread_v3.parallel_env", "kwargs": {"N": AGENTS}},
            "algorithm": "ppo",
            "algorithm.n_rollout_steps": STEPS,
            "algorithm.n_optimization_epochs": 10,
            "algorithm.batch_size": 256,
            "runner": runner,
            "runner.concurrency": ENVS,
            "seed": 0,
        }
    )
    with TrainingRunner(prepare(config)) as training:
        trainer = training.builder.build(TrainerServices())
        trainer.update_once(trainer.progress(), Statistics())
        steps, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            steps += trainer.update_once(trainer.progress(), Statistics())
        return steps / (time.perf_counter() - started)


def measure_peer(seconds: float) -> float:
    """Steps per second of Stable-Baselines3 with SuperSuit."""
    import supersuit
    from mpe2 import simple_spread_v3
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback

    class Clock(BaseCallback):
        """Starts after one update; stops at the end of a rollout."""

        started = 0.0
        before = 0

        def _on_step(self) -> bool:
            return not self.started or time.perf_counter() - self.started < seconds

        def _on_rollout_start(self) -> None:
            if self.num_timesteps and not self.started:
                self.started, self.before = time.perf_counter(), self.num_timesteps

    env: Any = simple_spread_v3.parallel_env(N=AGENTS)
    env = supersuit.pettingzoo_env_to_vec_env_v1(env)
    env = supersuit.concat_vec_envs_v1(env, ENVS, num_cpus=0, base_class="stable_baselines3")
    settings = {"n_steps": STEPS, "batch_size": 256, "n_epochs": 10, "device": "cpu"}
    model, clock = PPO("MlpPolicy", env, **settings), Clock()
    model.learn(10**9, callback=clock)
    elapsed = time.perf_counter() - clock.started
    return (clock.num_timesteps - clock.before) / AGENTS / elapsed


def run_process(side: str, seconds: float) -> float:
    """One measurement in a fresh process."""
    command = [sys.executable, __file__, "--one", side, "--seconds", str(seconds)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(json.loads(output.splitlines()[-1]))


def main() -> None:
    """Compare, or take one measurement."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", choices=SIDES)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    if arguments.one:
        import torch

        torch.set_num_threads(1)
        seconds = arguments.seconds
        is_peer = arguments.one == "SB3"
        print(measure_peer(seconds) if is_peer else measure_ours(arguments.one, seconds))
        return
    rounds = [
        {side: run_process(side, arguments.seconds) for side in arguments.sides}
        for _ in range(arguments.rounds)
    ]
    first = arguments.sides[0]
    print(f"simple_spread_v3, {AGENTS} agents, {ENVS} environments")
    for side in arguments.sides:
        rate = statistics.median(found[side] for found in rounds)
        ratio = statistics.median(found[side] / found[first] for found in rounds)
        print(f"{side:<8} {rate:>10,.1f} steps/s {ratio:>6.2f}")


if __name__ == "__main__":
    main()
