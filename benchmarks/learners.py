"""Duration of a PPO update with one and with several learners, on synthetic rollouts.

    python benchmarks/learners.py [--learners 1 2] [--updates 4] [--only images]

Image observations have the shape of Atari (4 x 84 x 84 bytes) and use the CNN; vectors have 17
values and use two layers of 64 units. The groups take turns. The table shows medians, and CPU
seconds of the first learner and of all other learners, which do not depend on the machine's load.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from gymnasium import spaces

from maze_train import LearnerGroup, ModelConfig, PPOAlgorithmConfig, PPOLearner, Progress, Rollout
from maze_train.nets.actor_critic import build_actor_critic
from maze_train.workers.process_pool import LocalProcesses

if TYPE_CHECKING:
    from maze_train.learner.learner import Learner

STEPS, ENVS = 128, 8
OBSERVATIONS = {
    "images": spaces.Box(0, 255, (4, 84, 84), np.uint8),
    "vectors": spaces.Box(-1.0, 1.0, (17,), np.float32),
}


def make_rollout(space: spaces.Box) -> Rollout:
    """Create a synthetic rollout."""
    generator = torch.Generator().manual_seed(0)
    shape = (STEPS + 1, ENVS, *space.shape)
    obs = torch.randint(0, 2, shape, generator=generator).to(torch.uint8)
    return Rollout(
        obs=obs if space.dtype == np.uint8 else obs.float(),
        actions=torch.randint(0, 4, (STEPS, ENVS), generator=generator),
        rewards=torch.randn(STEPS, ENVS, generator=generator),
        end=torch.zeros(STEPS, ENVS, dtype=torch.uint8),
        final_obs=obs[0, :0] if space.dtype == np.uint8 else obs[0, :0].float(),
        final_positions=torch.zeros(0, dtype=torch.int64),
    )


def cpu_seconds(learner: Learner[object, object, object]) -> float:
    """Return the CPU seconds of a learner's process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def make_group(space: spaces.Box, n_learners: int) -> LearnerGroup:
    """Create a PPO learner group with default settings except for minibatches of 256."""
    model = build_actor_critic(ModelConfig(), space, spaces.Discrete(4), seed=1)
    config = PPOAlgorithmConfig(n_rollout_steps=STEPS, batch_size=256, n_optimization_epochs=4)
    return LearnerGroup(PPOLearner(model, config), n_learners, LocalProcesses())


def measure(space: spaces.Box, counts: list[int], updates: int) -> None:
    """Print a row for each number of learners."""
    rollout, groups = make_rollout(space), {n: make_group(space, n) for n in counts}
    walls: dict[int, list[float]] = {n: [] for n in counts}
    cpus: dict[int, list[list[float]]] = {n: [] for n in counts}
    try:
        for update in range(updates + 1):
            for n, group in groups.items():
                before, started = group.foreach_learner(cpu_seconds), time.perf_counter()
                group.update(rollout, Progress(updates=update))
                if update:  # The first update starts processes.
                    walls[n].append(time.perf_counter() - started)
                    after = group.foreach_learner(cpu_seconds)
                    cpus[n].append([b - a for a, b in zip(before, after, strict=True)])
    finally:
        for group in groups.values():
            group.shutdown()
    for n in counts:
        own = statistics.median(used[0] for used in cpus[n])
        others = statistics.median(sum(used[1:]) for used in cpus[n])
        ratio = statistics.median(walls[counts[0]]) / statistics.median(walls[n])
        print(f"{n:8}{statistics.median(walls[n]):12.3f}{ratio:8.2f}{own:12.3f}{others:12.3f}")


def main() -> None:
    """Compare numbers of learners."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--only", choices=OBSERVATIONS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, space in OBSERVATIONS.items():
        if arguments.only in (None, name):
            print(f"{name}\nlearners   s/update   times   cpu first  cpu others")
            measure(space, arguments.learners, arguments.updates)


if __name__ == "__main__":
    main()
