"""Scaling of time and memory with problem size, measured at three sizes each.

    python benchmarks/scaling.py [--only workers jobs journal checkpoints history critic turns]

Each row is one measurement. Use it to compare two versions of the package on an idle machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from maze_train import EnvFactory, MultiAgentEnv, SubprocVectorEnv, Turn, train
from maze_train.core.state_files import dumps
from maze_train.envs.journal import Journal
from maze_train.tracking.tracker import Tracker
from maze_train.training.callbacks import TrainingView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Row = tuple[str, float, str]
"""Size, value and unit."""


def workers() -> Iterator[Row]:
    """Measure the start of worker processes, up to the first observations."""
    for n in (2, 8, 32):
        code = f"import scaling; print(scaling.seconds_to_start({n}))"
        yield f"{n} workers", float(_in_process(code)), "s"


def seconds_to_start(n: int) -> float:
    """Return the seconds until `n` workers with one environment each have started."""
    started = time.perf_counter()
    with SubprocVectorEnv([EnvFactory.from_any("CartPole-v1")] * n, n_workers=n) as env:
        env.reset(seed=0)
        return time.perf_counter() - started


def jobs() -> Iterator[Row]:
    """Measure a sweep of short runs with `hydra/launcher=local`, two at a time."""
    settings = (
        *("-m", "hydra/launcher=local", "hydra.launcher.n_jobs=2", "algorithm=a2c"),
        *("env=CartPole-v1", "total_steps=256", "algorithm.n_rollout_steps=4"),
        *("algorithm.epoch_length=8", "evaluation.n_episodes=0", "checkpoint.interval=0"),
        *("tracking.plot=false", "tracking.tensorboard=false"),
    )
    for n in (2, 4, 8):
        with tempfile.TemporaryDirectory() as folder:
            seeds = f"seed={','.join(map(str, range(n)))}"
            command = [sys.executable, "-m", "maze_train", *settings, seeds]
            started = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True, cwd=folder)
            yield f"{n} jobs", (time.perf_counter() - started) / n, "s per job"


def journal() -> Iterator[Row]:
    """Measure the memory for stored actions of 512 environments, one with an endless episode."""
    kept, steps = Journal({"": np.zeros(512, np.int64)}), 0
    for n in (1_000, 4_000, 16_000):
        while steps < n:
            kept.record()
            steps += 1
            if steps % 200 == 0:
                kept.ended(range(1, 512))
        recent = sum(rows.nbytes for rows in kept._recent.values())
        yield f"{n:,} steps", (recent + kept.nbytes) / 1e6, "MB"


def checkpoints() -> Iterator[Row]:
    """Measure the bytes per checkpoint for 8 endless episodes with 17-dimensional actions."""
    kept, steps = Journal({"": np.zeros((8, 17), np.float32)}), 0
    for n in (5_000, 20_000, 80_000):
        while steps < n:
            kept.record()
            steps += 1
            if steps % 1000 == 0 and steps < n:
                kept.state({"": np.zeros((8, 1))}, np.zeros(8))
        state = kept.state({"": np.zeros((8, 1))}, np.zeros(8))
        # Unchanged parts are not written again.
        written = dumps({"envs": state}, lambda path, part: part.version)
        yield f"{n:,} steps", len(written) / 1e6, "MB"


def history() -> Iterator[Row]:
    """Measure one access to `run.history` in a callback."""
    for n in (1_000, 5_000, 30_000):
        rows = [{f"train/{i}": float(i) for i in range(20)} for _ in range(n)]
        info: Any = argparse.Namespace(past_rows=rows)
        tracker = Tracker([], info)
        trainer: Any = argparse.Namespace(tracker=tracker)
        view = TrainingView(trainer, 0)
        yield f"{n:,} rows", _seconds(lambda view=view: view.history[-1]) * 1000, "ms"


class Crowd(MultiAgentEnv):
    """Multi-agent environment with simultaneous or turn-based actions."""

    def __init__(self, n: int, in_turn: bool) -> None:
        self.possible_agents = tuple(f"agent_{i}" for i in range(n))
        self.in_turn = in_turn

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        """Return the same four values for all agents."""
        return spaces.Box(-1.0, 1.0, (4,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        """Return four discrete actions."""
        return spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Turn:
        """Start with the first agent, or with all agents."""
        self.t = 0
        return self._turn({})

    def step(self, actions: dict[str, Any]) -> Turn:
        """Give a reward of 1 to each acting agent."""
        self.t += 1
        return self._turn(dict.fromkeys(actions, 1.0))

    def _turn(self, rewards: dict[str, float]) -> Turn:
        one = self.possible_agents[self.t % len(self.possible_agents)]
        acting = [one] if self.in_turn else self.possible_agents
        return Turn(dict.fromkeys(acting, np.ones(4, np.float32)), rewards)


def critic() -> Iterator[Row]:
    """Measure a PPO update with a centralised critic, with 256 turns in which all agents act."""
    for n in (2, 8, 32):
        found = _times_of(n, in_turn=False, **{"model.centralized_critic": True})
        yield f"{n} agents", found["time/update_s"], "s"


def turns() -> Iterator[Row]:
    """Measure a turn of four environments in which one agent acts, including the policy."""
    for n in (2, 32, 128):
        for units in (64, 256):
            found = _times_of(n, in_turn=True, **{"model.hidden_sizes": [units] * 2})
            yield f"{n} agents, {units} units", found["time/collect_s"] / 64 * 1000, "ms"


def _times_of(n: int, *, in_turn: bool, **overrides: Any) -> dict[str, float]:
    """Return the shortest times over several epochs with one update of 4 x 64 turns."""
    quiet: dict[str, Any] = {
        "tracking.progress": "quiet",
        "tracking.plot": False,
        "tracking.tensorboard": False,
        "evaluation.n_episodes": 0,
        "checkpoint.interval": 0,
        "runner.concurrency": 4,
        "algorithm.n_rollout_steps": 64,
        "algorithm.epoch_length": 1,
        "env.max_episode_steps": 1000,
    }
    with tempfile.TemporaryDirectory() as folder:
        rows = train(
            {"_target_": Crowd, "kwargs": {"n": n, "in_turn": in_turn}},
            "ppo",
            total_steps=3 * 256,
            run_dir=f"{folder}/run",
            seed=0,
            overrides={**quiet, **overrides},
        ).history
    return {key: min(row[key] for row in rows) for key in ("time/update_s", "time/collect_s")}


def _seconds(function: Callable[[], object]) -> float:
    """Return the shortest duration over several calls."""

    def call() -> float:
        started = time.perf_counter()
        function()
        return time.perf_counter() - started

    return min(call() for _ in range(5))


def _in_process(code: str) -> str:
    """Run code in a new process without a fork server and return its output."""
    script = f"if __name__ == '__main__':\n    {code}\n"
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(f"import sys\nsys.path.append({sys.path[0]!r})\n{script}")
        file.flush()
        command = [sys.executable, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


MEASUREMENTS: dict[str, Callable[[], Iterator[Row]]] = {
    measure.__name__: measure
    for measure in (workers, jobs, journal, checkpoints, history, critic, turns)
}


def main() -> None:
    """Run the measurements and print a line per size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS))
    for name in parser.parse_args().only:
        print(f"{name}: {MEASUREMENTS[name].__doc__}")
        for size, value, unit in MEASUREMENTS[name]():
            print(f"  {size:>20} {value:12.4g} {unit}", flush=True)


if __name__ == "__main__":
    main()
