"""Recorded data by name: files of this package, data sets of Minari, functions."""

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
"""Prefix of the names of Minari data sets."""


def open_dataset(
    source: str | Path | Mapping[str, Any],
    *,
    observation_space: spaces.Space[Any] | None = None,
    action_space: spaces.Space[Any] | None = None,
    mmap: bool = True,
    verify: bool = True,
    on_damaged: Literal["raise", "skip"] = "raise",
) -> TrajectoryDataset:
    """Open a data set of trajectories.

    Args:
        source: A directory; `minari:<id>` for a Minari data set of this machine; or a mapping with
            the key `_target_` that names a function (see `targets.build_target`), which returns a
            `TrajectoryDataset` or `Trajectory` objects.
        observation_space: Space of one environment, for `Trajectory` objects: they have no spaces.
        action_space: Space of one environment, for `Trajectory` objects.
        mmap: See `TrajectoryDataset.open`; like the next two for directories only.
        verify: Whether files are compared with their digests.
        on_damaged: Treatment of damaged parts.

    Raises:
        DatasetError: If there is no such data set, it is damaged, or the function returned
            something else.
        ConfigError: If the function cannot be found or refuses its arguments.
        ShapeError: If a `Trajectory` does not have the shapes of the spaces.
        SpaceError: If its numbers do not fit the spaces, or a space cannot be described.
        MissingExtraError: If Minari is needed and not installed.
    """
    if isinstance(source, Mapping):
        return _from_target(source, observation_space, action_space)
    if isinstance(source, str) and source.startswith(MINARI):
        return load_minari(source[len(MINARI) :])
    if isinstance(source, str | Path) and str(source):
        return TrajectoryDataset.open(source, mmap=mmap, verify=verify, on_damaged=on_damaged)
    raise DatasetError(
        f"{source!r} names no data set: expected a directory, {MINARI}<id>, or a mapping with the "
        f"key {TARGET}"
    )


def _from_target(
    node: Mapping[str, Any],
    observation_space: spaces.Space[Any] | None,
    action_space: spaces.Space[Any] | None,
) -> TrajectoryDataset:
    """Call the function that a mapping names, and return its data set."""
    if TARGET not in node:
        raise DatasetError(
            f"{dict(node)!r} names no data set: a mapping has to have the key {TARGET}, the dotted "
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
            f"{name} returned {type(found).__name__}, whose spaces are not known: let it return "
            f"TrajectoryDataset.from_trajectories(...), which has them"
        )
    metadata = DatasetMetadata(observation_space, action_space, policy={"source": name})
    try:
        return TrajectoryDataset.from_trajectories(found, metadata, name)
    except MazeTrainError:
        raise
    except Exception as error:
        raise DatasetError(f"{name} failed: {type(error).__name__}: {error}") from error
