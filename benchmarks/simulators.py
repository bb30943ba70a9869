"""Training throughput of PPO on batched simulators, compared with other libraries.

    python benchmarks/simulators.py [--rounds 3] [--seconds 15] [--task cartpole] [--sides ...]
        [--peers-python VENV/bin/python] [--factory-python VENV/bin/python] [--device cpu]
        [--envs 4096]

Tasks:

- `cartpole`: 4,096 tensor CartPoles with a continuous force in [-10, 10] (`tensor_cartpole.py`),
  rollouts of 16 steps, two hidden layers of 64 units, 5 epochs of 4 minibatches, a constant
  learning rate.
- `inverted_pendulum`: the Brax environment, 512 environments, the same settings; `brax` is Brax's
  own PPO, a single compiled function.
- `native`: CartPole-v1, 64 environments, rollouts of 128 steps, 4 epochs of 4 minibatches. `loop`
  is `plain_ppo.py` on EnvPool, `sample_factory` is APPO with one environment process, `ours` uses
  EnvPool, `ours_native` gymnasium's vectorised CartPole, and `ours_puffer` PufferLib's
  (`puffer.py`; must be built in this environment).

The peers need separate virtual environments (`pip install rsl-rl-lib skrl brax`, `pip install
sample-factory "gymnasium<1"`). Each measurement runs in a new process with one PyTorch thread
(`inverted_pendulum`: on one core) and warms up for two updates (`brax`: two calls of ten); the
libraries take turns. The table shows medians over the rounds and median ratios of consecutive
measurements.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from gymnasium import spaces

from benchmarks.tensor_cartpole import TensorCartPole

STEPS = 16
TASKS = {"cartpole": 4096, "inverted_pendulum": 512, "native": 64}
"""Tasks, with the number of environments."""
SIDES = {
    "cartpole": ("rsl_rl", "skrl", "ours"),
    "inverted_pendulum": ("brax", "skrl", "ours"),
    "native": ("loop", "sample_factory", "ours", "ours_native", "ours_puffer"),
}
NATIVE = {"num_steps": 128, "epochs": 4, "minibatch": 2048}
"""PPO on native environments: rollout steps, epochs, and minibatch size."""
FACTORY = "benchmarks/asynchronous_peers/sample_factory_appo.py"
ENVPOOL, GYMNASIUM = ({"id": "CartPole-v1", "backend": key} for key in ("envpool", "native"))
PUFFER = {
    "_target_": "benchmarks.puffer.Puffer",
    "backend": "tensor",
    "kwargs": {"name": "pufferlib.ocean.cartpole.cartpole:Cartpole"},
}
"""CartPole implementations of three packages."""


class Work(NamedTuple):
    """A measurement: task, number of environments, duration and device."""

    task: str
    num_envs: int
    seconds: float
    device: str


class PushedCartPole(TensorCartPole):
    """CartPole with a continuous force in [-10, 10]."""

    def __init__(self, num_envs: int, device: torch.device | str = "cpu") -> None:
        super().__init__(num_envs, device)
        self.single_action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)  # type: ignore[assignment]

    def step(self, actions: torch.Tensor) -> Any:
        """Step all environments."""
        return super().step(actions.squeeze(1).clamp(-1.0, 1.0) / 2 + 0.5)


def simulator(work: Work) -> Any:
    """Create the environments of a task."""
    if work.task == "cartpole":
        return PushedCartPole(work.num_envs, work.device)
    return BraxTensors(work.task, work.num_envs, work.device)


class BraxTensors:
    """Brax environments in the form of this package's adapter, for the peers."""

    def __init__(self, name: str, num_envs: int, device: str) -> None:
        from maze_train.simulators.make import make_simulator

        self.own = make_simulator(f"brax:{name}", None, {}, num_envs, device=device)
        self.num_envs, self.device = num_envs, device
        self.single_observation_space = self.own.observation_space
        self.single_action_space = self.own.action_space

    def reset(self, *, seed: int) -> Any:
        """Reset all environments."""
        return self.own.reset(seed), {}

    def step(self, actions: torch.Tensor) -> Any:
        """Step all environments."""
        found = self.own.step(actions.clamp(-1.0, 1.0))
        info = {"final_obs": found.final_obs}
        return found.obs, found.rewards, found.end == 1, found.end == 2, info


def measure_ours(work: Work) -> dict[str, float]:
    """Return the throughput of this package on simulators."""
    settings: dict[str, Any] = {
        "env": f"brax:{work.task}",
        "algorithm.n_rollout_steps": STEPS,
        "algorithm.n_optimization_epochs": 5,
        "algorithm.lr": 1e-3,
    }
    if work.task == "cartpole":
        settings["env"] = {"_target_": "benchmarks.simulators.PushedCartPole", "backend": "tensor"}
    return measured({**settings, "algorithm.batch_size": work.num_envs * STEPS // 4}, work)


def measure_backend(env: dict[str, Any], work: Work) -> dict[str, float]:
    """Return the throughput of this package on vector environments of another package."""
    settings = {
        "env": env,
        "algorithm.n_rollout_steps": NATIVE["num_steps"],
        "algorithm.n_optimization_epochs": NATIVE["epochs"],
        "algorithm.batch_size": NATIVE["minibatch"],
        "algorithm.lr": 2.5e-4,
    }
    return measured(settings, work)


def measured(settings: dict[str, Any], work: Work) -> dict[str, float]:
    """Return the throughput, and the fractions of time in collection, simulator and network."""
    from maze_train import Statistics, build_run, load_config
    from maze_train.nets.acting import Acted, Actor

    config = load_config(
        {
            **settings,
            "algorithm": "ppo",
            "algorithm.device": work.device,
            "runner.concurrency": work.num_envs,
            "runner.torch_threads": 1,
            "seed": 0,
        }
    )
    acting, act = 0.0, Actor.act

    def timed_act(actor: Actor, obs: Any, noise: Any, deterministic: bool) -> Acted:
        nonlocal acting
        began = time.perf_counter()
        found = act(actor, obs, noise, deterministic)
        acting += time.perf_counter() - began
        return found

    with (
        build_run(config) as run,
        patch.object(Actor, "act", timed_act),
    ):
        trainer = run.trainer
        for _ in range(2):
            trainer.update_once(trainer.progress(), Statistics())
        steps, began, collected, simulated, acting = 0, time.perf_counter(), 0.0, 0.0, 0.0
        while time.perf_counter() - began < work.seconds:
            timed = Statistics()
            steps += trainer.update_once(trainer.progress(), timed)
            times = timed.reduce()
            collected += times["time/collect_s"]
            simulated += times["time/env_s"]
        whole = time.perf_counter() - began
    shares = {"env": simulated, "network": acting}
    found = {key: seconds / collected for key, seconds in shares.items()}
    return {"rate": steps / whole, "collect": collected / whole, **found}


def measure_loop(work: Work) -> dict[str, float]:
    """Return the throughput of a minimal loop with EnvPool."""
    from benchmarks.plain_ppo import steps_per_second

    return {"rate": steps_per_second(work.num_envs, **NATIVE, seconds=work.seconds)}


def measure_rsl_rl(work: Work) -> dict[str, float]:
    """Return the throughput of rsl_rl."""
    from rsl_rl.env import VecEnv
    from rsl_rl.runners import OnPolicyRunner
    from tensordict import TensorDict

    class Env(VecEnv):  # type: ignore[misc]  # untyped
        """Adapter of the simulator for rsl_rl."""

        def __init__(self) -> None:
            self.sim = simulator(work)
            self.num_envs, self.device, self.cfg = self.sim.num_envs, work.device, {}
            self.num_actions = self.sim.single_action_space.shape[0]
            self.max_episode_length = 500
            self.episode_length_buf = torch.zeros(
                self.num_envs, dtype=torch.long, device=work.device
            )
            self.obs, _ = self.sim.reset(seed=0)

        def get_observations(self) -> Any:
            """Return observations by group."""
            return TensorDict({"policy": self.obs}, batch_size=[self.num_envs])

        def step(self, actions: torch.Tensor) -> Any:
            """Step all environments."""
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
        runner = OnPolicyRunner(Env(), settings, log_dir=None, device=work.device)
        runner.learn(2)
        began, updates = time.perf_counter(), 0
        while time.perf_counter() - began < work.seconds:
            runner.learn(5)
            updates += 5
    return {"rate": updates * work.num_envs * STEPS / (time.perf_counter() - began)}


def measure_skrl(
    work: Work,
) -> dict[str, float]:
    """Return the throughput of skrl."""
    from skrl.agents.torch.ppo import PPO
    from skrl.envs.wrappers.torch.base import Wrapper
    from skrl.memories.torch import RandomMemory
    from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
    from skrl.trainers.torch import SequentialTrainer
    from torch import nn

    class Env(Wrapper):  # type: ignore[misc]  # untyped
        """Adapter of the simulator for skrl."""

        observation_space = property(lambda self: self._env.single_observation_space)
        action_space = property(lambda self: self._env.single_action_space)

        def reset(self) -> Any:
            """Reset all environments."""
            return self._env.reset(seed=0)

        def step(self, actions: torch.Tensor) -> Any:
            """Step all environments."""
            obs, *rest, _ = self._env.step(actions)
            return obs, *(x[:, None] for x in rest), {}

        def state(self) -> None:
            """Return None: the critic has no additional observations."""

        def render(self) -> None:
            """Do nothing."""

        def close(self) -> None:
            """Do nothing."""

    env = Env(simulator(work))
    spaces_of = {"observation_space": env.observation_space, "action_space": env.action_space}
    sizes = env.observation_space.shape[0], env.action_space.shape[0]

    def network(outputs: int) -> nn.Module:
        layers = [nn.Linear(sizes[0], 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(64, outputs))

    class Policy(GaussianMixin, Model):  # type: ignore[misc]  # untyped
        """Gaussian policy."""

        def __init__(self) -> None:
            Model.__init__(self, **spaces_of, device=work.device)
            GaussianMixin.__init__(self)
            self.net, self.log_std = network(sizes[1]), nn.Parameter(torch.zeros(sizes[1]))

        def compute(self, inputs: Any, role: str = "") -> Any:
            """Return the means and the log standard deviation."""
            return self.net(inputs["observations"]), {"log_std": self.log_std}

    class Value(DeterministicMixin, Model):  # type: ignore[misc]  # untyped
        """Critic."""

        def __init__(self) -> None:
            Model.__init__(self, **spaces_of, device=work.device)
            DeterministicMixin.__init__(self)
            self.net = network(1)

        def compute(self, inputs: Any, role: str = "") -> Any:
            """Return the values."""
            return self.net(inputs["observations"]), {}

    settings = {"rollouts": STEPS, "learning_epochs": 5, "mini_batches": 4, "learning_rate": 1e-3}
    settings["experiment"] = {"write_interval": 0, "checkpoint_interval": 0}  # type: ignore[assignment]
    agent = PPO(
        models={"policy": Policy().to(work.device), "value": Value().to(work.device)},
        memory=RandomMemory(memory_size=STEPS, num_envs=work.num_envs, device=work.device),
        cfg=settings,
        **spaces_of,
        device=work.device,
    )

    def train(updates: int) -> None:
        cfg = {"timesteps": updates * STEPS, "headless": True, "disable_progressbar": True}
        SequentialTrainer(env=env, agents=agent, cfg=cfg).train()

    with contextlib.redirect_stdout(io.StringIO()):
        train(2)
        began, updates = time.perf_counter(), 0
        while time.perf_counter() - began < work.seconds:
            train(5)
            updates += 5
    return {"rate": updates * work.num_envs * STEPS / (time.perf_counter() - began)}


def measure_brax(work: Work) -> dict[str, float]:
    """Return the throughput of Brax's PPO, on JAX's default device."""
    import jax
    from brax import envs
    from brax.training.agents.ppo import networks, train

    # Brax 0.14 calls a function that newer versions of JAX have removed.
    jax.device_put_replicated = lambda tree, devices: jax.tree.map(
        lambda x: jax.numpy.stack([jax.numpy.asarray(x)] * len(devices)), tree
    )
    updates, calls = 10, 10**4
    marks: list[tuple[float, int]] = []

    def progress(steps: int, _: Any) -> None:
        marks.append((time.perf_counter(), steps))
        if len(marks) > 2 and marks[-1][0] - marks[1][0] >= work.seconds:
            raise StopIteration

    net = {"policy_hidden_layer_sizes": (64, 64), "value_hidden_layer_sizes": (64, 64)}
    with contextlib.suppress(StopIteration):
        train.train(
            envs.get_environment(work.task),
            num_timesteps=calls * updates * work.num_envs * STEPS,
            num_evals=calls + 1,
            run_evals=False,
            progress_fn=progress,
            episode_length=1000,
            num_envs=work.num_envs,
            unroll_length=STEPS,
            batch_size=work.num_envs // 4,
            num_minibatches=4,
            num_updates_per_batch=5,
            learning_rate=1e-3,
            entropy_cost=0.0,
            discounting=0.99,
            clipping_epsilon=0.2,
            max_grad_norm=0.5,
            network_factory=partial(networks.make_ppo_networks, **net, activation=jax.numpy.tanh),
        )
    return {"rate": (marks[-1][1] - marks[1][1]) / (marks[-1][0] - marks[1][0])}


def measure(side: str, work: Work) -> dict[str, float]:
    """Measure one library in this process."""
    if (work.task, work.device) == ("inverted_pendulum", "cpu"):
        # JAX uses as many threads as there are cores.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    sides = {
        "ours": partial(measure_backend, ENVPOOL) if work.task == "native" else measure_ours,
        "ours_native": partial(measure_backend, GYMNASIUM),
        "ours_puffer": partial(measure_backend, PUFFER),
        "rsl_rl": measure_rsl_rl,
        "skrl": measure_skrl,
        "brax": measure_brax,
        "loop": measure_loop,
    }
    return sides[side](work)


def main() -> None:
    """Measure all libraries in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--task", choices=sorted(TASKS), default="cartpole")
    sides = sorted({side for names in SIDES.values() for side in names})
    parser.add_argument("--sides", nargs="+", choices=sides, help="default: all of the task")
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--factory-python", default=sys.executable)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--envs", type=int, help="default: those of the task")
    parser.add_argument("--only", choices=sides, help=argparse.SUPPRESS)
    given = parser.parse_args()
    work = Work(given.task, given.envs or TASKS[given.task], given.seconds, given.device)
    if given.only:
        print(json.dumps(measure(given.only, work)))
        return
    found: dict[str, list[dict[str, float]]] = {
        side: [] for side in given.sides or SIDES[given.task]
    }
    for _ in range(given.rounds):
        for side in found:
            is_peer = side in ("rsl_rl", "skrl", "brax")
            python = given.peers_python if is_peer else sys.executable
            words = ["--only", side, "--task", given.task, "--device", given.device]
            words += ["--envs", str(work.num_envs)]
            command = [python, "-m", "benchmarks.simulators", *words]
            if side == "sample_factory":
                words = ["--algorithm", "ppo", "--env", "cartpole", "--actors", "1"]
                command = [given.factory_python, FACTORY, *words]
            command += ["--seconds", str(given.seconds)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[side].append(json.loads(output.splitlines()[-1]))
            print(side, found[side][-1], flush=True)
    print(f"\n{given.task}, {work.num_envs:,} environments, {given.rounds} rounds\n")
    print("| side | steps per second | ours is faster by |\n| --- | ---: | ---: |")
    for side, rounds in found.items():
        rates = [row["rate"] for row in rounds]
        pairs = zip(found.get("ours", rounds), rates, strict=True)
        ratio = statistics.median(own["rate"] / rate for own, rate in pairs)
        print(f"| {side} | {statistics.median(rates):,.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
