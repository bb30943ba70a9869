"""Atomic writes, verified reads, directory locks, sealed JSON, and package versions."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from maze_train.core.checks import absolute_path
from maze_train.core.errors import ConfigError, RunDirectoryError
from maze_train.core.folders import (
    OPENS_BELOW,
    PLAIN,
    OpenFolder,
    check_enclosed,
    check_guarded,
    guarded,
    make_folders,
    opened_folder,
)
from maze_train.core.text import json_text

MAX_TEXT_NBYTES = 1 << 28
BLOCK_NBYTES = 1 << 20
MIN_SPARSE_NBYTES = 1 << 26
"""Files of this size or more are not read if most of their content is not stored on the disk."""

HAS_SIGNAL_0 = hasattr(signal, "SIGKILL")
"""Whether signal 0 checks for a process. On Windows, the number 0 is Ctrl-C."""


def open_own(path: Path, flags: int) -> int:
    """Open or create a file for writing.

    Raises:
        OSError: If the file cannot be opened, is not a regular file, or has more than one hard
            link.
    """
    wrong = OSError(errno.EINVAL, "is not a regular file: remove it", str(path))
    with opened_folder(path.parent) as folder:
        try:
            descriptor = folder.open(path.name, flags)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise
            raise wrong from error
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    raise wrong


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading. Pipes and devices raise an error: reads could block.

    Raises:
        OSError: If the file cannot be opened, is not a regular file, or is a sparse file, which
            could fill the memory although it is small on the disk.
    """
    descriptor = os.open(path, os.O_RDONLY | PLAIN)
    status = os.fstat(descriptor)
    size, problem = status.st_size, ""
    if not stat.S_ISREG(status.st_mode):
        problem = "is not a regular file"
    elif size >= MIN_SPARSE_NBYTES and _stored_nbytes(descriptor, size) < size // 2:
        problem = "is a sparse file"
    if not problem:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, problem, str(path))


def _stored_nbytes(descriptor: int, size: int) -> int:
    """Return the number of bytes of a file that are not in holes; on Windows, the size."""
    if not hasattr(os, "SEEK_HOLE"):
        return size
    nbytes = end = 0
    with suppress(OSError):  # There is no data after `end`.
        while end < size:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, start, os.SEEK_HOLE)
            nbytes += end - start
    os.lseek(descriptor, 0, os.SEEK_SET)
    return nbytes


def read_regular(path: Path, at_most: int = MAX_TEXT_NBYTES) -> bytes:
    """Read a regular file of at most `at_most` bytes.

    Raises:
        OSError: If the file cannot be read, is not a regular file, or is larger than `at_most`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > at_most:
            raise OSError(errno.EFBIG, f"is larger than {at_most} bytes", str(path))
        return file.read(size)  # `read(at_most)` would allocate `at_most` bytes


def read_json(path: Path, at_most: int = MAX_TEXT_NBYTES) -> dict[str, Any]:
    """Read a JSON object; return an empty dict if there is no file.

    Raises:
        RunDirectoryError: If the file is damaged.
    """
    try:
        found = json.loads(read_regular(path, at_most))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise RunDirectoryError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise RunDirectoryError(f"{path} is damaged: expected a mapping")
    return found


class DamagedError(Exception):
    """A file is damaged. The message contains the file name and the problem."""


@dataclass(frozen=True)
class FileDigest:
    """Expected size and digest of a file."""

    sha256: str
    nbytes: int

    @classmethod
    def of(cls, data: bytes) -> FileDigest:
        """Compute the digest of the content of a file."""
        return cls(hashlib.sha256(data).hexdigest(), len(data))


@contextmanager
def undamaged(path: Path) -> Iterator[None]:
    """Raise any OSError in the block as a DamagedError."""
    try:
        yield
    except FileNotFoundError:
        raise DamagedError(f"{path.name}: missing") from None
    except OSError as error:
        raise DamagedError(f"{path.name}: cannot be read: {error}") from error


def verified_blocks(path: Path, expected: FileDigest) -> Iterator[bytes]:
    """Yield a file in chunks. After the last chunk, raise DamagedError if the digest differs.

    Raises:
        DamagedError: If the file is missing, unreadable or modified.
    """
    sha256 = hashlib.sha256()
    with undamaged(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected.nbytes:
            raise DamagedError(f"{path.name}: is {size} bytes long, expected {expected.nbytes}")
        while block := file.read(BLOCK_NBYTES):
            sha256.update(block)
            yield block
    if sha256.hexdigest() != expected.sha256:
        raise DamagedError(f"{path.name}: sha256 differs")


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` if the block ends without an exception.

    Missing parent folders are created, except guarded folders (see `guarded`).

    Raises:
        OSError: If the file cannot be written. The file `path` is then unchanged.
    """
    with opened_folder(path.parent, make=True) as folder:
        temporary = f".{path.name}.{os.getpid()}.tmp"
        try:
            with _synced_file(folder, temporary) as file:
                yield file
            check_guarded(path)
            folder.replace(temporary, path.name)
        except BaseException:
            folder.remove(temporary)
            raise


@contextmanager
def writable(key: str, directory: Path) -> Iterator[None]:
    """Raise any OSError in the block as a ConfigError for a directory setting.

    Raises:
        ConfigError: If writing fails in the block.
    """
    try:
        yield
    except OSError as error:
        problem = f"cannot be written: {error}; choose another path: {key}=<path>"
        raise ConfigError(key, problem, str(directory)) from error


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and sync its content to disk; the directory entry is not synced.

    Raises:
        OSError: If the file cannot be written. An incomplete file may remain.
    """
    with opened_folder(path.parent) as folder, _synced_file(folder, path.name) as file:
        file.write(data)


@contextmanager
def _synced_file(folder: OpenFolder, name: str) -> Iterator[IO[bytes]]:
    """Create a file, replacing an existing file or link, and sync it after the block."""
    folder.remove(name)

    def opener(*_: object) -> int:
        return folder.open(name, os.O_WRONLY | os.O_EXCL)

    with open(str(folder.path / name), "wb", opener=opener) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def fsync_directory(path: Path) -> None:
    """Sync a directory to disk, after files were created, renamed or removed.

    Does nothing on file systems and platforms without support for syncing directories.

    Raises:
        OSError: If the directory does not exist, or the disk fails.
    """
    if not OPENS_BELOW:
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def process_runs(pid: int) -> bool:
    """Return whether a process with the id `pid` exists on this machine; on Windows, True."""
    if not HAS_SIGNAL_0:
        return True
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def remove_leftovers(directory: Path) -> None:
    """Remove unfinished files that `atomic_write` left in dead processes."""
    for path in directory.glob(".*.tmp"):
        pid = path.suffixes[-2:-1]
        if pid and pid[0][1:].isdigit() and not process_runs(int(pid[0][1:])):
            path.unlink(missing_ok=True)


LOCK = ".lock"

TEMPORARY, CLAIM = "pymp-*", "maze_train.lock"
"""Pattern of multiprocessing's temporary directories, and name of the lock file in these
directories."""

LOCK_GRACE_S = 3.0
"""Maximum time in seconds to wait until the workers of a dead process release its lock."""


def new_directory(parent: Path) -> Path:
    """Create a directory named after the current time, unique among concurrent callers.

    If a directory with this name exists, a number is appended.
    """
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    number = 1
    make_folders(parent)
    while True:
        path = parent / (stamp if number == 1 else f"{stamp}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def link_latest(link: Path, directory: Path) -> None:
    """Create a link to a directory; does nothing if links are not supported.

    The target must be a sibling of the link, or below a sibling. An existing link is replaced
    atomically; other files are not changed.
    """
    temporary = link.with_name(f".{link.name}.{os.getpid()}.tmp")
    if link.exists() and not link.is_symlink():
        return
    with suppress(OSError, NotImplementedError):
        temporary.symlink_to(os.path.relpath(directory, link.parent), target_is_directory=True)
        temporary.replace(link)


@contextmanager
def results_directory(key: str, name: str | None, default_parent: Path) -> Iterator[Path]:
    """Create a directory for results.

    At the end, directories that were created and are still empty are removed.

    Args:
        key: Setting of the directory, for messages.
        name: Path; None: `<default_parent>/<date>_<time>`.
        default_parent: Parent directory if `name` is None.

    Raises:
        ConfigError: If the directory cannot be created.
    """
    place = Path(name or default_parent)
    with writable(key, place):
        whole = place.absolute()  # An environment may change the working directory.
        created = [path for path in (whole, *whole.parents) if not path.exists()]
        if name is None:
            absolute_path(key, str(default_parent))
            place = new_directory(default_parent)
            created.insert(0, place)
        else:
            make_folders(place)
    try:
        yield place
    finally:
        with suppress(OSError):
            for path in created:
                path.rmdir()


def remove_content(directory: Path) -> None:
    """Remove the files and folders in a directory, except open files on Windows."""
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


@contextmanager
def exclusive(directory: Path, use: str = "trains in") -> Iterator[None]:
    """Lock `directory` against other processes for the duration of the block.

    A run writes only below its directory, so links to targets outside the directory raise an error.
    If the directory is moved or removed, or the lock file is replaced, later writes raise an error
    (see `guarded`).

    The lock is an `flock` on the file `.lock` in the directory. The OS releases the lock when the
    process ends; the file remains. On file systems and platforms (Windows) without support for
    locks, the directory is not locked.

    Args:
        directory: An existing directory, usually of a run.
        use: Verb for the error message in other processes.

    Raises:
        RunDirectoryError: If the directory is locked by another process, is not writable, or
            contains a link to a target outside the directory.
    """
    check_enclosed(directory)
    missing = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
    path = directory / LOCK
    try:
        # Python opens files with close-on-exec, so child programs do not inherit the lock.
        descriptor = open_own(path, os.O_RDWR)
    except OSError as error:
        raise RunDirectoryError(f"{directory} cannot be locked: {error}") from error
    release: Callable[[], object]
    try:
        try:
            release = _take_lock(descriptor)
        except BlockingIOError:
            raise RunDirectoryError(
                f"another process ({_owner(descriptor)}) {use} {directory}: wait until it ends, "
                f"or choose another directory"
            ) from None
        except OSError as error:
            if error.errno not in missing:
                raise RunDirectoryError(f"{path} cannot be locked: {error}") from error
            release = bool
        with suppress(OSError):  # The content is for information only.
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, f"pid {os.getpid()} on host {socket.gethostname()}\n".encode())
        try:
            with guarded(directory, path):
                yield
        finally:
            # A process forked during the block shares the descriptor and the lock.
            with suppress(OSError):
                release()
    finally:
        os.close(descriptor)


@contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """Allow only one process on this machine at a time to run a block for a directory.

    Does nothing if the directory cannot be locked.
    """
    descriptor = None
    with suppress(OSError, ImportError):
        import fcntl  # Not available on Windows.

        descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _take_lock(descriptor: int) -> Callable[[], object]:
    """Acquire the lock. If the owner of the lock is dead, wait until its workers have exited.

    Returns:
        Function that releases the lock.

    Raises:
        BlockingIOError: If another process has the lock.
        OSError: If locks are not supported.
    """
    try:
        import fcntl
    except ImportError as error:  # Windows.
        raise OSError(errno.ENOTSUP, "no support for locks") from error
    deadline = time.monotonic() + LOCK_GRACE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return partial(fcntl.flock, descriptor, fcntl.LOCK_UN)
        except BlockingIOError:
            found = re.match(r"pid (\d+) on host (.*)", _owner(descriptor))
            is_dead = (
                found is not None
                and found[2] == socket.gethostname()
                and not process_runs(int(found[1]))
            )
            if not is_dead or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _owner(descriptor: int) -> str:
    """Return the owner of the lock according to the lock file."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    text = os.read(descriptor, 400).decode(errors="replace").strip()
    return text if re.fullmatch(r"pid \d+ on host \S+", text) else "pid unknown"


def claim_temporary() -> None:
    """Lock multiprocessing's temporary directory, and remove directories of dead processes.

    This directory contains the socket of the fork server. The directory is removed at a normal
    exit, but not if the process is killed. The lock file is locked until the process ends.
    """
    import fcntl
    import multiprocessing
    from multiprocessing.util import get_temp_dir

    if multiprocessing.parent_process() is not None:
        return  # The directory may belong to the parent process.
    directory = Path(get_temp_dir())
    if (directory / CLAIM).exists():
        return
    with suppress(OSError):  # A leftover directory is harmless.
        for path in directory.parent.glob(f"{TEMPORARY}/{CLAIM}"):
            with suppress(OSError), open_regular(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
        descriptor = open_own(directory / f".{CLAIM}", os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.rename(directory / f".{CLAIM}", directory / CLAIM)


DIGEST = "sha256"
"""Key of the digest, which is computed from the JSON text of all other keys."""


def seal(content: dict[str, Any], *, indent: int | None = 2) -> bytes:
    """Serialise a JSON object with a digest of its content; the result is canonical.

    Args:
        content: JSON values; an existing digest is replaced.
        indent: Spaces per level; None: one line.

    Raises:
        TypeError: If a value is not valid JSON.
    """
    return _sealed(content, indent, json_text)


def unseal(data: bytes) -> dict[str, Any]:
    """Parse a sealed object; the result includes the digest.

    Raises:
        ValueError: If the bytes are not the output of `seal`.
    """
    try:
        content = json.loads(data)
        if isinstance(content, dict):
            indent = 2 if data.startswith(b"{\n") else None
            # `seal` is deterministic, so the bytes must be equal. Version 0.2.0 wrote `Infinity`.
            if data in (_sealed(content, indent, text) for text in (json_text, json.dumps)):
                return content
    except (ValueError, RecursionError) as error:
        raise ValueError(f"damaged, or not JSON: {error}") from error
    raise ValueError(f"{DIGEST} mismatch: the file was modified or is damaged")


def _sealed(content: dict[str, Any], indent: int | None, dumps: Callable[..., str]) -> bytes:
    content = {key: value for key, value in content.items() if key != DIGEST}
    bare = (dumps(content, indent=indent, sort_keys=True) + "\n").encode()
    content[DIGEST] = hashlib.sha256(bare).hexdigest()
    return (dumps(content, indent=indent, sort_keys=True) + "\n").encode()


PACKAGES = ("maze_train", "torch", "numpy", "gymnasium")
"""Packages whose versions are recorded and compared."""


@cache
def versions() -> Mapping[str, str]:
    """Return versions of `python`, `maze_train`, `torch`, `numpy` and `gymnasium`.

    The packages are not imported. The version is `unknown` for packages that are not installed.
    """
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return MappingProxyType(found)
