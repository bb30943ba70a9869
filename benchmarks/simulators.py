"""Steps per second of PPO on simulators of tensors next to rsl_rl and skrl, in one run.

    python benchmarks/simulators.py [--rounds 3] [--seconds 15] [--task cartpole]
        [--sides rsl_rl skrl ours] [--peers-python VENV/bin/python] [--device cpu]

`cartpole`: 4,096 carts that a force in [-10, 10] moves (`benchmarks/tensor_cartpole.py`), 16 steps,
two hidden layers of 64 units, 5 passes in 4 minibatches, the same learning rate throughout.
`inverted_pendulum`: Brax's, 512 environments, 16 steps (skrl and ours; needs `pip install brax`).
The peers need an environment of their own (`pip install rsl-rl-lib skrl`). Each measurement is a
fresh process with one thread, all sides in turn, and warms up for two updates. The table shows
medians over the rounds and of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from benchmarks.tensor_cartpole import TensorCartPole

STEPS = 16
TASKS = {"cartpole": 4096, "inverted_pendulum": 512}
"""Tasks, and how many environments step together."""
SIDES = ("rsl_rl", "skrl", "ours")


class PushedCartPole(TensorCartPole):
    """Carts that a force in [-10, 10] moves."""

    def __init__(self, num_envs: int, device: torch.device | str = "cpu") -> None:
        super().__init__(num_envs, device)
        self.single_action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)  # type: ignore[assignment]

    def step(self, actions: torch.Tensor) -> Any:
        """Step everywhere."""
        return super().step(actions.squeeze(1).clamp(-1.0, 1.0) / 2 + 0.5)


def simulator(task: str, device: str) -> Any:
    """The environments of a task."""
    if task == "cartpole":
        return PushedCartPole(TASKS[task], device)
    return BraxTensors(task, TASKS[task], device)


class BraxTensors:
    """Brax's environments as our adapter gives them, for the peers."""

    def __init__(self, name: str, num_envs: int, device: str) -> None:
        from maze_train.simulators.make import make_simulator

        self.own = make_simulator(f"brax:{name}", None, {}, num_envs, device=device)
        self.num_envs, self.device = num_envs, device
        self.single_observation_space = self.own.observation_space
        self.single_action_space = self.own.action_space

    def reset(self, *, seed: int) -> Any:
        """Begin everywhere."""
        return self.own.reset(seed), {}

    def step(self, actions: torch.Tensor) -> Any:
        """Step everywhere."""
        found = self.own.step(actions.clamp(-1.0, 1.0))
        info = {"final_obs": found.final_obs}
        return found.obs, found.rewards, found.terminated, found.truncated, info


def measure_ours(task: str, seconds: float, device: str) -> dict[str, float]:
    """Rate of this package, and what collection and the simulator take of the time."""
    from maze_train import Statistics, TrainerServices, load_config
    from maze_train.run.pipeline import prepare
    from maze_train.run.runner import TrainingRunner

    own = {"_target_": "benchmarks.simulators.PushedCartPole", "backend": "tensor"}
    size = TASKS[task] * STEPS
    config = load_config(
        {
            "env": own if task == "cartpole" else f"brax:{task}",
            "algorithm": "ppo",
            "algorithm.n_rollout_steps": STEPS,
            "algorithm.n_optimization_epochs": 5,
            "algorithm.batch_size": size // 4,
            "algorithm.lr": 1e-3,
            "algorithm.device": device,
            "runner.concurrency": TASKS[task],
            "runner.torch_threads": 1,
            "seed": 0,
        }
    )
    with TrainingRunner(prepare(config)) as training:
        trainer = training.builder.build(TrainerServices())
        for _ in range(2):
            trainer.update_once(trainer.progress(), Statistics())
        steps, began, collected, simulated = 0, time.perf_counter(), 0.0, 0.0
        while time.perf_counter() - began < seconds:
            timed = Statistics()
            steps += trainer.update_once(trainer.progress(), timed)
            times = timed.reduce()
            collected += times["time/collect_s"]
            simulated += times["time/env_s"]
        whole = time.perf_counter() - began
    return {"rate": steps / whole, "collect": collected / whole, "env": simulated / whole}


def measure_rsl_rl(task: str, seconds: float, device: str) -> dict[str, float]:
    """Rate of rsl_rl."""
    from rsl_rl.env import VecEnv
    from rsl_rl.runners import OnPolicyRunner
    from tensordict import TensorDict

    class Env(VecEnv):  # type: ignore[misc]  # untyped
        """The simulator as rsl_rl asks for it."""

        def __init__(self) -> None:
            self.sim = simulator(task, device)
            self.num_envs, self.device, self.cfg = self.sim.num_envs, device, {}
            self.num_actions = self.sim.single_action_space.shape[0]
            self.max_episode_length = 500
            self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long, device=device)
            self.obs, _ = self.sim.reset(seed=0)

        def get_observations(self) -> Any:
            """Observations by group."""
            return TensorDict({"policy": self.obs}, batch_size=[self.num_envs])

        def step(self, actions: torch.Tensor) -> Any:
            """Step everywhere."""
            self.obs, rewards, terminated, truncated, _ = self.sim.step(actions)
            dones = terminated | truncated
            return self.get_observations(), rewards, dones.long(), {"time_outs": truncated}

    network = {"class_name": "rsl_rl.models.MLPModel", "hidden_dims": [64, 64]}
    network["activation"] = "tanh"
    noise = {"class_name": "rsl_rl.modules.distribution.GaussianDistribution", "init_std": 1.0}
    algorithm = {"class_name": "rsl_rl.algorithms.PPO", "schedule": "fixed", "entropy_coef": 0.0}
    algorithm |= {"num_learning_epochs": 5, "num_mini_batches": 4, "learning_rate": 1e-3}
    settings = {
        "num_steps_per_env": STEPS,
        "save_interval": 10**9,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "algorithm": algorithm,
        "actor": {**network, "distribution_cfg": noise},
        "critic": network,
    }
    with contextlib.redirect_stdout(io.StringIO()):
        runner = OnPolicyRunner(Env(), settings, log_dir=None, device=device)
        runner.learn(2)
        began, updates = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            runner.learn(5)
            updates += 5
    return {"rate": updates * TASKS[task] * STEPS / (time.perf_counter() - began)}


def measure_skrl(  # noqa: C901 (classes that skrl asks for)
    task: str, seconds: float, device: str
) -> dict[str, float]:
    """Rate of skrl."""
    from skrl.agents.torch.ppo import PPO
    from skrl.envs.wrappers.torch.base import Wrapper
    from skrl.memories.torch import RandomMemory
    from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
    from skrl.trainers.torch import SequentialTrainer
    from torch import nn

    class Env(Wrapper):  # type: ignore[misc]  # untyped
        """The simulator as skrl asks for it."""

        observation_space = property(lambda self: self._env.single_observation_space)
        action_space = property(lambda self: self._env.single_action_space)

        def reset(self) -> Any:
            """Begin everywhere."""
            return self._env.reset(seed=0)

        def step(self, actions: torch.Tensor) -> Any:
            """Step everywhere."""
            obs, *rest, _ = self._env.step(actions)
            return obs, *(x[:, None] for x in rest), {}

        def state(self) -> None:
            """Nothing that the critic alone sees."""

        def render(self) -> None:
            """Nothing."""

        def close(self) -> None:
            """Nothing."""

    env = Env(simulator(task, device))
    spaces_of = {"observation_space": env.observation_space, "action_space": env.action_space}
    sizes = env.observation_space.shape[0], env.action_space.shape[0]

    def network(outputs: int) -> nn.Module:
        layers = [nn.Linear(sizes[0], 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(64, outputs))

    class Policy(GaussianMixin, Model):  # type: ignore[misc]  # untyped
        """Gaussian policy."""

        def __init__(self) -> None:
            Model.__init__(self, **spaces_of, device=device)
            GaussianMixin.__init__(self)
            self.net, self.log_std = network(sizes[1]), nn.Parameter(torch.zeros(sizes[1]))

        def compute(self, inputs: Any, role: str = "") -> Any:
            """Means and deviations."""
            return self.net(inputs["observations"]), {"log_std": self.log_std}

    class Value(DeterministicMixin, Model):  # type: ignore[misc]  # untyped
        """Critic."""

        def __init__(self) -> None:
            Model.__init__(self, **spaces_of, device=device)
            DeterministicMixin.__init__(self)
            self.net = network(1)

        def compute(self, inputs: Any, role: str = "") -> Any:
            """Values."""
            return self.net(inputs["observations"]), {}

    settings = {"rollouts": STEPS, "learning_epochs": 5, "mini_batches": 4, "learning_rate": 1e-3}
    settings["experiment"] = {"write_interval": 0, "checkpoint_interval": 0}  # type: ignore[assignment]
    agent = PPO(
        models={"policy": Policy().to(device), "value": Value().to(device)},
        memory=RandomMemory(memory_size=STEPS, num_envs=TASKS[task], device=device),
        cfg=settings,
        **spaces_of,
        device=device,
    )

    def train(updates: int) -> None:
        cfg = {"timesteps": updates * STEPS, "headless": True, "disable_progressbar": True}
        SequentialTrainer(env=env, agents=agent, cfg=cfg).train()

    with contextlib.redirect_stdout(io.StringIO()):
        train(2)
        began, updates = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            train(5)
            updates += 5
    return {"rate": updates * TASKS[task] * STEPS / (time.perf_counter() - began)}


def measure(side: str, task: str, seconds: float, device: str) -> dict[str, float]:
    """Rates of one side, in this process."""
    torch.set_num_threads(1)
    sides = {"ours": measure_ours, "rsl_rl": measure_rsl_rl, "skrl": measure_skrl}
    return sides[side](task, seconds, device)


def main() -> None:
    """Measure all sides in turn, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--task", choices=sorted(TASKS), default="cartpole")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=SIDES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        print(json.dumps(measure(given.only, given.task, given.seconds, given.device)))
        return
    found: dict[str, list[dict[str, float]]] = {side: [] for side in given.sides}
    for _ in range(given.rounds):
        for side in given.sides:
            python = sys.executable if side == "ours" else given.peers_python
            words = ["--only", side, "--task", given.task, "--seconds", str(given.seconds)]
            command = [python, "-m", "benchmarks.simulators", *words, "--device", given.device]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[side].append(json.loads(output.splitlines()[-1]))
            print(side, found[side][-1], flush=True)
    print(f"\n{given.task}, {TASKS[given.task]:,} environments, {given.rounds} rounds\n")
    print("| side | steps per second | ours is faster by |\n| --- | ---: | ---: |")
    for side, rounds in found.items():
        rates = [row["rate"] for row in rounds]
        pairs = zip(found.get("ours", rounds), rates, strict=True)
        ratio = statistics.median(own["rate"] / rate for own, rate in pairs)
        print(f"| {side} | {statistics.median(rates):,.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
