"""Reads Minari datasets through Minari's public interface; `tools/minari.py` writes such datasets.

Minari stores datasets in the directory given by the environment variable `MINARI_DATASETS_PATH`
(default: `~/.minari/datasets`).
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from maze_train.core.errors import DatasetError, RunDirectoryError, ShapeError, SpaceError
from maze_train.core.files import read_json
from maze_train.core.targets import import_extra
from maze_train.core.types import tree_map
from maze_train.data.trajectories import DatasetMetadata, Trajectory
from maze_train.data.trajectory_dataset import TrajectoryDataset
from maze_train.spaces.describe import FlatView, flatten_value

DATASET_ID = re.compile(r"(?:[-_\w][-_\w/]*[-_\w]/)?[-_\w]+-v[0-9]+")
DETAILS = ("algorithm_name", "author", "author_email", "code_permalink", "description")
OWN = "maze_train"
"""Key for the additional metadata of maze_train in Minari metadata."""

MAX_RATIO = 1032
"""Maximum compression ratio of deflate; also allowed for other filters of HDF5."""

HDF5_FILE = "main_data.hdf5"
MAX_DEPTH = 64
MAX_SMALL_NBYTES = 1 << 20
"""Size up to which the compression ratio of an HDF5 dataset is not checked."""

UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, AssertionError, OSError)
"""Exceptions raised by Minari and h5py for damaged data or an unsupported format version."""


def load_minari(dataset_id: str) -> TrajectoryDataset:
    """Read a local Minari dataset into memory.

    If a dataset does not fit in memory, write the episodes returned by `minari_episodes` once with
    a `TrajectoryWriter`, and open the result with `mmap=True`; see docs/datasets.md.

    Nested observations and actions are flattened, and seeds are kept. `metadata.env` contains the
    `id` and `env_spec` of the environment if Minari recorded them; `metadata.policy` contains the
    recorded algorithm and author.

    Args:
        dataset_id: Id of the dataset, such as `D4RL/door/human-v2`.

    Raises:
        DatasetError: If the dataset does not exist, cannot be read, is empty, or contains an
            episode that is not a valid `Trajectory`.
        SpaceError: If a space has an unsupported leaf (Text, Graph, ...).
        ShapeError: If observations or actions do not have the shape of their space.
        MissingExtraError: If Minari or h5py is not installed.
    """
    metadata, episodes = minari_episodes(dataset_id)
    return TrajectoryDataset.from_trajectories(episodes, metadata, f"minari:{dataset_id}")


def minari_episodes(dataset_id: str) -> tuple[DatasetMetadata, Iterator[Trajectory]]:
    """Read a local Minari dataset, episode by episode.

    Args:
        dataset_id: Id of the dataset, such as `D4RL/door/human-v2`.

    Returns:
        Metadata (spaces, environment and policy), and an iterator that reads one episode at a time.

    Raises:
        DatasetError: See `load_minari`; also raised during iteration.
        SpaceError: If a space has an unsupported leaf.
        ShapeError: If observations or actions do not have the shape of their space.
        MissingExtraError: If Minari or h5py is not installed.
    """
    minari = import_extra("minari", "minari", "reading a Minari dataset")
    check_id(dataset_id)
    name = f"minari:{dataset_id}"
    try:
        directory = Path(importlib.import_module("minari.storage").get_dataset_path(dataset_id))
        described = read_json(directory / "data" / "metadata.json")
        for space in ("observation_space", "action_space"):
            # For a missing space, Minari would create the environment that the file names.
            if described and not isinstance(described.get(space), str):
                raise ValueError(f"metadata.json has no {space}")
        source = minari.load_dataset(dataset_id, download=False)
        known = source.storage.metadata
        ends = list(source.storage.get_episode_metadata(source.episode_indices))
    except FileNotFoundError as error:
        raise DatasetError(
            f"{name} is not available locally: list the local datasets with 'minari list local', "
            f"or run 'minari download {dataset_id}'"
        ) from error
    except (ImportError, RunDirectoryError, RecursionError, *UNREADABLE) as error:
        if isinstance(error, ImportError):
            import_extra("h5py", "minari", f"reading {name}")
        raise DatasetError(f"{name} cannot be read: {error!r}") from error
    views = FlatView(source.observation_space), FlatView(source.action_space)
    metadata = DatasetMetadata(
        source.observation_space, source.action_space, *_origin(dataset_id, known)
    )
    seeds = [None if end.get("seed") is None else int(end["seed"]) for end in ends]
    return metadata, _episodes(name, source, views, seeds, directory / "data" / HDF5_FILE)


def _origin(dataset_id: str, known: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the recorded settings of environment and policy."""
    own = known.get(OWN)
    if isinstance(own, dict) and all(isinstance(own.get(key), dict) for key in ("env", "policy")):
        return own["env"], own["policy"]
    env: dict[str, Any] = {}
    if known.get("env_spec") is not None:
        spec = json.loads(known["env_spec"])
        env = {"id": spec.get("id"), "env_spec": spec}
    policy: dict[str, Any] = {"minari": dataset_id}
    for key in DETAILS:
        if (value := known.get(key)) is not None:
            policy[key] = sorted(value) if isinstance(value, set) else value
    return env, policy


def _episodes(
    name: str,
    source: Any,
    views: tuple[FlatView, FlatView],
    seeds: list[int | None],
    file: Path,
) -> Iterator[Trajectory]:
    """Yield the episodes of a dataset; `file` exists if the dataset is stored in HDF5."""
    episodes = iter(source.iterate_episodes())
    for index, seed in zip(source.episode_indices, seeds, strict=True):
        try:
            if file.exists():
                with importlib.import_module("h5py").File(file, "r") as content:
                    _check_hdf5(content, f"episode_{index}")
            episode = next(episodes)
        except (*UNREADABLE, StopIteration) as error:
            raise DatasetError(f"{name} cannot be read: {error!r}") from error
        label = f"{name}: episode {episode.id}"
        flags = [np.asarray(x, bool) for x in (episode.terminations, episode.truncations)]
        if any(flag[:-1].any() for flag in flags):
            raise DatasetError(
                f"{label} continues after a terminated or truncated step: split the dataset into "
                f"episodes with Minari first"
            )
        try:
            yield Trajectory(
                obs=tree_map(np.asarray, flatten_value(views[0], episode.observations)),
                actions=tree_map(np.asarray, flatten_value(views[1], episode.actions)),
                rewards=np.asarray(episode.rewards),
                terminated=bool(flags[0][-1:].any()),
                truncated=bool(flags[1][-1:].any()),
                seed=seed,
            )
        except (ShapeError, SpaceError, ValueError) as error:
            raise DatasetError(f"{label} is not a valid trajectory: {error}") from error


def _check_hdf5(group: Any, name: str, depth: int = 0) -> None:
    """Check that an HDF5 dataset or group only refers to data in the file, of a possible size.

    Raises:
        ValueError: If a link or a dataset refers to other files, or if the stored data is too small
            for the size of a dataset, which HDF5 fills with one value.
    """
    h5py = importlib.import_module("h5py")
    if not isinstance(group.get(name, getlink=True), h5py.HardLink) or depth > MAX_DEPTH:
        raise ValueError(f"{name} is a link")
    item = group[name]
    if isinstance(item, h5py.Group):
        for part in item:
            _check_hdf5(item, part, depth + 1)
    elif isinstance(item, h5py.Dataset):
        stored = item.id.get_storage_size()
        if item.external or item.is_virtual:
            raise ValueError(f"{name} refers to other files")
        if item.nbytes > max(MAX_RATIO * stored, MAX_SMALL_NBYTES):
            raise ValueError(f"{name} has {item.nbytes:,} bytes, but {stored:,} bytes are stored")


def check_id(dataset_id: str) -> None:
    """Check the name of a dataset.

    Raises:
        DatasetError: If the name is malformed.
    """
    if not DATASET_ID.fullmatch(dataset_id):
        raise DatasetError(
            f"{dataset_id!r} is not the name of a Minari dataset: expected <name>-v<number>, such "
            f"as cartpole/random-v0"
        )
