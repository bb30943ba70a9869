"""Training throughput of off-policy algorithms, compared with Stable-Baselines3.

    python benchmarks/off_policy.py [--algorithm sac] [--rounds 3] [--seconds 12] [--threads 1]

Both libraries use the same settings. SAC and TD3: one gradient step on 256 transitions per
environment step, two hidden layers of 256 units, target updates after each policy update, tuned
temperature. DQN: one gradient step on 64 transitions per 4 environment steps, two hidden layers of
64 units, no double Q-learning, target updates every 250 gradient steps, gradient norm clipped to
10. All: Adam, one environment. Each measurement runs in a new process; the libraries take turns.
Warm-up, start-up, evaluation and file output are excluded for both. The table shows medians over
the rounds and the median ratio of consecutive measurements, also by CPU time of the main process,
which depends less on the machine's load but excludes workers.
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
ENVS = {"sac": "HalfCheetah-v5", "td3": "HalfCheetah-v5", "dqn": "CartPole-v1"}
OURS = {
    "dqn": {"double_q": False, "epsilon": 0.05},
    "td3": {"lr": 1e-3},
}
PEERS = {
    "dqn": {
        "target_update_interval": 1_000,
        "exploration_initial_eps": 0.05,
        "learning_rate": 3e-4,
    },
    "td3": {
        "policy_kwargs": {"net_arch": [256, 256]},
        "action_noise": 0.1,
    },
}
"""Settings that differ from the defaults; DQN networks are 64x64 in both libraries."""


def measure_ours(side: str, algorithm: str, env: str, seconds: float) -> dict[str, float]:
    """Return steps per second of this package, and the fraction of time in updates."""
    from maze_train import Statistics, build_run, load_config

    runner_name, _, precision = side.partition(" ")
    config = load_config(
        {
            "env": env,
            "algorithm": algorithm,
            **{f"algorithm.{key}": value for key, value in OURS.get(algorithm, {}).items()},
            "algorithm.initial_buffer_size": STARTS,
            "algorithm.replay_buffer_size": BUFFER,
            "algorithm.matmul_precision": precision or "highest",
            "runner": runner_name,
            "runner.concurrency": 1,
            "seed": 0,
        }
    )
    with build_run(config) as run:
        trainer = run.trainer
        statistics = Statistics()
        for _ in range(STARTS + WARM_UP):
            trainer.update_once(trainer.progress(), statistics)
        statistics.clear()
        steps, started, used = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - started < seconds:
            steps += trainer.update_once(trainer.progress(), statistics)
        elapsed, used = time.perf_counter() - started, time.process_time() - used
    times = statistics.reduce()
    update = times["time/update_s"] / elapsed
    return {"rate": steps / elapsed, "cpu_rate": steps / used, "update": update}


def measure_peer(algorithm: str, env: str, seconds: float) -> dict[str, float]:
    """Return steps per second of Stable-Baselines3 with the same settings."""
    import numpy as np
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.noise import NormalActionNoise

    class Clock(BaseCallback):
        """Starts after the warm-up, stops after the given time."""

        started = elapsed = begun = used = 0.0
        steps = 0

        def _on_step(self) -> bool:
            if self.num_timesteps == STARTS + WARM_UP:
                self.started, self.begun = time.perf_counter(), time.process_time()
            if self.started:
                self.elapsed = time.perf_counter() - self.started
                self.used = time.process_time() - self.begun
                self.steps = self.num_timesteps - STARTS - WARM_UP
            return not self.started or self.elapsed < seconds

    envs = make_vec_env(env, 1, seed=0)
    settings = dict(PEERS.get(algorithm, {}))
    if "action_noise" in settings:
        zeros = np.zeros(envs.action_space.shape)
        settings["action_noise"] = NormalActionNoise(zeros, zeros + settings["action_noise"])
    model = getattr(stable_baselines3, algorithm.upper())(
        "MlpPolicy",
        envs,
        buffer_size=BUFFER,
        learning_starts=STARTS,
        batch_size=64 if algorithm == "dqn" else 256,
        device="cpu",
        seed=0,
        **settings,
    )
    clock = Clock()
    model.learn(10**9, callback=clock)
    rates = {"rate": clock.steps / clock.elapsed, "cpu_rate": clock.steps / clock.used}
    return {**rates, "update": float("nan")}


def run_process(side: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Run one measurement in a new process."""
    command = [sys.executable, __file__, "--one", side, "--env", arguments.env]
    command += ["--algorithm", arguments.algorithm, "--seconds", str(arguments.seconds)]
    command += ["--threads", str(arguments.threads)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def compare(arguments: argparse.Namespace) -> None:
    """Measure both libraries in turn and print the table."""
    rounds = [
        {side: run_process(side, arguments) for side in arguments.sides}
        for _ in range(arguments.rounds)
    ]
    print(f"{arguments.algorithm}, {arguments.env}, {arguments.threads} thread(s)")
    print(f"{'side':14} {'steps/s':>9} {'ratio':>6} {'cpu':>6}   share of time in updates")
    for side in arguments.sides:
        rate = statistics.median(r[side]["rate"] for r in rounds)
        ratio, cpu = (
            statistics.median(r[side][key] / r["SB3"][key] for r in rounds)
            for key in ("rate", "cpu_rate")
        )
        update = statistics.median(r[side]["update"] for r in rounds)
        print(f"{side:14} {rate:9,.1f} {ratio:6.2f} {cpu:6.2f}   {update:.0%}", flush=True)


def main() -> None:
    """Run the comparison, or a single measurement in a subprocess."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch, on both sides")
    parser.add_argument("--algorithm", choices=ENVS, default="sac")
    parser.add_argument("--env", default="")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--one", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.env = arguments.env or ENVS[arguments.algorithm]
    if arguments.one is None:
        compare(arguments)
        return
    import torch

    torch.set_num_threads(arguments.threads)
    if arguments.one == "SB3":
        result = measure_peer(arguments.algorithm, arguments.env, arguments.seconds)
    else:
        result = measure_ours(arguments.one, arguments.algorithm, arguments.env, arguments.seconds)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
