"""Memory and speed of the replay buffer.

    python benchmarks/replay.py

Fills buffers of increasing size with HalfCheetah-like transitions. Prints bytes per transition and
the theoretical minimum (observation, action, reward, two flags), the growth of resident memory, and
microseconds per sample of 256 transitions.
"""

from __future__ import annotations

import resource
import time

import numpy as np
import torch
from gymnasium import spaces

from maze_train import Rollout, UniformReplayBuffer

OBS, ACTIONS, ENVS, STEPS = 17, 6, 4, 250
MINIMUM = 4 * (OBS + ACTIONS + 1) + 1
"""Bytes of a transition: float32 values, and the flags in one byte."""


def random_rollout(generator: torch.Generator) -> Rollout:
    """Create a random rollout of 4 environments that are truncated after 1000 steps."""
    shape = (STEPS, ENVS)
    return Rollout(
        obs=torch.randn(STEPS + 1, ENVS, OBS, generator=generator),
        actions=torch.randn(*shape, ACTIONS, generator=generator),
        rewards=torch.randn(shape, generator=generator),
        end=torch.zeros(shape, dtype=torch.uint8),
        final_obs=torch.zeros(0, OBS),
        final_positions=torch.zeros(0, dtype=torch.int64),
    )


def resident() -> int:
    """Return the peak resident memory in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def microseconds(buffer: UniformReplayBuffer, repeats: int = 300) -> float:
    """Return the time of a sample of 256 in microseconds, the best of five rounds."""
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(repeats):
            buffer.sample_batch(256)
        best = min(best, (time.perf_counter() - started) / repeats)
    return best * 1e6


def main() -> None:
    """Print one line per size."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    space = spaces.Box(-np.inf, np.inf, (OBS,), np.float32)
    print(f"{'transitions':>11} {'bytes each':>10} {'minimum':>8} {'resident':>9} {'us/sample':>9}")
    for size in (1_000, 10_000, 100_000, 1_000_000):
        before = resident()
        buffer = UniformReplayBuffer(size, space, torch.zeros(ACTIONS), num_envs=ENVS)
        rollout = random_rollout(generator)
        for _ in range(size // (STEPS * ENVS)):
            buffer.add_rollout(rollout)
        grown = resident() - before
        print(
            f"{len(buffer):11,} {buffer.nbytes / size:10.1f} {MINIMUM:8} "
            f"{grown / 1e6:6.1f} MB {microseconds(buffer):9.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
