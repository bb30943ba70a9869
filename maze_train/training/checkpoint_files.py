"""The files and manifests of a checkpoint: written with digests, verified when read.

Each part of a state (see `core.state.StatePart`) is a file named after its content:
`part_<32 hexadecimal digits of the sha256>.pt`. A part that did not change is a hard link to the
file of an earlier checkpoint, so it takes neither time nor space, and stays when the earlier
checkpoint is removed.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, TypeAlias

from maze_train.core.errors import RunDirectoryError
from maze_train.core.files import open_regular, seal, unseal, versions, write_synced
from maze_train.core.state import StatePart
from maze_train.core.state_files import TreePath, check_content, dumps, loads
from maze_train.training.outcome import Position

BLOCK_BYTES = 1 << 20


class DamagedError(Exception):
    """A checkpoint is damaged; the message names the file and the fault."""


@dataclass(frozen=True)
class FileDigest:
    """Expected size and digest of a file."""

    sha256: str
    nbytes: int


def digest(data: bytes) -> FileDigest:
    """Compute the digest of the content of a file."""
    return FileDigest(hashlib.sha256(data).hexdigest(), len(data))


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], int]]:
    """Open a file; yield it with its size.

    Raises:
        DamagedError: If the file is missing, not a regular file, or cannot be read within the
            block.
    """
    try:
        with open_regular(path) as file:
            yield file, os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise DamagedError(f"{path.name}: missing") from None
    except OSError as error:
        raise DamagedError(f"{path.name}: cannot be read: {error}") from error


def read_at_most(path: Path, nbytes: int) -> bytes:
    """Return the content of a file without a known digest.

    Raises:
        DamagedError: If the file is missing, cannot be read, or is longer than `nbytes`.
    """
    with _opened(path) as (file, size):
        if size > nbytes:
            raise DamagedError(f"{path.name}: is {size} bytes long, too long: at most {nbytes}")
        return file.read(size)


def _blocks(path: Path, expected: FileDigest, nbytes: int) -> Iterator[bytes]:
    """Yield the file in chunks; after the last one, raise DamagedError if the digest differs.

    Raises:
        DamagedError: If the file is missing, unreadable or modified.
    """
    sha256 = hashlib.sha256()
    with _opened(path) as (file, size):
        if size != expected.nbytes:
            raise DamagedError(f"{path.name}: is {size} bytes long, expected {expected.nbytes}")
        while block := file.read(nbytes):
            sha256.update(block)
            yield block
    if sha256.hexdigest() != expected.sha256:
        raise DamagedError(f"{path.name}: sha256 differs")


def read_verified(path: Path, expected: FileDigest) -> bytes:
    """Return the verified content of a file.

    Raises:
        DamagedError: If the file is missing, unreadable or modified.
    """
    return b"".join(_blocks(path, expected, expected.nbytes))


def verify(path: Path, expected: FileDigest) -> None:
    """Verify a file with at most one block of it in memory.

    Raises:
        DamagedError: If the file is missing, unreadable or modified.
    """
    for _ in _blocks(path, expected, BLOCK_BYTES):
        pass


@dataclass(frozen=True)
class PartFile:
    """The file of a part of a state."""

    directory: Path
    """The checkpoint."""

    digest: FileDigest

    @property
    def name(self) -> str:
        """File name, derived from the digest of the content."""
        return f"part_{self.digest.sha256[:32]}.pt"

    def read(self) -> dict[str, Any]:
        """Return the content, verified again.

        Raises:
            RunDirectoryError: If the file is damaged or gone.
        """
        try:
            data = read_verified(self.directory / self.name, self.digest)
        except DamagedError as problem:
            raise RunDirectoryError(
                f"checkpoint {self.directory} is damaged: {problem}"
            ) from problem
        return loads(data, self.directory / self.name)


Parts: TypeAlias = "Mapping[tuple[TreePath, str], PartFile]"
"""Files of parts by path in the state and version."""


class FilesWriter:
    """Writes the files of one checkpoint; contents are synced to disk, but not the directory.

    Args:
        directory: Empty directory to write to.
        final: Final name of the directory.
        earlier: Written or verified parts of an earlier checkpoint; equal path and version mean
            equal contents.
    """

    def __init__(self, directory: Path, final: Path, earlier: Parts) -> None:
        self._directory = directory
        self._final = final
        self._earlier = earlier
        self.digests: dict[str, FileDigest] = {}
        self.parts: dict[tuple[TreePath, str], PartFile] = {}

    def write(self, name: str, data: bytes) -> None:
        """Write a file.

        Raises:
            OSError: If writing fails.
        """
        write_synced(self._directory / name, data)
        self.digests[name] = digest(data)

    def write_part(self, path: TreePath, part: StatePart) -> str:
        """Write a part of the state or share it with the earlier checkpoint; return its file name.

        Raises:
            TypeError: If the part contains an unsupported type.
            OSError: If writing fails.
        """
        key = (path, part.version)
        file = self._earlier.get(key)
        if file is None or not self._share(file):
            data = dumps(part.read())
            file = PartFile(self._final, digest(data))
            if file.name not in self.digests:
                write_synced(self._directory / file.name, data)
        self.digests[file.name] = file.digest
        self.parts[key] = PartFile(self._final, file.digest)
        return file.name

    def _share(self, file: PartFile) -> bool:
        """Link or copy a file of an earlier checkpoint; return whether it was undamaged."""
        source, target = file.directory / file.name, self._directory / file.name
        if file.name in self.digests:
            return True
        try:
            if os.lstat(source).st_size == file.digest.nbytes:
                os.link(source, target)
                return True
        except OSError:  # Hard links are not supported, or there are too many.
            with suppress(FileNotFoundError):  # A network file system may have created it anyway.
                target.unlink()
        try:
            write_synced(target, read_verified(source, file.digest))
        except DamagedError:
            return False
        return True


MANIFEST, STATE = "MANIFEST.json", "state.pt"
MAX_MANIFEST_BYTES = 10_000_000

SCHEMA = 3
"""Version of the file format and of the contents of a state."""

NAME = re.compile(r"epoch_([0-9]{6,18})(?:_update_([0-9]{6,18}))?(?:-([0-9]{1,9}))?")
"""Position, and a number if an abandoned branch of the run used the same name."""


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo(Position):
    """Contents of a checkpoint manifest."""

    path: Path
    versions: dict[str, str]
    """Versions of maze_train, torch, numpy, gymnasium and python that wrote the checkpoint."""

    created: str
    """Creation time, ISO 8601 in UTC."""

    nbytes: int
    """Size of all files except the manifest."""

    files: dict[str, FileDigest]
    settings: str
    """Configuration of the run as text."""

    @property
    def order(self) -> tuple[int, int, tuple[int, ...]]:
        """Sort key that orders the checkpoints of a run by time."""
        return self.epoch, self.updates, sort_key(self.path.name)


@dataclass(frozen=True, kw_only=True)
class Checkpoint(CheckpointInfo):
    """An undamaged checkpoint, with its saved state."""

    state: dict[str, Any] = field(repr=False, compare=False)

    parts: Parts = field(repr=False, compare=False)
    """Files of the parts of the state."""


def sort_key(name: str) -> tuple[int, ...]:
    """Return a sort key by epoch, update and number; empty for other names."""
    found = NAME.fullmatch(name)
    return (int(found[1]), int(found[2] or -1), int(found[3] or 1)) if found else ()


def make_manifest(files: Mapping[str, FileDigest], position: Position, settings: str = "") -> bytes:
    """Return the manifest of a new checkpoint.

    Raises:
        ValueError: If there are too many files to read back.
    """
    score = position.score
    manifest = seal(
        {
            "schema": SCHEMA,
            "versions": dict(versions()),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
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
            f"a checkpoint cannot have {len(files)} files: let the state have fewer, larger parts"
        )
    return manifest


def read_manifest(path: Path) -> CheckpointInfo:
    """Read the manifest of the checkpoint in `path`.

    Raises:
        DamagedError: If the manifest is missing or damaged, or belongs to another checkpoint.
        RunDirectoryError: If an older or a newer version wrote it.
    """
    if not path.is_dir():
        raise DamagedError("the directory is missing")
    data = read_at_most(path / MANIFEST, MAX_MANIFEST_BYTES)
    try:
        content = unseal(data)
    except ValueError as error:
        raise DamagedError(f"{MANIFEST}: {error}") from error
    try:
        _refuse_other_schemas(path, content)
        info = _info(path, content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(f"{MANIFEST}: not the content of a manifest ({error!r})") from error
    if path.name.partition("-")[0] != info.name:
        raise DamagedError(f"{MANIFEST}: it belongs to {info.name}")
    return info


def _refuse_other_schemas(path: Path, content: dict[str, Any]) -> None:
    schema = content["schema"]
    if type(schema) is not int or schema < 1:
        raise ValueError(f"schema {schema!r}")
    if schema != SCHEMA:
        version = content["versions"]["maze_train"]
        remedy = f"continue the run with maze_train {version}, or start a new one"
        if schema > SCHEMA:
            remedy = "install a newer maze_train"
        raise RunDirectoryError(
            f"checkpoint {path} was written by maze_train {version} with schema {schema}, this "
            f"version reads schema {SCHEMA}: {remedy}"
        )


def _info(path: Path, content: dict[str, Any]) -> CheckpointInfo:
    files = {}
    for name, item in content["files"].items():
        files[name] = FileDigest(item["sha256"], item["bytes"])
        if type(files[name].nbytes) is not int or not re.fullmatch(r"[\w-][\w.-]*", name):
            raise ValueError(f"file {name!r}")
    counters = {key: content[key] for key in ("epoch", "updates", "env_steps")}
    nbytes, score, within_epoch = content["bytes"], content["score"], content["within_epoch"]
    texts = {key: content[key] for key in ("created", "settings")}
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
        files=files,
    )


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the checkpoint in `path` and verify all of its files.

    Parts are verified now, and read (and verified) again on access.

    Raises:
        DamagedError: If a file is missing or damaged.
        RunDirectoryError: If an older or a newer version wrote it.
    """
    info = read_manifest(path)
    for file_name, expected in info.files.items():
        if file_name != STATE:
            verify(path / file_name, expected)
    parts = {}

    def open_part(tree_path: TreePath, version: str, file_name: str) -> StatePart:
        check_content(file_name in info.files, f"the part {file_name!r} is not in {MANIFEST}")
        file = PartFile(path, info.files[file_name])
        check_content(file.name == file_name, f"{file_name} is not a part")
        parts[tree_path, version] = file
        return StatePart(version, file.read)

    data = read_verified(path / STATE, info.files[STATE])
    try:
        state = loads(data, STATE, open_part)
    except RunDirectoryError as error:
        raise DamagedError(str(error)) from error
    return Checkpoint(**vars(info), state=state, parts=parts)
