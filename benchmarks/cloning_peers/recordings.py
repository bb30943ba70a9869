"""Writes the dataset and the initial weights that all libraries use.

    python recordings.py --folder FOLDER --case cartpole --sizes 32 256

Observations are standard normal. Actions come from a random network with 64 tanh units: discrete
actions are sampled from its softmax, continuous ones are its outputs plus normal noise with std
0.3, clipped to [-1, 1]. The episodes are written with `TrajectoryWriter`. `arrays.npz` has the same
transitions for the peer, which cannot read this format.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from common import ARRAYS, CASES, DATA_SET, EPISODE_STEPS, NUM_EPISODES, Case, weights_path
from gymnasium.spaces import Discrete

from maze_train.data.datasets import open_dataset
from maze_train.data.trajectories import DatasetMetadata, Trajectory
from maze_train.data.trajectory_files import TrajectoryWriter
from maze_train.nets.config import ModelConfig
from maze_train.nets.policy_model import PolicyModel, build_policy

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Teacher:
    """Random policy that depends on the observation.

    Args:
        case: Spaces.
        rng: Generator for weights and actions.
    """

    def __init__(self, case: Case, rng: np.random.Generator) -> None:
        self._rng = rng
        space = case.action_space
        self._is_discrete = isinstance(space, Discrete)
        outputs = int(space.n) if isinstance(space, Discrete) else math.prod(space.shape or ())
        self._hidden = rng.normal(size=(case.obs_size, 64)) / np.sqrt(case.obs_size)
        self._head = rng.normal(size=(64, outputs)) / np.sqrt(64)

    def act(self, obs: NDArray[np.float32]) -> NDArray[np.int64] | NDArray[np.float32]:
        """Return actions for observations `[T, obs size]`."""
        outputs = np.tanh(obs @ self._hidden) @ self._head
        if self._is_discrete:
            # The argmax of logits plus Gumbel noise is a sample from the softmax.
            choices: NDArray[np.int64] = (
                3.0 * outputs + self._rng.gumbel(size=outputs.shape)
            ).argmax(1)
            return choices
        noisy = outputs + self._rng.normal(scale=0.3, size=outputs.shape)
        actions: NDArray[np.float32] = noisy.clip(-1.0, 1.0).astype(np.float32)
        return actions


def write_data_set(folder: Path, case: Case) -> None:
    """Write the episodes."""
    rng = np.random.default_rng(0)
    teacher = Teacher(case, rng)
    metadata = DatasetMetadata(case.observation_space, case.action_space)
    with TrajectoryWriter(folder / DATA_SET, metadata) as writer:
        for _ in range(NUM_EPISODES):
            obs = rng.standard_normal((EPISODE_STEPS + 1, case.obs_size), np.float32)
            actions = teacher.act(obs[:-1])
            rewards = np.zeros(EPISODE_STEPS)
            writer.add(Trajectory(obs, actions, rewards, terminated=False, truncated=True))


def write_arrays(folder: Path) -> None:
    """Write the transitions of the dataset as arrays."""
    parts = open_dataset(folder / DATA_SET).parts
    steps = [np.arange(len(part.actions)).reshape(-1, EPISODE_STEPS) for part in parts]
    # An episode has one more observation than steps.
    rows = [(own + np.arange(len(own))[:, None]).ravel() for own in steps]
    pairs = list(zip(parts, rows, strict=True))
    dones = np.arange(NUM_EPISODES * EPISODE_STEPS) % EPISODE_STEPS == EPISODE_STEPS - 1
    np.savez(
        folder / ARRAYS,
        obs=np.concatenate([np.asarray(part.obs)[own] for part, own in pairs]),
        next_obs=np.concatenate([np.asarray(part.obs)[own + 1] for part, own in pairs]),
        acts=np.concatenate([np.asarray(part.actions) for part in parts]),
        dones=dones,
    )


def write_weights(folder: Path, case: Case, size: int) -> None:
    """Write the initial weights: orthogonal, the default of both libraries."""
    config = ModelConfig(hidden_sizes=[size, size], activation="tanh")
    model = build_policy(config, case.observation_space, case.action_space, 0)
    assert isinstance(model, PolicyModel)
    np.savez(weights_path(folder, size), *(p.detach() for p in model.policy.net.parameters()))


def main() -> None:
    """Write the dataset, the arrays and the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--case", choices=list(CASES), required=True)
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    arguments = parser.parse_args()
    case = CASES[arguments.case]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    write_data_set(arguments.folder, case)
    write_arrays(arguments.folder)
    for size in arguments.sizes:
        write_weights(arguments.folder, case, size)


if __name__ == "__main__":
    main()
