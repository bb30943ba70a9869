"""The files of a checkpoint: written with their digests, verified when read, shared if unchanged.

Each part of a state (see `types.StatePart`) is a file whose name is that of its content:
`part_<32 hexadecimal digits of the sha256>.safetensors`. A part that did not change is a hard link
to the file of an earlier checkpoint, so it takes neither time nor space, and stays when the earlier
checkpoint is removed.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from maze_train.data.state_files import dumps, loads
from maze_train.errors import RunDirectoryError
from maze_train.files import open_regular, write_synced

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from maze_train.data.state_trees import TreePath
    from maze_train.types import StatePart


BLOCK_BYTES = 1 << 20


class DamagedError(Exception):
    """A checkpoint is not what was written; says which file and what is wrong."""


@dataclass(frozen=True)
class FileDigest:
    """Size and digest by which a file is checked."""

    sha256: str
    nbytes: int


def digest(data: bytes) -> FileDigest:
    """The digest of the content of a file."""
    return FileDigest(hashlib.sha256(data).hexdigest(), len(data))


# -- reading -------------------------------------------------------------------------------------


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], int]]:
    """A file to read, and its size.

    Raises:
        DamagedError: If it is not there, is no file, or can not be read within the block.
    """
    try:
        with open_regular(path) as file:
            yield file, os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise DamagedError(f"{path.name}: missing") from None
    except OSError as error:
        raise DamagedError(f"{path.name}: can not be read: {error}") from error


def read_at_most(path: Path, nbytes: int) -> bytes:
    """The content of a file of which no digest is known.

    Raises:
        DamagedError: If it is missing, can not be read, or is longer than `nbytes`.
    """
    with _opened(path) as (file, size):
        if size > nbytes:
            raise DamagedError(f"{path.name}: is {size} bytes long, too long: at most {nbytes}")
        return file.read(size)


def _blocks(path: Path, expected: FileDigest, nbytes: int) -> Iterator[bytes]:
    """The content of a file, `nbytes` at a time; the last ones are followed by the verdict.

    Raises:
        DamagedError: If it is missing, can not be read, or is not the one that was written.
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
    """The content of a file.

    Raises:
        DamagedError: If it is missing, can not be read, or is not the one that was written.
    """
    return b"".join(_blocks(path, expected, expected.nbytes))


def verify(path: Path, expected: FileDigest) -> None:
    """Read a file, of which no more than a block is in memory.

    Raises:
        DamagedError: If it is missing, can not be read, or is not the one that was written.
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
        """Follows from the content, so that a name never stands for another content."""
        return f"part_{self.digest.sha256[:32]}.safetensors"

    def read(self) -> dict[str, Any]:
        """The content, verified once more.

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
"""Files of parts, by the place in the state and the version."""


# -- writing -------------------------------------------------------------------------------------


class FilesWriter:
    """Writes the files of one checkpoint; the disk has their content then, not yet their names.

    Args:
        directory: Where they are written; it is empty.
        final: Final name of the directory.
        earlier: Parts of a checkpoint that were written, or verified: the same place and version
            means the same content.
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
            OSError: If the disk does not take it.
        """
        write_synced(self._directory / name, data)
        self.digests[name] = digest(data)

    def write_part(self, path: TreePath, part: StatePart) -> str:
        """Write a part of the state, or share it with the earlier checkpoint; returns its file.

        Raises:
            TypeError: If it holds something that can not be stored.
            OSError: If the disk does not take it.
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
        """Take over the file of an earlier checkpoint; whether it is there, whole."""
        source, target = file.directory / file.name, self._directory / file.name
        if file.name in self.digests:
            return True
        try:
            if os.lstat(source).st_size == file.digest.nbytes:
                os.link(source, target)
                return True
        except OSError:  # no links here, or too many of them
            with suppress(FileNotFoundError):  # a network may have made it all the same
                target.unlink()
        try:
            write_synced(target, read_verified(source, file.digest))
        except DamagedError:
            return False
        return True
