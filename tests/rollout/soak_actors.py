"""Trains with IMPALA while actors are killed and stopped at random moments.

    python tests/rollout/soak_actors.py --minutes 10 [--seed 0] [--start-method forkserver]
    python tests/rollout/soak_actors.py --minutes 10 --endless

After every update it is checked that no step is lost or counted twice, every second how much memory
the learner and the actors take. Prints a line each 30 s and a summary; the exit code is 1 if a
number was wrong, if nobody was killed, or if memory grew by more than 5 % after it had settled.

With `--endless`, episodes never end, and nobody is killed: what an actor keeps of a running episode
would be gone with it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from maze_train.config.loading import load_config
from maze_train.runners.factory import build_runner
from maze_train.training.outcome import Limits
from maze_train.training.services import TrainerServices

if TYPE_CHECKING:
    from maze_train.events import Statistics
    from maze_train.learner.progress import Progress

KILL_EVERY_S = 5.0
STOPPED_SHARE = 0.2
"""Share of the failures that are a SIGSTOP."""
TIMEOUT_S = 3.0
SETTLED_S = 60.0
MOST_GROWTH = 0.05
ALLOWED_START_S = 60.0


def resident_mb(pid: int) -> float:
    """Resident memory of a process; 0 if it is gone."""
    try:
        pages = int(Path("/proc", str(pid), "statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Soak:
    """Kills or stops actors now and then, and checks and measures after each update.

    Args:
        trainer: The trainer.
        seed: Seed of when, whom and how; None: nobody is killed.
        batch: Steps of an update.
    """

    def __init__(self, trainer: Any, seed: int | None, batch: int) -> None:
        self.problems: list[str] = []
        self.memory: list[tuple[float, float, float]] = []
        self.kills = self.stops = 0
        self._began = time.monotonic()
        self._told = self._sampled = 0.0
        self._trainer, self._actors, self._batch = trainer, trainer.actors, batch
        self._rng = random.Random(seed)
        self._update_once = trainer.update_once
        trainer.update_once = self.update_once
        signal.signal(signal.SIGALRM, self._strike)
        if seed is not None:
            self._wait()

    def _wait(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._rng.uniform(0.01, 2.0 * KILL_EVERY_S))

    def _strike(self, number: int, frame: object) -> None:
        # A process that is being replaced at this moment is left alone.
        with suppress(ValueError, ProcessLookupError, IndexError):
            process = self._rng.choice(self._actors._pool.processes)
            if self._rng.random() < STOPPED_SHARE:
                os.kill(process.pid, signal.SIGSTOP)
                self.stops += 1
            else:
                process.kill()
                self.kills += 1
        self._wait()

    def end(self) -> None:
        """Leave actors alone from now on."""
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """An update, and a look at what it left."""
        steps = self._update_once(progress, statistics)
        self.check(self._trainer.env_steps + steps, self._trainer.updates + 1)
        seconds = time.monotonic() - self._began
        if seconds - self._sampled >= 1.0:
            self._sampled = seconds
            actors_mb = max(resident_mb(p.pid or 0) for p in self._actors._pool.processes)
            self.memory.append((seconds, resident_mb(os.getpid()), actors_mb))
        if seconds - self._told >= 30.0:
            self._told = seconds
            restarts, counts = self._actors.worker_restarts, self._actors.counts
            print(f"{seconds:6.0f} s  {counts}  restarts {restarts}  MB {self.memory[-1]}")
        return steps

    def check(self, env_steps: int, updates: int) -> None:
        """Whether all steps are accounted for."""
        actors, counts = self._actors, self._actors.counts
        most = actors.num_actors * actors.num_slots * actors.num_envs * actors.num_steps
        if not 0 <= counts.in_flight <= most:
            self.problems.append(f"{updates}: {counts}, in flight {counts.in_flight} of {most}")
        if not counts.trained == env_steps == updates * self._batch:
            self.problems.append(f"{updates}: {counts}, env_steps {env_steps}")

    def growth(self) -> list[float]:
        """Relative growth of the memory of the learner and of the largest actor, once settled."""
        end = self.memory[-1][0]
        settled = min(SETTLED_S, end / 2.0)
        early = [row for row in self.memory if settled <= row[0] <= settled + 0.1 * end]
        late = [row for row in self.memory if row[0] >= 0.9 * end]
        return [
            statistics.median(r[i] for r in late) / statistics.median(r[i] for r in early) - 1.0
            for i in (1, 2)
        ]


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The configuration of the run."""
    return {
        "algorithm": "impala",
        "algorithm.epoch_length": 200,
        "runner": "local",
        "runner.start_method": arguments.start_method,
        "runner.on_worker_failure": "restart",
        "runner.max_worker_restarts": 10**9,
        "runner.worker_timeout_s": ALLOWED_START_S,
        "env": {"_target_": "actor_envs.EndlessEnv"} if arguments.endless else "CartPole-v1",
        "checkpoint.interval": 0,
        "evaluation.n_episodes": 0,
        "seed": arguments.seed,
    }


def soak(arguments: argparse.Namespace) -> list[str]:
    """Train and kill; returns what was wrong."""
    config: Any = load_config(settings(arguments))
    with build_runner(config) as runner:
        limits = Limits(max_wall_time_s=60.0 * arguments.minutes)
        trainer: Any = runner.builder.build(TrainerServices(limits=limits))
        actors = trainer.actors
        runner.builder.before_training(trainer)
        actors._pool.timeout_s = TIMEOUT_S
        batch = config.algorithm.actors_batch_size * actors.num_envs * actors.num_steps
        found = Soak(trainer, None if arguments.endless else arguments.seed, batch)
        try:
            trainer.train()
        finally:
            found.end()
    counts, problems = actors.counts, found.problems
    found.check(trainer.env_steps, trainer.updates)
    if counts.in_flight or counts.made != counts.trained + counts.dropped:
        problems.append(f"at the end: {counts}")
    if multiprocessing.active_children():
        problems.append(f"left: {multiprocessing.active_children()}")
    least = max(1, found.kills + found.stops - actors.num_actors) / 2
    if actors.worker_restarts < least and not arguments.endless:
        problems.append(f"{found.kills} kills, but {actors.worker_restarts} restarts")
    if max(found.growth()) > MOST_GROWTH:
        problems.append("memory grew")
    print(
        f"{trainer.updates} updates, {counts}; {found.kills} kills, {found.stops} stops, "
        f"{actors.worker_restarts} restarts; memory of learner and actor grew {found.growth()}"
    )
    return problems


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start-method", default="forkserver")
    parser.add_argument("--endless", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # Else a new actor imports for longer than it may stand still.
    multiprocessing.set_forkserver_preload(["maze_train.rollout.actor_worker"])
    problems = soak(arguments)
    for problem in problems[:20]:
        print(f"WRONG: {problem}")
    print(f"{len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
