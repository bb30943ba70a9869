"""Files of a data set of trajectories, and the writer of new ones.

docs/trajectories.md describes the format.
"""

from __future__ import annotations

import errno
import hashlib
import json
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
    read_regular,
    remove_leftovers,
    seal,
    unseal,
    versions,
)
from maze_train.core.folders import make_folders
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
    joined,
    trees_of,
)
from maze_train.spaces.describe import space_from_dict, space_to_dict

DATASET = "dataset.json"
SCHEMA, VERSION = "maze_train.trajectories", 2

MAPPED_NBYTES = 1 << 20
"""Size from which a file is mapped. A mapped file stays open, so small ones are read instead."""

LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Limits of the system, which are no damage. ENOMEM: also too many mapped files."""

MALFORMED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""Errors that the content of a malformed file leads to."""


# -- dataset.json --------------------------------------------------------------------------------


def new_content(metadata: DatasetMetadata) -> dict[str, Any]:
    """The content of `dataset.json` for a data set without parts.

    Raises:
        SpaceError: If a space cannot be saved.
        DatasetError: If `env` or `policy` hold other than plain values.
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
    """Write `dataset.json`, and wait until the disk has it.

    Raises:
        OSError: If the disk does not take it.
    """
    _write(directory / DATASET, seal(content))


def _write(path: Path, data: bytes) -> None:
    with atomic_write(path) as file:
        file.write(data)
    fsync_directory(path.parent)


def read_content(directory: Path) -> dict[str, Any]:
    """The content of `dataset.json`.

    Raises:
        DatasetError: If the directory is not there or no data set, or the file is damaged or of a
            another version.
        OSError: If there are too many open files.
    """
    if not directory.is_dir():
        raise DatasetError(
            f"{directory} is no directory: expected one that holds a {DATASET}{nearby(directory)}"
        )
    path = directory / DATASET
    if not path.exists():
        raise DatasetError(
            f"{directory} is no data set of trajectories: there is no {DATASET}, which a "
            f"TrajectoryWriter writes{nearby(directory)}"
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
            f"{path}: has the schema {schema!r} and the version {version!r}, expected {SCHEMA!r} "
            f"and {VERSION}"
        )
    if version != VERSION:
        writer = content["versions"]["maze_train"]
        remedy = f"use it with maze_train {writer}, or record it again"
        if version > VERSION:
            remedy = "install a newer maze_train"
        raise DatasetError(
            f"{path}: has version {version} of the format, this maze_train reads version "
            f"{VERSION}: {remedy}"
        )
    return content


def metadata_of(directory: Path, content: Mapping[str, Any]) -> DatasetMetadata:
    """Spaces, environment and policy of a data set.

    Raises:
        DatasetError: If the content is not that of a data set.
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
        raise DatasetError(
            f"{directory / DATASET}: not the content of a data set: {error!r}"
        ) from error
    return metadata


def _check_mappings(env: Any, policy: Any) -> None:
    if not isinstance(env, dict) or not isinstance(policy, dict):
        raise TypeError("env and policy: expected mappings")


def nearby(directory: Path) -> str:
    """Suggest a data set right above or below a directory that is not one; otherwise empty."""
    try:
        below = sorted(directory.iterdir()) if directory.is_dir() else []
        found = [path for path in (directory.parent, *below) if (path / DATASET).is_file()]
    except OSError:
        return ""
    return did_you_mean(found[:3])


# -- parts ---------------------------------------------------------------------------------------


def part_files(directory: Path, content: Mapping[str, Any]) -> list[tuple[Path, Any]]:
    """The files of the parts, each with its entry in `dataset.json`.

    Files are opened by names that are made here, never by those in a `dataset.json`.
    """
    return [(_part_path(directory, i), entry) for i, entry in enumerate(content["parts"])]


def _part_path(directory: Path, number: int) -> Path:
    return directory / f"part-{number:06d}.safetensors"


def append_part(
    directory: Path, content: Mapping[str, Any], part: TrajectoryPart
) -> dict[str, Any]:
    """Write a part, then a `dataset.json` that has it; returns the new content of that.

    Doing it again after a failure in between replaces the same part.

    Raises:
        OSError: If the disk does not take them.
    """
    ends = {"lengths": part.lengths, "terminated": part.terminated, "truncated": part.truncated}
    about = {"seeds": part.seeds, "env": part.env, "policy": part.policy}
    data = save({**part.arrays, **ends}, {k: json.dumps(v) for k, v in about.items()})
    _write(_part_path(directory, len(content["parts"])), data)
    entry = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    content = {**content, "parts": [*content["parts"], entry]}
    write_content(directory, content)
    return content


def read_part(
    path: Path, entry: Any, leaves: Leaves, *, mmap: bool, verify: bool
) -> TrajectoryPart:
    """The part in a file.

    Args:
        path: The file.
        entry: Its entry in `dataset.json`, see `part_files`.
        leaves: See `leaf_spaces`.
        mmap: Whether a file of `MAPPED_NBYTES` and more is mapped into memory, and read where it
            is used. All arrays are then read-only.
        verify: Whether contents are read, and compared with the digest and the spaces.

    Raises:
        DatasetError: If the file is missing, is not the one that was written, or does not fit.
        OSError: If there are too many open files.
    """
    try:
        arrays, about = _read_arrays(path, entry, mmap=mmap, verify=verify)
        ends = {key: arrays.pop(key) for key in ("lengths", "terminated", "truncated")}
        if arrays.keys() != leaves.keys():
            raise ValueError(f"has the arrays {list(arrays)}, expected {list(leaves)}")
        part = TrajectoryPart(
            **trees_of(arrays),
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
            raise ValueError("seeds: expected numbers >= 0, or null")
    except OSError as error:
        if error.errno in LIMITS:
            raise
        raise DatasetError(f"{path}: cannot be read: {error}") from error
    except MALFORMED as error:
        raise DatasetError(f"{path}: not the content of a part: {error!r}") from error
    check_part(part, leaves)
    if verify:
        check_content(part, leaves)
    return part


def _mapped_or_read(path: Path, entry: Mapping[str, Any], *, mmap: bool, verify: bool) -> Array:
    """The bytes of a file, which are read-only with `mmap`.

    Raises:
        DatasetError: If the file is missing, or has not the size and the digest of its entry.
        OSError: If it cannot be read.
    """
    if not path.is_file():  # a pipe would never end
        raise DatasetError(f"{path}: missing, or no file")
    if (size := path.stat().st_size) != entry["bytes"]:
        raise DatasetError(f"{path}: is {size} bytes long, expected {entry['bytes']}")
    if mmap and size >= MAPPED_NBYTES:
        data = np.asarray(np.memmap(path, np.uint8, "r"))
    else:
        data = np.fromfile(path, np.uint8)
        data.flags.writeable = not mmap  # as if it were mapped, whatever its size
    if verify and hashlib.sha256(data.data).hexdigest() != entry["sha256"]:
        raise DatasetError(f"{path}: damaged: its sha256 differs from the one on record")
    return data


def _read_arrays(
    path: Path, entry: Mapping[str, Any], *, mmap: bool, verify: bool
) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays of a part by name, and its seeds, environment and policy.

    Arrays are views of the bytes of the file; the library would give copies.
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
    """Creates a data set, or appends to one.

    Episodes are copied into memory, and written as a part when they have `part_nbytes`, or when an
    episode is added and the first of them is older than `part_seconds`. A part is complete or not
    there; a killed process loses the episodes that it had not written, nothing else. One writer may
    use a data set at a time, from its creation until `close`.

    As a context manager it writes the remaining episodes at the end of the block, also after an
    exception; otherwise `close` does.

    Args:
        directory: The data set. It is created where it is missing; an existing one has to have the
            same spaces. `dataset.json` keeps its `env` and `policy`; each part keeps those of its
            writer.
        metadata: Spaces, and what is known of environment and policy.
        part_nbytes: Size from which a part is written, in bytes, > 0. Writing it takes about twice
            that in memory, in addition to the episodes.
        part_seconds: Age of the first episode in memory from which a part is written, in seconds,
            > 0. It is checked when an episode is added.

    Raises:
        ConfigError: If `part_nbytes` or `part_seconds` is not > 0.
        DatasetError: If another writer uses the data set, it has other spaces, is damaged or of
            another version, cannot be created, or the directory holds something else.
        SpaceError: If a space cannot be saved.
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
        """Episodes that were added, written or not yet."""
        self.num_steps = 0
        """Steps of these episodes."""
        self._closed = False
        content = new_content(metadata)
        with ExitStack() as lock:
            self._content = self._opened(content, lock)
            self._lock = lock.pop_all()

    def _opened(self, content: dict[str, Any], lock: ExitStack) -> dict[str, Any]:
        """Lock the data set and create it, or compare it with `content`; returns what it holds."""
        path = self.directory / DATASET
        try:
            make_folders(self.directory)
            others = [item.name for item in self.directory.iterdir() if item.name[0] != "."]
            if others and not path.exists():
                raise DatasetError(
                    f"{self.directory} holds {sorted(others)[:5]} and no {DATASET}: choose a data "
                    f"set, or a directory that is new or empty{nearby(self.directory)}"
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
        """Refuse a data set of other spaces."""
        theirs, ours = metadata_of(self.directory, found), self.metadata
        for name, space, own in (
            ("observation_space", theirs.observation_space, ours.observation_space),
            ("action_space", theirs.action_space, ours.action_space),
        ):
            if found[name] != content[name]:
                raise DatasetError(
                    f"the data set {self.directory} has the {name} {space}, these episodes have "
                    f"{own}: choose another directory"
                )

    def add(self, trajectory: Trajectory) -> None:
        """Add one episode; its arrays are copied.

        Numbers are kept in the data types of the spaces, rewards as float64.

        Raises:
            ShapeError: If keys or shapes are not those of the spaces.
            SpaceError: If an array is of another kind than its leaf, an integer or the size of a
                float does not fit the data type, or an action is not one of the space.
            DatasetError: If the writer is closed, or a part cannot be written; then its episodes
                are kept, and `flush` tries again.
        """
        if self._closed:
            raise DatasetError(f"the writer of {self.directory} is closed: open another one")
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
        """Write the episodes in memory as a part; without episodes, write nothing.

        Raises:
            DatasetError: If the disk does not take them. They stay in memory.
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
        # No signal comes between these: an episode is neither lost nor written twice.
        self._content, self._episodes, self._nbytes = content, [], 0

    def close(self) -> None:
        """Write the remaining episodes, and let others write. A second call does nothing.

        Raises:
            DatasetError: If the disk does not take them; the writer is then still open.
        """
        self.flush()
        self._closed = True
        self._lock.close()

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
