"""File format and writer of trajectory datasets.

docs/datasets.md describes the format.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from safetensors.numpy import save

from maze_train.core.checks import check_positive
from maze_train.core.errors import DatasetError, MazeTrainError, RunDirectoryError, did_you_mean
from maze_train.core.files import (
    atomic_write,
    exclusive,
    fsync_directory,
    open_regular,
    read_regular,
    remove_leftovers,
    seal,
    unseal,
    versions,
)
from maze_train.core.folders import make_folders
from maze_train.core.text import json_text
from maze_train.core.types import Array
from maze_train.data.trajectories import (
    PART_NBYTES,
    DatasetMetadata,
    Leaves,
    Trajectory,
    TrajectoryPart,
    check_content,
    check_part,
    checked_trajectory,
    groups_of,
    joined,
)
from maze_train.spaces.describe import space_from_dict, space_to_dict

DATASET = "dataset.json"
SCHEMA, VERSION = "maze_train.trajectories", 2

MAPPED_NBYTES = 1 << 20
"""Minimum size of mapped files in bytes. Smaller files are read, because mapped files remain
open."""

LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that indicate a system limit instead of damage. ENOMEM includes too many mapped files."""

MALFORMED = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""Exceptions caused by malformed contents."""


def new_content(metadata: DatasetMetadata) -> dict[str, Any]:
    """Return the contents of `dataset.json` for an empty dataset.

    Raises:
        SpaceError: If a space cannot be serialized.
        DatasetError: If `env` or `policy` contain values that are not plain.
    """
    for name, mapping in (("env", metadata.env), ("policy", metadata.policy)):
        try:
            copy = json.loads(json.dumps(mapping))
        except (TypeError, ValueError, RecursionError) as error:
            raise DatasetError(f"{name} = {mapping!r}: expected plain values: {error}") from error
        if copy.keys() != mapping.keys():
            raise DatasetError(f"{name} = {mapping!r}: expected strings as keys")
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "observation_space": space_to_dict(metadata.observation_space),
        "action_space": space_to_dict(metadata.action_space),
        "env": metadata.env,
        "policy": metadata.policy,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": dict(versions()),
        "parts": [],
    }


def write_content(directory: Path, content: dict[str, Any]) -> None:
    """Write `dataset.json` and flush it to disk.

    Raises:
        OSError: If writing fails.
    """
    _write(directory / DATASET, seal(content))


def _write(path: Path, data: bytes) -> None:
    with atomic_write(path) as file:
        file.write(data)
    fsync_directory(path.parent)


def read_content(directory: Path) -> dict[str, Any]:
    """Read `dataset.json`.

    Raises:
        DatasetError: If the directory is missing or not a dataset, or the file is damaged or has an
            unsupported format version.
        OSError: If there are too many open files.
    """
    if not directory.is_dir():
        raise DatasetError(
            f"{directory} is not a directory: expected a directory with a {DATASET}"
            f"{nearby(directory)}"
        )
    path = directory / DATASET
    if not path.exists():
        raise DatasetError(
            f"{directory} is not a dataset of trajectories: the file {DATASET} of a "
            f"TrajectoryWriter is missing{nearby(directory)}"
        )
    try:
        content = unseal(read_regular(path))
    except OSError as error:
        if error.errno in LIMITS:
            raise
        raise DatasetError(f"{path}: cannot be read: {error}") from error
    except ValueError as error:
        raise DatasetError(f"{path}: {error}") from error
    schema, version = content.get("schema"), content.get("version")
    if schema != SCHEMA or type(version) is not int or version < 1:
        raise DatasetError(
            f"{path}: schema {schema!r} and version {version!r}, expected {SCHEMA!r} and {VERSION}"
        )
    if version != VERSION:
        writer = content["versions"]["maze_train"]
        remedy = f"use maze_train {writer}, or record the dataset again"
        if version > VERSION:
            remedy = "install a newer maze_train"
        raise DatasetError(
            f"{path}: format version {version}, but this maze_train supports version "
            f"{VERSION}: {remedy}"
        )
    return content


def metadata_of(directory: Path, content: Mapping[str, Any]) -> DatasetMetadata:
    """Return spaces, environment and policy of a dataset.

    Raises:
        DatasetError: If the contents are not valid.
    """
    try:
        metadata = DatasetMetadata(
            space_from_dict(content["observation_space"]),
            space_from_dict(content["action_space"]),
            env=content["env"],
            policy=content["policy"],
        )
        _check_mappings(metadata.env, metadata.policy)
        if not isinstance(content["parts"], list):
            raise TypeError("parts: expected a list")
    except (MazeTrainError, *MALFORMED) as error:
        raise DatasetError(f"{directory / DATASET}: not a valid dataset: {error!r}") from error
    return metadata


def _check_mappings(env: object, policy: object) -> None:
    if not isinstance(env, dict) or not isinstance(policy, dict):
        raise TypeError("env and policy: expected mappings")


def nearby(directory: Path) -> str:
    """Return a hint about a dataset in the parent or a child directory, or an empty string."""
    try:
        below = sorted(directory.iterdir()) if directory.is_dir() else []
        found = [path for path in (directory.parent, *below) if (path / DATASET).is_file()]
    except OSError:
        return ""
    return did_you_mean(found[:3])


def part_files(directory: Path, content: Mapping[str, Any]) -> list[tuple[Path, Any]]:
    """Return the file of each part and its entry in `dataset.json`.

    File names are generated and never read from `dataset.json`.
    """
    return [(_part_path(directory, i), entry) for i, entry in enumerate(content["parts"])]


def _part_path(directory: Path, number: int) -> Path:
    return directory / f"part-{number:06d}.safetensors"


def append_part(
    directory: Path, content: Mapping[str, Any], part: TrajectoryPart
) -> dict[str, Any]:
    """Write a part, then update `dataset.json`; return the new contents of `dataset.json`.

    If the second write fails, a retry overwrites the part.

    Raises:
        OSError: If writing fails.
    """
    ends = {"lengths": part.lengths, "terminated": part.terminated, "truncated": part.truncated}
    about = {"seeds": part.seeds, "env": part.env, "policy": part.policy}
    data = save({**part.arrays, **ends}, {k: json_text(v) for k, v in about.items()})
    _write(_part_path(directory, len(content["parts"])), data)
    entry = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    content = {**content, "parts": [*content["parts"], entry]}
    write_content(directory, content)
    return content


def read_part(
    path: Path, entry: Mapping[str, Any], leaves: Leaves, *, mmap: bool, verify: bool
) -> TrajectoryPart:
    """Read a part from its file.

    Args:
        path: The file.
        entry: Entry of the part in `dataset.json`, see `part_files`.
        leaves: See `leaf_spaces`.
        mmap: Whether to memory-map a file of at least `MAPPED_NBYTES`. If True, all arrays are
            read-only, also for smaller files.
        verify: Whether to read the contents and check them against the digest and the spaces.

    Raises:
        DatasetError: If the file is missing, was modified, or does not match the spaces.
        OSError: If there are too many open files.
    """
    try:
        arrays, about = _read_arrays(path, entry, mmap=mmap, verify=verify)
        ends = {key: arrays.pop(key) for key in ("lengths", "terminated", "truncated")}
        if arrays.keys() != leaves.keys():
            raise ValueError(f"has the arrays {list(arrays)}, expected {list(leaves)}")
        part = TrajectoryPart(
            **groups_of(arrays),
            lengths=ends["lengths"].astype(np.int64),
            terminated=ends["terminated"].astype(np.bool_),
            truncated=ends["truncated"].astype(np.bool_),
            seeds=about["seeds"],
            env=about["env"],
            policy=about["policy"],
            name=str(path),
        )
        _check_mappings(part.env, part.policy)
        if any(seed is not None and seed < 0 for seed in part.seeds):
            raise ValueError("seeds: expected integers >= 0 or null")
    except OSError as error:
        if error.errno in LIMITS:
            raise
        raise DatasetError(f"{path}: cannot be read: {error}") from error
    except MALFORMED as error:
        raise DatasetError(f"{path}: not a valid part: {error!r}") from error
    check_part(part, leaves)
    if verify:
        check_content(part, leaves)
    return part


def _mapped_or_read(path: Path, entry: Mapping[str, Any], *, mmap: bool, verify: bool) -> Array:
    """Return the bytes of a file; read-only if `mmap`.

    Raises:
        DatasetError: If the file is missing, or its size or digest differs from the entry.
        OSError: If the file cannot be read.
    """
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) != entry["bytes"]:
            raise DatasetError(f"{path}: is {size} bytes long, expected {entry['bytes']}")
        if mmap and size >= MAPPED_NBYTES:
            data = np.asarray(np.memmap(file, np.uint8, "r"))
        else:
            data = np.fromfile(file, np.uint8)
            data.flags.writeable = not mmap  # Same as for mapped files.
    if verify and hashlib.sha256(data.data).hexdigest() != entry["sha256"]:
        raise DatasetError(f"{path}: damaged: the sha256 digest differs from the recorded one")
    return data


def _read_arrays(
    path: Path, entry: Mapping[str, Any], *, mmap: bool, verify: bool
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the arrays of a part by name, and its seeds, environment and policy settings.

    Arrays are views of the bytes of the file. The safetensors library would return copies.
    """
    data = _mapped_or_read(path, entry, mmap=mmap, verify=verify)
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes())
    about = {key: json.loads(text) for key, text in header.pop("__metadata__").items()}
    arrays = {}
    for name, item in header.items():
        kind, (first, stop) = item["dtype"], item["data_offsets"]
        dtype = np.dtype("?" if kind == "BOOL" else f"<{kind[0].lower()}{int(kind[1:]) // 8}")
        arrays[name] = data[start:][first:stop].view(dtype).reshape(item["shape"])
    return arrays, about


PART_SECONDS = 60.0


class TrajectoryWriter:
    """Creates a dataset or appends to an existing one.

    `add` buffers episodes in memory. A part is written when the buffer exceeds `part_nbytes` or the
    oldest episode is older than `part_seconds`. Writes are atomic, so a killed process loses only
    buffered episodes. The writer locks the dataset until `close`.

    Can be used as a context manager, which closes the writer at the end of the block, also after an
    exception.

    Args:
        directory: Directory of the dataset, created if missing. An existing dataset must have the
            same spaces, and keeps its `env` and `policy`. Each part stores the `env` and `policy`
            of its writer.
        metadata: Spaces, environment and policy.
        part_nbytes: Minimum size of a part in bytes, > 0. Writing temporarily requires about twice
            this size in memory.
        part_seconds: Maximum age of the oldest buffered episode in seconds, > 0, checked when an
            episode is added.

    Raises:
        ConfigError: If `part_nbytes` or `part_seconds` is not > 0.
        DatasetError: If another writer uses the dataset; if the dataset has different spaces or an
            unsupported version, is damaged, or cannot be created; or if the directory contains
            files that are not part of a dataset.
        SpaceError: If a space cannot be serialized.
    """

    def __init__(
        self,
        directory: str | Path,
        metadata: DatasetMetadata,
        *,
        part_nbytes: int = PART_NBYTES,
        part_seconds: float = PART_SECONDS,
    ) -> None:
        check_positive("part_nbytes", part_nbytes)
        check_positive("part_seconds", part_seconds)
        self.directory = Path(directory)
        self.metadata = metadata
        self._part_nbytes = part_nbytes
        self._part_seconds = part_seconds
        self._leaves = metadata.leaves
        self._episodes: list[Trajectory] = []
        self._nbytes = 0
        self._oldest_at = 0.0
        self.num_episodes = 0
        """Number of added episodes, including buffered episodes."""
        self.num_steps = 0
        """Number of steps of all added episodes."""
        self._closed = False
        content = new_content(metadata)
        with ExitStack() as lock:
            self._content = self._opened(content, lock)
            self._lock = lock.pop_all()

    def _opened(self, content: dict[str, Any], lock: ExitStack) -> dict[str, Any]:
        """Lock the dataset, create it or check its spaces, and return the contents."""
        path = self.directory / DATASET
        try:
            make_folders(self.directory)
            others = [item.name for item in self.directory.iterdir() if item.name[0] != "."]
            if others and not path.exists():
                raise DatasetError(
                    f"{self.directory} contains {sorted(others)[:5]} but no {DATASET}: choose a "
                    f"dataset, or a new or empty directory{nearby(self.directory)}"
                )
            lock.enter_context(exclusive(self.directory, "writes to"))
            remove_leftovers(self.directory)
            if not path.exists():
                write_content(self.directory, content)
                return content
        except RunDirectoryError as error:
            raise DatasetError(str(error)) from error
        except OSError as error:
            raise DatasetError(f"{self.directory} cannot be written: {error}") from error
        found = read_content(self.directory)
        self._compare(found, content)
        return found

    def _compare(self, found: dict[str, Any], content: dict[str, Any]) -> None:
        """Raise DatasetError if the spaces of the dataset differ from the spaces of the writer."""
        theirs, ours = metadata_of(self.directory, found), self.metadata
        for name, space, own in (
            ("observation_space", theirs.observation_space, ours.observation_space),
            ("action_space", theirs.action_space, ours.action_space),
        ):
            if space_to_dict(space) != content[name]:
                raise DatasetError(
                    f"the dataset {self.directory} has the {name} {space}, but the new episodes "
                    f"have {own}: choose another directory"
                )

    def add(self, trajectory: Trajectory) -> None:
        """Add one episode; its arrays are copied.

        Observations and actions are stored with the dtypes of the spaces, and rewards as float64.

        Raises:
            ShapeError: If keys or shapes do not match the spaces.
            SpaceError: If an array cannot be converted to the dtype of its space, or an action is
                outside the action space.
            DatasetError: If the writer is closed, or writing a part fails. After a failed write,
                the episodes remain in memory; call `flush` to retry.
        """
        if self._closed:
            raise DatasetError(f"the writer of {self.directory} is closed: open a new one")
        name = f"trajectory {self.num_episodes}"
        episode = checked_trajectory(trajectory, self._leaves, name)
        now = monotonic()
        if not self._episodes:
            self._oldest_at = now
        self._episodes.append(episode)
        self._nbytes += episode.nbytes
        self.num_episodes += 1
        self.num_steps += episode.num_steps
        is_old = now - self._oldest_at >= self._part_seconds
        if is_old or self._nbytes >= self._part_nbytes:
            self.flush()

    def flush(self) -> None:
        """Write the buffered episodes, if any, as a part.

        Raises:
            DatasetError: If writing fails. The episodes remain in memory.
        """
        if not self._episodes:
            return
        part = joined(self._episodes, self.metadata, str(self.directory))
        try:
            content = append_part(self.directory, self._content, part)
        except OSError as error:
            raise DatasetError(
                f"a part of {self.directory} could not be written: {error}; "
                f"{len(self._episodes)} episodes are still in memory"
            ) from error
        # In a single statement, a signal cannot cause lost or duplicate episodes.
        self._content, self._episodes, self._nbytes = content, [], 0

    def close(self) -> None:
        """Write the buffered episodes and release the lock. Closing again has no effect.

        Raises:
            DatasetError: If writing fails. The writer remains open.
        """
        self.flush()
        self._closed = True
        self._lock.close()

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
