"""Recorded episodes that behavioral cloning learns from."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.data.datasets import open_dataset
from maze_train.data.trajectory_dataset import TrajectoryDataset
from maze_train.errors import ConfigError, DatasetError
from maze_train.notices import tell
from maze_train.types import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maze_train.data.trajectory_parts import TrajectoryPart


DATASET = "runner.dataset"


def open_recorded(
    source: str | dict[str, Any], env_spaces: tuple[Any, Any], on_damaged: Any
) -> TrajectoryDataset:
    """The data set that a setting names.

    Args:
        source: The value of `runner.dataset`.
        env_spaces: Observation and action space, for episodes that have none of their own.
        on_damaged: Reaction to damaged parts.

    Raises:
        ConfigError: If there is no data set.
        DatasetError: If it is damaged.
    """
    try:
        return open_dataset(
            source,
            observation_space=env_spaces[0],
            action_space=env_spaces[1],
            on_damaged=on_damaged,
        )
    except ConfigError as error:
        raise error.below(DATASET) from error
    except DatasetError as error:
        if isinstance(source, str) and (Path(source) / "dataset.json").exists():
            raise  # it is the right one, and damaged
        raise ConfigError(DATASET, str(error), source) from error


def kept_parts(
    dataset: TrajectoryDataset, known: Sequence[str], source: str | dict[str, Any]
) -> TrajectoryDataset:
    """The parts that a run which is continued began with; episodes may have been added.

    Args:
        dataset: The data set as it is now.
        known: Fingerprints of the parts that the run began with.
        source: The value of `runner.dataset`.

    Raises:
        ConfigError: If some of these parts are missing.
    """
    parts = dict(zip(fingerprints(dataset), dataset.parts, strict=True))
    missing = [part for part in known if part not in parts]
    if missing:
        raise ConfigError(
            DATASET,
            f"{len(missing)} of the {len(known)} parts that this run learned from are not "
            "there: expected the same data set; episodes may have been added to a directory, "
            "not to what a function or Minari gives",
            source,
        )
    added = len(dataset) - sum(parts[key].num_episodes for key in known)
    if added:
        tell(
            f"{added} episodes were added to the data set since this run began, and are left "
            "out: a new run learns from them (base_run=<this one> begins with its policy)"
        )
    return TrajectoryDataset([parts[key] for key in known], dataset.metadata)


def fingerprints(dataset: TrajectoryDataset) -> list[str]:
    """Digests that tell the parts of a data set from others."""
    return [_fingerprint(part) for part in dataset.parts]


def _fingerprint(part: TrajectoryPart) -> str:
    """Digest of lengths, actions and rewards, and of the first observation of each episode."""
    digest = hashlib.sha256(part.lengths.tobytes())
    first = part.starts[:-1] + np.arange(part.num_episodes)
    for array in (*tree_leaves(part.actions), part.rewards):
        digest.update(np.ascontiguousarray(array).data)
    for array in tree_leaves(part.obs):
        digest.update(np.ascontiguousarray(array[first]).data)
    return digest.hexdigest()
