"""What the scripts of the peers share: workloads, the policy, and the time that counts."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass, field

# Before anything imports PyTorch, and for the processes that the peers start.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import nn

ENVS = {"short": "CartPole-v1", "long": "endless_cartpole:EndlessCartPole-v0"}
POPULATION = 64
"""Policies per update: pairs of a perturbation and its mirror image."""
NOISE_STDDEV = 0.05
LR = 1e-9
"""So small that the policy stays the one that training began with, and episodes as long."""

WARM_UP_UPDATES = 2
WARM_UP_SECONDS = 2.0


def build_policy() -> nn.Sequential:
    """The policy in the middle of the population, with the same weights on all sides."""
    # Peers call this when they like; it must not make them draw the same noise again.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Linear(4, 64), nn.Tanh()), *(nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 2)
        )


def initial_parameters() -> torch.Tensor:
    """Weights of that policy, layer by layer, weight before bias. [dim]."""
    return nn.utils.parameters_to_vector(build_policy().parameters()).detach()


@dataclass
class Window:
    """Counts updates from the end of the warm-up until `seconds` have passed.

    It opens and closes with the end of an update, so that whole updates are counted.

    Args:
        seconds: Length, > 0.
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
        """Whether all was measured."""
        return self.closed - self.opened >= self.seconds

    def add(self, steps: int, episodes: int) -> None:
        """Count an update that has just ended, with the episodes that it learned from."""
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
    """The arguments that all peers take."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--setting", choices=list(ENVS), required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--way", default="")
    return parser.parse_args()
