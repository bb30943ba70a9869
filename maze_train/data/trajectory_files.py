"""Files of a data set of trajectories: arrays with their digests, and their manifests.

Both JSON files are sealed: the digest in them is that of their text without it, so a change is
noticed. docs/trajectories.md describes the format.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.data.trajectory_episodes import ends_of
from maze_train.data.trajectory_parts import DatasetMetadata, check_content, make_part
from maze_train.errors import DatasetError, MazeTrainError
from maze_train.files import fsync_directory, write_synced
from maze_train.spaces.serialize import space_from_dict, space_to_dict
from maze_train.versions import versions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from maze_train.data.trajectory_episodes import Column, Episode
    from maze_train.data.trajectory_parts import TrajectoryPart
    from maze_train.types import Array

__all__ = [
    "DATASET",
    "LIMITS",
    "MANIFEST",
    "SCHEMA",
    "VERSION",
    "differences",
    "metadata_text",
    "nearby",
    "part_paths",
    "read_metadata",
    "read_part",
    "sealed",
    "write_part",
]

DATASET, MANIFEST = "dataset.json", "MANIFEST.json"
SCHEMA, VERSION = "maze_train.trajectories", 1
BLOCK_NBYTES = 1 << 20
MAX_TEXT_NBYTES = 1 << 28
PART = re.compile(r"part-([0-9]{6,18})")

MAPPED_NBYTES = 1 << 20
"""Size from which a file is mapped. A mapped file stays open, so small ones are read instead."""

LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Limits of the system, which are no damage. ENOMEM: also too many mapped files."""


# -- texts ---------------------------------------------------------------------------------------


def sealed(content: dict[str, Any]) -> bytes:
    """The only text of a JSON file with this content; `sha256` is made anew.

    Raises:
        TypeError: If the content has other values than JSON.
    """
    content = {key: value for key, value in content.items() if key != "sha256"}
    content["sha256"] = hashlib.sha256(_text(content)).hexdigest()
    return _text(content)


def _text(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, sort_keys=True) + "\n").encode()


def _read_sealed(path: Path) -> dict[str, Any]:
    """The content of a sealed file.

    Raises:
        DatasetError: If it can not be read, is not of this schema and version, or was changed.
        OSError: If there are too many open files.
    """
    try:
        if not path.is_file():  # a pipe would never end
            raise DatasetError(f"{path}: missing, or no file")
        if path.stat().st_size > MAX_TEXT_NBYTES:
            raise DatasetError(f"{path}: longer than {MAX_TEXT_NBYTES} bytes")
        data = path.read_bytes()
        content = json.loads(data)
    except OSError as error:
        if error.errno in LIMITS:
            raise
        raise DatasetError(f"{path}: can not be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path}: damaged, or no JSON: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise DatasetError(f"{path}: has the schema {found!r}, expected {SCHEMA!r}")
    number = content.get("version")
    if type(number) is not int or number < 1:
        raise DatasetError(f"{path}: has the version {number!r}, expected 1 to {VERSION}")
    if number > VERSION:
        raise DatasetError(
            f"{path}: has version {number} of the format, this maze_train reads up to {VERSION}: "
            f"install a newer maze_train"
        )
    if sealed(content) != data:
        raise DatasetError(f"{path}: its sha256 differs: it was changed, or is damaged")
    return content


def metadata_text(metadata: DatasetMetadata) -> bytes:
    """The content of `dataset.json`.

    Raises:
        SpaceError: If a space can not be saved.
        DatasetError: If `env` or `policy` hold other than plain values.
    """
    for name, mapping in (("env", metadata.env), ("policy", metadata.policy)):
        try:
            copy = json.loads(_text(mapping))
        except (TypeError, ValueError, RecursionError) as error:
            raise DatasetError(f"{name} = {mapping!r}: expected plain values: {error}") from error
        if copy.keys() != mapping.keys():
            raise DatasetError(f"{name} = {mapping!r}: expected strings as keys")
    return sealed(
        {
            "schema": SCHEMA,
            "version": VERSION,
            "observation_space": space_to_dict(metadata.observation_space),
            "action_space": space_to_dict(metadata.action_space),
            "env": metadata.env,
            "policy": metadata.policy,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": dict(versions()),
        }
    )


def read_metadata(directory: Path) -> DatasetMetadata:
    """Read `dataset.json`.

    Raises:
        DatasetError: If the directory is not there or no data set, or the file is damaged or of a
            newer version.
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
    content = _read_sealed(path)
    try:
        metadata = DatasetMetadata(
            space_from_dict(content["observation_space"]),
            space_from_dict(content["action_space"]),
            env=content["env"],
            policy=content["policy"],
        )
    except (MazeTrainError, KeyError, TypeError, ValueError) as error:
        raise DatasetError(f"{path}: not the content of a data set: {error!r}") from error
    if not isinstance(metadata.env, dict) or not isinstance(metadata.policy, dict):
        raise DatasetError(f"{path}: env and policy: expected mappings")
    return metadata


def nearby(directory: Path) -> str:
    """Suggest a data set right above or below a directory that is none; empty: there is none."""
    try:
        below = sorted(directory.iterdir()) if directory.is_dir() else []
        found = [path for path in (directory.parent, *below) if (path / DATASET).is_file()]
    except OSError:
        return ""
    return f"; did you mean {' or '.join(map(str, found[:3]))}?" if found else ""


def differences(first: DatasetMetadata, other: DatasetMetadata) -> list[str]:
    """Describe the differences in `env` and `policy`, key by key."""
    found = []
    for name in ("env", "policy"):
        texts = [
            {key: _text({key: value}) for key, value in getattr(metadata, name).items()}
            for metadata in (first, other)
        ]
        keys = [key for key in {**texts[0], **texts[1]} if texts[0].get(key) != texts[1].get(key)]
        if keys:
            pair = [
                {key: getattr(x, name)[key] for key in keys if key in getattr(x, name)}
                for x in (first, other)
            ]
            found.append(f"{name} {pair[0]}, now {pair[1]}")
    return found


def part_paths(directory: Path) -> dict[int, Path]:
    """List the paths that are named like a part, by number, in ascending order.

    Raises:
        OSError: If the directory can not be read.
    """
    found = {}
    for path in directory.iterdir():
        if match := PART.fullmatch(path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


# -- writing -------------------------------------------------------------------------------------


def write_part(
    directory: Path,
    columns: Sequence[Column],
    episodes: Sequence[Episode],
    metadata: DatasetMetadata,
) -> None:
    """Write episodes into an empty directory, and wait until the disk has them.

    Args:
        directory: The directory of the part.
        columns: The arrays of the data set.
        episodes: Their content, one after the other.
        metadata: Environment and policy of these episodes.

    Raises:
        OSError: If the disk does not take them.
    """
    ends = ends_of(episodes)
    entries = []
    for i, column in enumerate(columns):
        shape = (column.num_rows(ends["lengths"]), *column.shape)
        pieces = [episode.arrays[i] for episode in episodes]
        entry = _write_array(directory / column.file, pieces, column.dtype, shape)
        entries.append({**_entry(column, shape), **entry})
    about = {"env": metadata.env, "policy": metadata.policy}
    content = {"schema": SCHEMA, "version": VERSION, "arrays": entries, **ends, **about}
    write_synced(directory / MANIFEST, sealed(content))
    fsync_directory(directory)


def _entry(column: Column, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the manifest entry of an array, without what depends on its content."""
    return {
        "file": column.file,
        "column": column.group,
        "key": column.key,
        "dtype": column.dtype.str,
        "shape": list(shape),
    }


def _write_array(
    path: Path, pieces: Sequence[Array], dtype: np.dtype[Any], shape: tuple[int, ...]
) -> dict[str, Any]:
    """Write arrays one after the other into one .npy file, without a copy of them all."""
    header = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    description = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, description)
    sha256, nbytes = hashlib.sha256(), 0
    with path.open("xb") as file:
        for data in (header.getvalue(), *(piece.tobytes() for piece in pieces)):
            sha256.update(data)
            nbytes += file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"sha256": sha256.hexdigest(), "bytes": nbytes}


# -- reading -------------------------------------------------------------------------------------


def read_part(
    directory: Path, columns: Sequence[Column], *, mmap: bool, verify: bool
) -> TrajectoryPart:
    """The part in a directory.

    Args:
        directory: The directory of the part.
        columns: The arrays of the data set.
        mmap: Whether files of `MAPPED_NBYTES` and more are mapped into memory, and read where they
            are used. All arrays are then read-only.
        verify: Whether contents are read, and compared with their digests and spaces.

    Raises:
        DatasetError: If a file is missing, is not the one that was written, or does not fit.
        OSError: If there are too many open files.
    """
    manifest = directory / MANIFEST
    content = _read_sealed(manifest)
    ends = _checked_ends(manifest, content)
    env, policy = content.get("env", {}), content.get("policy", {})  # earlier versions: not there
    if not isinstance(env, dict) or not isinstance(policy, dict):
        raise DatasetError(f"{manifest}: env and policy: expected mappings")
    entries = content.get("arrays")
    shapes = [(column.num_rows(ends["lengths"]), *column.shape) for column in columns]
    expected = [_entry(column, shape) for column, shape in zip(columns, shapes, strict=True)]
    keys = ("file", "column", "key", "dtype", "shape")
    try:
        found = [{key: entry[key] for key in keys} for entry in entries or ()]
        digests = [(entry["sha256"], entry["bytes"]) for entry in entries or ()]
    except (TypeError, KeyError) as error:
        raise DatasetError(f"{manifest}: not the content of a manifest: {error!r}") from error
    # Files are opened by the names that the spaces give, never by those that a manifest says.
    if found != expected:
        wrong = next((x for x in found if x not in expected), None)
        raise DatasetError(
            f"{manifest}: its arrays are not those of the spaces in {DATASET}: has "
            f"{wrong or len(found)}, expected {expected if wrong else len(expected)}"
        )
    arrays = []
    for column, shape, (sha256, nbytes) in zip(columns, shapes, digests, strict=True):
        path = directory / column.file
        try:
            _check_file(path, nbytes, sha256 if verify else None)
            arrays.append(_load(path, column.dtype, shape, mmap))
        except OSError as error:
            if error.errno in LIMITS:
                raise
            raise DatasetError(f"{path}: can not be read: {error}") from error
    part = make_part(columns, arrays, ends, str(directory), env=env, policy=policy)
    if verify:
        check_content(part, columns)
    return part


def _checked_ends(manifest: Path, content: dict[str, Any]) -> dict[str, list[Any]]:
    """The lists of a manifest that have an entry per episode."""
    kinds = {"lengths": (int,), "seeds": (int, type(None)), "terminated": (bool,)}
    kinds["truncated"] = (bool,)
    for key, types in kinds.items():
        values = content.get(key)
        if not isinstance(values, list) or any(type(value) not in types for value in values):
            names = " or ".join(kind.__name__ for kind in types)
            raise DatasetError(f"{manifest}: {key}: expected a list of {names}")
    if any(not 1 <= length < 1 << 48 for length in content["lengths"]):
        raise DatasetError(f"{manifest}: lengths: expected numbers of steps >= 1")
    if any(seed is not None and seed < 0 for seed in content["seeds"]):
        raise DatasetError(f"{manifest}: seeds: expected numbers >= 0, or null")
    return {key: content[key] for key in kinds}


def _check_file(path: Path, nbytes: Any, sha256: Any | None) -> None:
    """Compare the size, and the digest unless it is None, with those of the manifest."""
    if not path.is_file():
        raise DatasetError(f"{path}: missing, or no file")
    if (size := path.stat().st_size) != nbytes:
        raise DatasetError(f"{path}: is {size} bytes long, expected {nbytes}")
    if sha256 is None:
        return
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_NBYTES):
            found.update(block)
    if found.hexdigest() != sha256:
        raise DatasetError(f"{path}: damaged: its sha256 differs from that of {MANIFEST}")


def _load(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], mmap: bool) -> Array:
    """The array of a .npy file, which is read-only with `mmap`."""
    try:
        # Not numpy.load, which takes other formats as well. Objects are refused: no pickle is read.
        mapped = np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # whatever a header of a stranger leads to
        raise DatasetError(f"{path}: no array of numbers in .npy format: {error}") from error
    if mapped.dtype != dtype or mapped.shape != shape:
        raise DatasetError(
            f"{path}: holds {mapped.dtype}{list(mapped.shape)}, expected {dtype}{list(shape)}"
        )
    if mmap and mapped.nbytes >= MAPPED_NBYTES:
        return np.asarray(mapped)
    array = np.array(mapped, order="C")
    array.flags.writeable = not mmap  # as a mapped one, whatever its size
    return array
