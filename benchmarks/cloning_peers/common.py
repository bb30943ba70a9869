"""Shared code of all libraries: data, settings, timing and output."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Must be set before PyTorch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gymnasium import Space
    from numpy.typing import NDArray

__all__ = [
    "ARRAYS",
    "CASES",
    "DATA_SET",
    "ENTROPY_COEF",
    "EPISODE_STEPS",
    "LR",
    "NUM_EPISODES",
    "Case",
    "load_weights",
    "measure",
    "parse_arguments",
    "weights_path",
]

NUM_EPISODES, EPISODE_STEPS = 512, 200
"""102,400 transitions, a multiple of 32, 256 and 2048, so that all batches are full."""

LR = 1e-3
ENTROPY_COEF = 1e-3
"""Coefficient of the entropy bonus, imitation's default."""

WARM_UP_UPDATES = 200
"""Number of updates after which the losses are compared."""

DATA_SET, ARRAYS = "data_set", "arrays.npz"


@dataclass(frozen=True)
class Case:
    """Spaces of an environment."""

    obs_size: int
    action_space: Space[Any]

    @property
    def observation_space(self) -> Box:
        """Space of unbounded vectors."""
        return Box(-np.inf, np.inf, (self.obs_size,), np.float32)


CASES = {
    "cartpole": Case(4, Discrete(2)),
    "halfcheetah": Case(17, Box(-1.0, 1.0, (6,), np.float32)),
}


def weights_path(folder: Path, size: int) -> Path:
    """Return the file with the initial weights of a network with two layers of `size` units."""
    return folder / f"weights-{size}.npz"


@torch.no_grad()
def load_weights(folder: Path, size: int, parameters: Sequence[torch.Tensor]) -> None:
    """Copy the initial weights into a network in place, layer by layer, weight before bias.

    Args:
        folder: Output folder of `recordings.py`.
        size: Units of each hidden layer.
        parameters: Parameters of the three layers.
    """
    with np.load(weights_path(folder, size), allow_pickle=False) as file:
        values: list[NDArray[np.float32]] = [file[name] for name in file.files]
    for parameter, value in zip(parameters, values, strict=True):
        assert parameter.shape == value.shape, f"{parameter.shape} and {value.shape}"
        parameter.copy_(torch.from_numpy(value))


def measure(
    train: Callable[[int], None],
    loss: Callable[[], float],
    batch_size: int,
    seconds: float,
) -> None:
    """Measure training for about `seconds` and print the result as a line of JSON.

    Args:
        train: Performs the given number of updates, one full batch each.
        loss: Computes the loss over all data, including the entropy bonus.
        batch_size: Transitions per update.
        seconds: Approximate duration of the measurement, > 0.
    """
    result = {"loss_before": loss()}
    started = time.perf_counter()
    train(WARM_UP_UPDATES)
    rate = WARM_UP_UPDATES / (time.perf_counter() - started)
    result["loss_after"] = loss()
    updates = max(1, round(seconds * rate))
    started, cpu_started = time.perf_counter(), time.process_time()
    train(updates)
    elapsed, cpu_elapsed = time.perf_counter() - started, time.process_time() - cpu_started
    result["samples_per_second"] = updates * batch_size / elapsed
    result["cpu_us_per_update"] = cpu_elapsed / updates * 1e6
    print(json.dumps(result), flush=True)


def parse_arguments() -> argparse.Namespace:
    """Parse the arguments common to all libraries."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="what recordings.py wrote")
    parser.add_argument("--size", type=int, required=True, help="units of each hidden layer")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--case", choices=list(CASES), required=True)
    parser.add_argument("--way", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    return arguments
