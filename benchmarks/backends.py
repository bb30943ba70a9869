"""Environment steps per second of the backends of one environment, with random actions.

    python benchmarks/backends.py [--env CartPole-v1] [--num-envs 8 64] [--seconds 3]

Each measurement runs in a new process; the backends take turns for several rounds. The table shows
medians. Rows in which an environment is only reset are not counted.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maze_train.envs.vector import MazeVectorEnv

BACKENDS = ("dev", "local", "native", "envpool")


def measure(backend: str, env_id: str, num_envs: int, seconds: float) -> float:
    """Return steps per second of vector environments built as for training."""
    from maze_train import EnvConfig, EnvFactory, SequentialVectorEnv, SubprocVectorEnv
    from maze_train.envs.third_party import make_third_party_env

    env: MazeVectorEnv
    if backend in ("dev", "local"):
        factories = [EnvFactory(EnvConfig(id=env_id))] * num_envs
        as_in_training = {"copy": False, "step_infos": False}
        env = (
            SequentialVectorEnv(factories, **as_in_training)
            if backend == "dev"
            else SubprocVectorEnv(factories, **as_in_training)
        )
    else:
        config = EnvConfig(id=env_id, backend=backend)  # type: ignore[arg-type]  # one of both
        env = make_third_party_env(config, num_envs, training=True)
    with env:
        env.reset(seed=0)
        env.action_space.seed(0)
        actions = [env.action_space.sample() for _ in range(64)]
        for action in actions:
            env.step(action)
        steps, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            for action in actions:
                infos = env.step(action)[4]
                steps += num_envs - int(infos["ignored"].sum() if "ignored" in infos else 0)
        return steps / (time.perf_counter() - started)


def main() -> None:
    """Run the comparison, or a single measurement in a subprocess."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=BACKENDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(measure(arguments.one, arguments.env, arguments.num_envs[0], arguments.seconds))
        return
    print(f"{'backend':10}" + "".join(f"{f'{n} environments':>20}" for n in arguments.num_envs))
    rates: dict[tuple[str, int], list[float]] = {}
    for _ in range(arguments.rounds):
        for n in arguments.num_envs:
            for backend in BACKENDS:
                command = [sys.executable, __file__, "--one", backend, "--env", arguments.env]
                command += ["--num-envs", str(n), "--seconds", str(arguments.seconds)]
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                rates.setdefault((backend, n), []).append(float(output.splitlines()[-1]))
    for backend in BACKENDS:
        medians = [statistics.median(rates[backend, n]) for n in arguments.num_envs]
        print(f"{backend:10}" + "".join(f"{rate:20,.0f}" for rate in medians))


if __name__ == "__main__":
    main()
