"""Training throughput of multi-agent PPO, compared with Stable-Baselines3 and RLlib.

    python benchmarks/several_agents.py [--rounds 3] [--seconds 20]
        [--sides SB3 RLlib dev local] [--rllib-python VENV/bin/python]

All libraries train on simple_spread_v3 with the same settings: three agents share a policy with two
hidden layers of 64 units, 8 environments, rollouts of 128 steps, 10 epochs of minibatches of 256
turns. Stable-Baselines3 uses SuperSuit's vector environment of the same 24 agents (`pip install
supersuit`). RLlib samples in the process of its learner, which is its fastest mode with one thread,
and needs a separate virtual environment (`ray[rllib]`, `mpe2`). Rates count environment steps, in
each of which three agents act. Each measurement runs in a new process with one thread and warms up
for one update; the libraries take turns. The table shows medians over the rounds of steps per
second of wall time and of CPU time (which depends less on the machine's load), and median ratios of
consecutive measurements.
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
SIDES = ("SB3", "RLlib", "dev", "local")


class Meter:
    """Counts environment steps per second of wall time and of CPU time of this process."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    @property
    def elapsed(self) -> float:
        """Return the seconds since the object was created."""
        return time.perf_counter() - self._wall

    def rates(self, steps: float) -> list[float]:
        """Return steps per second of wall time and of CPU time."""
        return [steps / self.elapsed, steps / (time.process_time() - self._cpu)]


def measure_ours(runner: str, seconds: float) -> list[float]:
    """Return the rates of this package."""
    from maze_train import Statistics, build_run, load_config

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
    with build_run(config) as run:
        trainer = run.trainer
        trainer.update_once(trainer.progress(), Statistics())
        steps, meter = 0, Meter()
        while meter.elapsed < seconds:
            steps += trainer.update_once(trainer.progress(), Statistics())
        return meter.rates(steps)


def measure_sb3(seconds: float) -> list[float]:
    """Return the rates of Stable-Baselines3 with SuperSuit."""
    import supersuit
    from mpe2 import simple_spread_v3
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback

    class Clock(BaseCallback):
        """Starts after one update; stops at the end of a rollout."""

        meter: Meter | None = None
        before = 0

        def _on_step(self) -> bool:
            return self.meter is None or self.meter.elapsed < seconds

        def _on_rollout_start(self) -> None:
            if self.num_timesteps and self.meter is None:
                self.meter, self.before = Meter(), self.num_timesteps

    env: Any = simple_spread_v3.parallel_env(N=AGENTS)
    env = supersuit.pettingzoo_env_to_vec_env_v1(env)
    env = supersuit.concat_vec_envs_v1(env, ENVS, num_cpus=0, base_class="stable_baselines3")
    settings = {"n_steps": STEPS, "batch_size": 256, "n_epochs": 10, "device": "cpu"}
    model, clock = PPO("MlpPolicy", env, **settings), Clock()
    model.learn(10**9, callback=clock)
    assert clock.meter is not None
    return clock.meter.rates((clock.num_timesteps - clock.before) / AGENTS)


def measure_rllib(seconds: float) -> list[float]:
    """Return the rates of RLlib."""
    import ray
    from mpe2 import simple_spread_v3
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
    from ray.tune.registry import register_env

    def make_env(_: Any) -> Any:
        return ParallelPettingZooEnv(simple_spread_v3.parallel_env(N=AGENTS))

    register_env("spread", make_env)
    ray.init(
        "local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error"
    )
    network = DefaultModelConfig(
        fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False
    )
    config = (
        PPOConfig()
        .environment("spread")
        .env_runners(num_env_runners=0, num_envs_per_env_runner=ENVS, rollout_fragment_length=STEPS)
        .multi_agent(policies={"shared"}, policy_mapping_fn=lambda *_, **__: "shared")
        .training(
            train_batch_size_per_learner=ENVS * STEPS,
            minibatch_size=256,
            num_epochs=10,
            lr=1e-3,
            lambda_=0.95,
            clip_param=0.2,
            vf_loss_coeff=0.5,
            use_kl_loss=False,
            grad_clip=0.5,
        )
        .rl_module(model_config=network)
    )
    algorithm = config.build_algo()
    before, meter = algorithm.train()["num_env_steps_sampled_lifetime"], Meter()
    steps = before
    while meter.elapsed < seconds:
        steps = algorithm.train()["num_env_steps_sampled_lifetime"]
    rates = meter.rates(steps - before)
    algorithm.stop()
    ray.shutdown()
    return rates


def run_process(side: str, arguments: argparse.Namespace) -> list[float]:
    """Run one measurement in a new process."""
    python = arguments.rllib_python if side == "RLlib" else sys.executable
    command = [python, __file__, "--one", side, "--seconds", str(arguments.seconds)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rates: list[float] = json.loads(output.splitlines()[-1])
    return rates


def main() -> None:
    """Run the comparison, or a single measurement in a subprocess."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", choices=SIDES)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["SB3", "dev", "local"])
    parser.add_argument("--rllib-python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    if arguments.one:
        import torch

        torch.set_num_threads(1)
        peers = {"SB3": measure_sb3, "RLlib": measure_rllib}
        seconds = arguments.seconds
        measured = peers.get(arguments.one, lambda s: measure_ours(arguments.one, s))(seconds)
        print(json.dumps(measured))
        return
    rounds = [
        {side: run_process(side, arguments) for side in arguments.sides}
        for _ in range(arguments.rounds)
    ]
    first = arguments.sides[0]
    print(f"simple_spread_v3, {AGENTS} agents, {ENVS} environments")
    for side in arguments.sides:
        columns = []
        for i, unit in enumerate(("s", "s of processor time")):
            if i and side == "local":
                continue  # its environments run in other processes
            rate = statistics.median(found[side][i] for found in rounds)
            ratio = statistics.median(found[side][i] / found[first][i] for found in rounds)
            columns.append(f"{rate:>9,.1f} steps/{unit} {ratio:>6.2f}")
        print(f"{side:<6}", "  ".join(columns))


if __name__ == "__main__":
    main()
