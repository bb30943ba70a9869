"""Manifests of checkpoints, and the check that a checkpoint is the one that was written."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from datetime import datetime, timezone
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from maze_train.data.state_files import loads
from maze_train.data.state_trees import TreePath, check_content
from maze_train.errors import RunDirectoryError
from maze_train.sealed import seal, unseal
from maze_train.training.checkpoint_files import (
    DamagedError,
    FileDigest,
    PartFile,
    Parts,
    digest,
    read_at_most,
    read_verified,
    verify,
)
from maze_train.training.outcome import Position
from maze_train.types import StatePart
from maze_train.versions import versions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


MANIFEST, STATE = "MANIFEST.json", "state.safetensors"
MAX_MANIFEST_BYTES = 10_000_000

SCHEMA = 1
"""Version of the content of a state; it grows when what trainers save means something else."""

MIGRATIONS: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = MappingProxyType({})
"""Functions by schema, each of which turns a state of it into one of the next schema."""

NAME = re.compile(r"epoch_([0-9]{6,18})(?:_update_([0-9]{6,18}))?")


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo(Position):
    """Content of the manifest of a checkpoint."""

    path: Path
    versions: dict[str, str]
    """Versions of maze_train, torch, numpy, gymnasium and python that wrote it."""

    created: str
    """Time, as ISO 8601 in UTC."""

    nbytes: int
    """Size of all files but the manifest."""

    schema: int
    sha256: str
    """Digest of the manifest."""

    files: dict[str, FileDigest]
    settings: str
    """Configuration of the run as text; empty if an older version wrote the checkpoint."""

    @property
    def order(self) -> tuple[int, int, str]:
        """Sorts checkpoints of one run by time."""
        return self.epoch, self.updates, self.path.name


@dataclass(frozen=True, kw_only=True)
class Checkpoint(CheckpointInfo):
    """An undamaged checkpoint, with its saved state."""

    state: dict[str, Any] = field(repr=False, compare=False)

    parts: Parts = field(repr=False, compare=False)
    """Files of the parts of the state."""


def sort_key(name: str) -> tuple[int, ...]:
    """Sorts names of checkpoints by time; empty for what is no such name."""
    found = NAME.fullmatch(name)
    return (int(found[1]), int(found[2] or -1)) if found else ()


def make_manifest(files: Mapping[str, FileDigest], position: Position, settings: str = "") -> bytes:
    """The manifest of a checkpoint that is made now.

    Raises:
        ValueError: If there are more files than can be read again.
    """
    score = position.score
    manifest = seal(
        {
            "schema": SCHEMA,
            "versions": dict(versions()),
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "epoch": int(position.epoch),
            "updates": int(position.updates),
            "env_steps": int(position.env_steps),
            "within_epoch": bool(position.within_epoch),
            "score": float(score) if score is not None and math.isfinite(score) else None,
            "files": {
                name: {"sha256": item.sha256, "bytes": item.nbytes} for name, item in files.items()
            },
            "bytes": sum(item.nbytes for item in files.values()),
            "settings": settings,
        }
    )
    if len(manifest) > MAX_MANIFEST_BYTES:
        raise ValueError(
            f"a checkpoint can not have {len(files)} files: let the state have fewer, larger parts"
        )
    return manifest


def read_manifest(path: Path, name: str) -> CheckpointInfo:
    """The manifest of the checkpoint in `path`, whose name is, or was, `name`.

    Raises:
        DamagedError: If it is missing or damaged, or belongs to a checkpoint of another name.
        RunDirectoryError: If a newer version wrote it.
    """
    if not path.is_dir():
        raise DamagedError("the directory is missing")
    data = read_at_most(path / MANIFEST, MAX_MANIFEST_BYTES)
    try:
        content = unseal(data)
    except ValueError as error:
        raise DamagedError(f"{MANIFEST}: {error}") from error
    try:
        _refuse_newer(path, content)
        info = _info(path, content, digest(data).sha256)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(f"{MANIFEST}: not the content of a manifest ({error!r})") from error
    if name != info.name:
        raise DamagedError(f"{MANIFEST}: it is that of {info.name}")
    return info


def _refuse_newer(path: Path, content: dict[str, Any]) -> None:
    schema = content["schema"]
    if type(schema) is not int or schema < 1:
        raise ValueError(f"schema {schema!r}")
    if schema > SCHEMA:
        raise RunDirectoryError(
            f"checkpoint {path} was written by maze_train {content['versions']['maze_train']} with "
            f"schema {schema}, this version reads up to {SCHEMA}: install a newer maze_train"
        )


def _info(path: Path, content: dict[str, Any], sha256: str) -> CheckpointInfo:
    files = {}
    for name, item in content["files"].items():
        files[name] = FileDigest(item["sha256"], item["bytes"])
        if type(files[name].nbytes) is not int or not re.fullmatch(r"[\w-][\w.-]*", name):
            raise ValueError(f"file {name!r}")
    counters = {key: content[key] for key in ("epoch", "updates", "env_steps")}
    nbytes, score, within_epoch = content["bytes"], content["score"], content["within_epoch"]
    texts = {"created": content["created"], "settings": content.get("settings", "")}
    written_by = content["versions"]
    if (
        STATE not in files
        or any(type(value) is not int or value < 0 for value in (*counters.values(), nbytes))
        or type(within_epoch) is not bool
        or type(score) not in (type(None), float)
        or (score is not None and not math.isfinite(score))
        or any(type(value) is not str for value in (*written_by.values(), *texts.values()))
    ):
        raise ValueError("a value is of the wrong type")
    return CheckpointInfo(
        **counters,
        **texts,
        score=score,
        within_epoch=within_epoch,
        path=path,
        versions=written_by,
        nbytes=nbytes,
        schema=content["schema"],
        sha256=sha256,
        files=files,
    )


def read_checkpoint(path: Path, name: str) -> Checkpoint:
    """The checkpoint in `path`, every file of it verified; an older schema is brought up to date.

    Parts of the state are verified, and read again when they are asked for their content.

    Raises:
        DamagedError: If a file is missing or damaged.
        RunDirectoryError: If a newer version wrote it, or no migration leads to this schema.
    """
    info = read_manifest(path, name)
    for file_name, expected in info.files.items():
        if file_name != STATE:
            verify(path / file_name, expected)
    parts = {}

    def open_part(tree_path: TreePath, version: str, file_name: str) -> StatePart:
        check_content(file_name in info.files, f"the part {file_name!r} is not in {MANIFEST}")
        file = PartFile(path, info.files[file_name])
        check_content(file.name == file_name, f"{file_name} is no part")
        parts[tree_path, version] = file
        return StatePart(version, file.read)

    data = read_verified(path / STATE, info.files[STATE])
    try:
        state = loads(data, STATE, open_part)
    except RunDirectoryError as error:
        raise DamagedError(str(error)) from error
    for schema in range(info.schema, SCHEMA):
        if schema not in MIGRATIONS:
            raise RunDirectoryError(
                f"checkpoint {path} was written by maze_train {info.versions.get('maze_train')} "
                f"with schema {schema}, which this version no longer reads: use that version"
            )
        state = MIGRATIONS[schema](state)
        parts.clear()  # the same place and version may have another content now
    return Checkpoint(**vars(info), state=state, parts=parts)
