"""Opens trajectory datasets from a directory, Minari, or a user-defined function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from gymnasium import spaces

from maze_train.core.errors import DatasetError, MazeTrainError
from maze_train.core.targets import TARGET, build_target
from maze_train.data.minari import load_minari
from maze_train.data.trajectories import DatasetMetadata
from maze_train.data.trajectory_dataset import TrajectoryDataset

MINARI = "minari:"
"""Prefix that selects a Minari dataset."""


def open_dataset(
    source: str | Path | Mapping[str, Any],
    *,
    observation_space: spaces.Space[Any] | None = None,
    action_space: spaces.Space[Any] | None = None,
    mmap: bool = True,
    verify: bool = True,
    on_damaged: Literal["raise", "skip"] = "raise",
) -> TrajectoryDataset:
    """Open a dataset of trajectories.

    Args:
        source: A directory; `minari:<id>` for a local Minari dataset; or a mapping whose `_target_`
            is the dotted path of a function that returns a `TrajectoryDataset` or `Trajectory`
            objects (see `targets.build_target`).
        observation_space: Observation space of one environment; required if the function returns
            `Trajectory` objects, because these do not contain spaces.
        action_space: Action space of one environment; required if the function returns `Trajectory`
            objects.
        mmap: See `TrajectoryDataset.open`; used only for directories, like `verify` and
            `on_damaged`.
        verify: Whether to check the SHA-256 digests of the files.
        on_damaged: Whether to `raise` an error for a damaged part or to `skip` the part.

    Raises:
        DatasetError: If the dataset does not exist or is damaged, or the function returns an
            unsupported type.
        ConfigError: If the function cannot be found or does not accept its arguments.
        ShapeError: If the shapes of a `Trajectory` do not match the spaces.
        SpaceError: If values are outside their spaces, or a space is not supported.
        MissingExtraError: If Minari is required and not installed.
    """
    if isinstance(source, Mapping):
        return _from_target(source, observation_space, action_space)
    if isinstance(source, str) and source.startswith(MINARI):
        return load_minari(source[len(MINARI) :])
    if isinstance(source, str | Path) and str(source):
        return TrajectoryDataset.open(source, mmap=mmap, verify=verify, on_damaged=on_damaged)
    raise DatasetError(
        f"{source!r} is not a dataset: expected a directory, {MINARI}<id>, or a mapping "
        f"with the key {TARGET}"
    )


def _from_target(
    node: Mapping[str, Any],
    observation_space: spaces.Space[Any] | None,
    action_space: spaces.Space[Any] | None,
) -> TrajectoryDataset:
    """Call the function given by `_target_`, and return the dataset that the function creates."""
    if TARGET not in node:
        raise DatasetError(
            f"{dict(node)!r} is not a dataset: expected the key {TARGET} with the dotted "
            f"path of a function"
        )
    name = str(node[TARGET])
    found = build_target(node)
    if isinstance(found, TrajectoryDataset):
        return found
    if isinstance(found, str | bytes | Mapping) or not isinstance(found, Iterable):
        raise DatasetError(
            f"{name} returned {type(found).__name__}: expected a TrajectoryDataset, or Trajectory "
            f"objects"
        )
    if observation_space is None or action_space is None:
        raise DatasetError(
            f"{name} returned {type(found).__name__}, whose spaces are unknown: return "
            "TrajectoryDataset.from_trajectories(...), which includes the spaces"
        )
    metadata = DatasetMetadata(observation_space, action_space, policy={"source": name})
    try:
        return TrajectoryDataset.from_trajectories(found, metadata, name)
    except MazeTrainError:
        raise
    except Exception as error:
        raise DatasetError(f"{name} failed: {type(error).__name__}: {error}") from error
