"""Kills whole `maze-run` processes at random moments, and compares what they leave.

    python tests/resuming/kill_at_random.py --runner local --kills 20 [--only sac]

Five problems with A2C and PPO, four of them with SAC, three with IMPALA: each is trained once
undisturbed on `dev`, and once on the given runner (IMPALA on `dev`, where alone it can be
repeated), killed with SIGKILL so many times at random moments and continued each time. One line per
problem says whether all rows of metrics and all state, weights included, are equal. Takes about 25
minutes.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from killed_runs import PARTS, differences, final_state, rows_of

COMMON = (
    "seed=1", "tracking.progress=quiet", "tracking.plot=false", "resume=auto",
    "runner.concurrency=4", "evaluation.n_episodes=4", "evaluation.max_episode_steps=200",
    "model.hidden_sizes=[32,32]", "total_steps=92160",
)  # fmt: skip
NORMALISED = (
    "model.normalization.mode=running", "model.normalization.n_steps=500",
    "algorithm.reward_scaling=true",
)  # fmt: skip
PPO = ("algorithm=ppo", "algorithm.n_rollout_steps=64", "algorithm.batch_size=64")
ALGORITHMS = {
    "ppo": (*PPO, "algorithm.epoch_length=2"),
    "a2c": ("algorithm=a2c", "algorithm.epoch_length=20"),
}
PROBLEMS = {
    "CartPole": ("env=CartPole-v1",),
    "Pendulum-normalised": ("env=Pendulum-v1", *NORMALISED),
    "HalfCheetah-normalised": ("env=HalfCheetah-v5", *NORMALISED),
    "Dict": ("env._target_=own_envs.SpacesEnv", "+env.kwargs.obs=dict"),
    "memory": ("env=CartPole-v1", "model=vector_rnn", "model.memory.size=16"),
}
SAC = (
    "algorithm=sac", "algorithm.epoch_length=50", "algorithm.batch_size=32",
    "algorithm.initial_buffer_size=400", "algorithm.replay_buffer_size=3000",
    "total_steps=5000",
)  # fmt: skip
SAC_PROBLEMS = {
    "CartPole": (*PROBLEMS["CartPole"], *SAC),
    "Pendulum-normalised": (
        *PROBLEMS["Pendulum-normalised"][:3], *SAC, "algorithm.n_step_returns=3",
    ),
    "HalfCheetah-prioritised": (
        "env=HalfCheetah-v5", *SAC,
        "algorithm.replay_buffer={_target_: maze_train.PrioritizedReplayBuffer}",
    ),
    "Dict": (*PROBLEMS["Dict"], *SAC, "algorithm.replay_buffer_storage=disk"),
}  # fmt: skip
IMPALA = (
    "algorithm=impala", "algorithm.epoch_length=50", "algorithm.actors_batch_size=3",
    "algorithm.broadcast_interval=3",
)  # fmt: skip
IMPALA_PROBLEMS = {
    "CartPole": (*PROBLEMS["CartPole"], *IMPALA),
    "Dict": (*PROBLEMS["Dict"], *IMPALA, "algorithm.replay_size=20"),
    "memory": (*PROBLEMS["memory"], *IMPALA),
}
COMMAND = [sys.executable, "-c", "import sys; from maze_train.cli import main; sys.exit(main())"]


def start(run_dir: Path, settings: tuple[str, ...], runner: str) -> subprocess.Popen[bytes]:
    """Start or continue a run."""
    argv = [*COMMAND, *COMMON, *settings, f"runner={runner}", f"run_dir={run_dir}"]
    path = f"{PARTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})


def kill_at_random(process: subprocess.Popen[bytes], run_dir: Path, rng: random.Random) -> bool:
    """Kill a run some time after it began to train; returns whether it was running still."""
    lock = run_dir / ".lock"
    while process.poll() is None:
        if lock.exists() and lock.read_text().startswith(f"pid {process.pid} "):
            break
        time.sleep(0.005)
    try:
        process.wait(rng.random() * rng.choice([0.3, 1.0, 2.0, 3.0]))
        return False
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True


def main() -> None:
    """Kill and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runner", default="dev")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", choices=("ppo", "a2c", "sac", "impala"))
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    cases = {
        (problem, algorithm): (*env, *settings)
        for problem, env in PROBLEMS.items()
        for algorithm, settings in ALGORITHMS.items()
    }
    cases |= {(problem, "sac"): settings for problem, settings in SAC_PROBLEMS.items()}
    cases |= {(problem, "impala"): settings for problem, settings in IMPALA_PROBLEMS.items()}
    with tempfile.TemporaryDirectory() as folder:
        for (problem, algorithm), settings in cases.items():
            if arguments.only not in (None, algorithm):
                continue
            straight = Path(folder, f"{problem}-{algorithm}-straight")
            killed = Path(folder, f"{problem}-{algorithm}-killed")
            assert start(straight, settings, "dev").wait() == 0
            runner = "dev" if algorithm == "impala" else arguments.runner
            kills = 0
            while True:
                process = start(killed, settings, runner)
                if kills == arguments.kills or not kill_at_random(process, killed, rng):
                    assert process.wait() == 0
                    break
                kills += 1
            rows = "equal" if rows_of(straight) == rows_of(killed) else "DIFFERENT"
            state = differences(final_state(straight), final_state(killed))
            print(
                f"{problem:24} {algorithm}  {kills} kills  rows {rows}  "
                f"state {'equal' if not state else f'DIFFERENT: {state[:3]}'}",
                flush=True,
            )


if __name__ == "__main__":
    main()
