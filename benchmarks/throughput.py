"""Training throughput of PPO, compared with Stable-Baselines3 at the same settings.

    python benchmarks/throughput.py [--rounds 3] [--seconds 12] [--only CartPole-v1] [--picture]

Each measurement runs in a new process; the libraries take turns, so that changes of the machine's
speed affect both. A measurement warms up for two updates, then trains for about the given time;
start-up, evaluation and file output are excluded for both. The table shows medians over the rounds
and the median ratio of consecutive measurements. If all workloads are measured, the results are
written to `benchmarks/throughput.json` and drawn for the documentation; `--picture` only draws.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "benchmarks" / "throughput.json"
PICTURE = ROOT / "docs" / "images" / "speed.png"


@dataclass(frozen=True)
class Setting:
    """One workload: PPO on 8 environments, with 64x64 tanh networks, or a CNN on Atari games."""

    env: str
    n_rollout_steps: int
    batch_size: int
    n_optimization_epochs: int
    concurrency: int = 8
    is_atari: bool = False
    threads: int = 1


SETTINGS = {
    "CartPole-v1": Setting("CartPole-v1", 128, 256, 4),
    "HalfCheetah-v5": Setting("HalfCheetah-v5", 256, 64, 10),
    "ALE/Pong-v5": Setting("ALE/Pong-v5", 128, 256, 4, is_atari=True, threads=2),
}
VECTOR_ENVS = ("dev", "local")


def measure_ours(
    setting: Setting, runner_name: str, seconds: float, threads: int
) -> dict[str, float]:
    """Return steps per second of this package, and the times for collection and updates."""
    import torch

    from maze_train import Statistics, build_run, load_config

    config = load_config(
        {
            "env": setting.env,
            "algorithm": "ppo",
            "algorithm.n_rollout_steps": setting.n_rollout_steps,
            "algorithm.batch_size": setting.batch_size,
            "algorithm.n_optimization_epochs": setting.n_optimization_epochs,
            "algorithm.entropy_coef": 0.0,
            "runner": runner_name,
            "runner.concurrency": setting.concurrency,
            "seed": 0,
        }
    )
    torch.set_num_threads(threads)
    with build_run(config) as run:
        trainer = run.trainer
        statistics = Statistics()
        for _ in range(2):
            trainer.update_once(trainer.progress(), statistics)
        statistics.clear()
        steps, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            steps += trainer.update_once(trainer.progress(), statistics)
        elapsed = time.perf_counter() - started
    times = statistics.reduce()
    return {
        "steps_per_second": steps / elapsed,
        "collect_share": times["time/collect_s"] / elapsed,
        "rollout_mb": trainer.collector.obs_nbytes / 1e6,
    }


def measure_peer(
    setting: Setting, runner_name: str, seconds: float, threads: int
) -> dict[str, float]:
    """Return steps per second of Stable-Baselines3 with the same settings."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack

    class Clock(BaseCallback):
        """Starts after two rollouts with their updates, stops after the given time."""

        started = steps = rollouts = 0
        elapsed = 0.0
        rollout_began = collecting = 0.0

        def _on_rollout_start(self) -> None:
            now = time.perf_counter()
            self.rollouts += 1
            if self.rollouts == 3:
                self.started, self.steps, self.collecting = now, self.num_timesteps, 0.0
            self.rollout_began = now
            if self.rollouts > 3:
                self.elapsed = now - self.started

        def _on_rollout_end(self) -> None:
            self.collecting += time.perf_counter() - self.rollout_began

        def _on_step(self) -> bool:
            return self.rollouts <= 3 or self.elapsed < seconds

    torch.set_num_threads(threads)
    vector_env = DummyVecEnv if runner_name == "dev" else SubprocVecEnv
    if setting.is_atari:
        env = make_atari_env(
            f"ale_py:{setting.env}",  # also imported by worker processes
            setting.concurrency,
            seed=0,
            vec_env_cls=vector_env,
            env_kwargs={"frameskip": 1},
        )
        env = VecFrameStack(env, 4)
    else:
        env = make_vec_env(setting.env, setting.concurrency, seed=0, vec_env_cls=vector_env)
    model = PPO(
        "CnnPolicy" if setting.is_atari else "MlpPolicy",
        env,
        n_steps=setting.n_rollout_steps,
        batch_size=setting.batch_size,
        n_epochs=setting.n_optimization_epochs,
        device="cpu",
    )
    clock = Clock()
    model.learn(10**9, callback=clock)
    env.close()
    # The clock stops at the first step of a rollout, so only complete rollouts are counted.
    steps = model.num_timesteps - clock.steps - setting.concurrency
    return {
        "steps_per_second": steps / clock.elapsed,
        "collect_share": clock.collecting / clock.elapsed,
        "rollout_mb": model.rollout_buffer.observations.nbytes / 1e6,
    }


def run_process(who: str, env: str, runner: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Run one measurement in a new process."""
    command = [sys.executable, __file__, "--one", who, "--only", env, "--runner", runner]
    threads = arguments.threads or SETTINGS[env].threads
    command += ["--seconds", str(arguments.seconds), "--threads", str(threads)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def compare(arguments: argparse.Namespace) -> None:
    """Measure the workloads and print the table; store and draw complete results."""
    figures: dict[str, tuple[int, int, float]] = {}
    print(
        f"{'workload':28} {'ours':>10} {'SB3':>10} {'ratio':>7}   "
        "share of time in collection, observations of a rollout"
    )
    for env in [arguments.only] if arguments.only else SETTINGS:
        for runner in VECTOR_ENVS if arguments.runner is None else [arguments.runner]:
            ours, peers = [], []
            for _ in range(arguments.rounds):
                ours.append(run_process("ours", env, runner, arguments))
                peers.append(run_process("peer", env, runner, arguments))
            rates = [[r["steps_per_second"] for r in side] for side in (ours, peers)]
            ratio = statistics.median(a / b for a, b in zip(*rates, strict=True))
            medians = [round(statistics.median(side)) for side in rates]
            figures[f"{env} {runner}"] = (medians[0], medians[1], round(ratio, 2))
            shares = [statistics.median(r["collect_share"] for r in side) for side in (ours, peers)]
            megabytes = [side[0]["rollout_mb"] for side in (ours, peers)]
            print(
                f"{env + ' ' + runner:28} {medians[0]:10,} {medians[1]:10,} {ratio:7.2f}   "
                f"ours {shares[0]:.0%}, SB3 {shares[1]:.0%}; "
                f"ours {megabytes[0]:.2f} MB, SB3 {megabytes[1]:.2f} MB",
                flush=True,
            )
    if len(figures) == len(SETTINGS) * len(VECTOR_ENVS):
        FIGURES.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        draw()


def draw() -> None:
    """Draw the stored results: one bar per library and workload, scaled per workload."""
    from maze_train.core.report import TEXT_COLOR, new_figure, save_picture

    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    figure = new_figure(5.2, 0.55 * len(figures) + 0.8)
    axes = figure.add_subplot()
    for place, (name, (ours, peer, ratio)) in enumerate(figures.items()):
        for shift, rate, color in ((-0.18, ours, "#0a8a7a"), (0.18, peer, "#9aa5b1")):
            axes.barh(place + shift, rate / peer, 0.34, color=color)
            text = f"{rate:,}" + (f" ({ratio:.2f} x)" if rate == ours else "")
            axes.text(rate / peer + 0.05, place + shift, text, va="center", color=TEXT_COLOR)
        axes.text(-0.05, place, name, ha="right", va="center", color=TEXT_COLOR)
    title = "Steps per second of PPO: maze_train (green)"
    title += "\nbeside Stable-Baselines3 (grey, all drawn as 1)"
    figure.suptitle(title, x=0.02, ha="left", fontsize=11, color=TEXT_COLOR)
    axes.set_xlim(0, 1.3 * max(ours / peer for ours, peer, _ in figures.values()))
    axes.invert_yaxis()
    axes.set_axis_off()
    save_picture(figure, PICTURE, dpi=200)


def main() -> None:
    """Run the comparison, or a single measurement in a subprocess."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument(
        "--threads",
        type=int,
        default=0,
        help="threads of PyTorch, on both sides; 0: 1, and 2 for Atari games",
    )
    parser.add_argument("--only", choices=list(SETTINGS))
    parser.add_argument("--runner", choices=VECTOR_ENVS)
    parser.add_argument("--picture", action="store_true", help="only draw the stored results")
    parser.add_argument("--one", choices=("ours", "peer"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.picture:
        draw()
        return
    if arguments.one is None:
        compare(arguments)
        return
    measure = measure_ours if arguments.one == "ours" else measure_peer
    setting = SETTINGS[arguments.only]
    print(json.dumps(measure(setting, arguments.runner, arguments.seconds, arguments.threads)))


if __name__ == "__main__":
    main()
