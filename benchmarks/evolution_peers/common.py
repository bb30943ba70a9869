"""Shared code of the peer scripts: workloads, the policy, and timing."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass, field

# Must be set before PyTorch is imported; inherited by processes that the peers start.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import nn

ENVS = {"short": "CartPole-v1", "long": "endless_cartpole:EndlessCartPole-v0"}
POPULATION = 64
"""Population size: pairs of a perturbation and its mirror image."""
NOISE_STDDEV = 0.05
LR = 1e-9
"""Tiny learning rate, so that the policy and the episode lengths do not change."""

WARM_UP_UPDATES = 2
WARM_UP_SECONDS = 2.0


def build_policy() -> nn.Sequential:
    """Build the policy at the centre of the population, with the same weights for all libraries."""
    # Peers may call this at any time; it must not reset their random number generators.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Linear(4, 64), nn.Tanh()), *(nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 2)
        )


def initial_parameters() -> torch.Tensor:
    """Return the weights of that policy `[dim]`, layer by layer, weight before bias."""
    return nn.utils.parameters_to_vector(build_policy().parameters()).detach()


@dataclass
class Window:
    """Counts updates from the end of the warm-up until `seconds` have passed.

    The window starts and ends at the end of an update, so that whole updates are counted.

    Args:
        seconds: Duration, > 0.
    """

    seconds: float
    warm_up: list[float] = field(default_factory=list)
    opened: float = 0.0
    closed: float = 0.0
    steps: int = 0
    episodes: int = 0
    updates: int = 0

    @property
    def is_over(self) -> bool:
        """Whether the measurement is complete."""
        return self.closed - self.opened >= self.seconds

    def add(self, steps: int, episodes: int) -> None:
        """Count an update that has just finished, with its episodes."""
        now = time.perf_counter()
        if not self.opened:
            self.warm_up.append(now)
            passed = now - self.warm_up[0]
            if len(self.warm_up) > WARM_UP_UPDATES and passed >= WARM_UP_SECONDS:
                self.opened = self.closed = now
            return
        self.closed = now
        self.steps += steps
        self.episodes += episodes
        self.updates += 1

    def print(self) -> None:
        """Print the result as a line of JSON."""
        elapsed = self.closed - self.opened
        result = {
            "steps_per_second": self.steps / elapsed,
            "episodes_per_second": self.episodes / elapsed,
            "episode_length": self.steps / self.episodes,
            "updates": self.updates,
        }
        print(json.dumps(result), flush=True)


def parse_arguments() -> argparse.Namespace:
    """Parse the arguments common to all peers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--setting", choices=list(ENVS), required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--way", default="")
    return parser.parse_args()
