"""Files and directories that are complete or absent, locks of directories, versions, notices."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
import shutil
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from maze_train.core.errors import RunDirectoryError
from maze_train.core.folders import (
    OpenFolder,
    check_enclosed,
    check_held,
    held,
    make_folders,
    opened_folder,
)

MAX_TEXT_NBYTES = 1 << 28


def open_own(path: Path, flags: int) -> int:
    """Open a file to write, or make it; nothing else is opened in its place.

    Raises:
        OSError: If it cannot be opened, is no regular file, or has another name elsewhere.
    """
    wrong = OSError(errno.EINVAL, "is no regular file: remove it", str(path))
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
    """Open a file to read. A pipe or a device is refused at once: it would never end.

    Raises:
        OSError: If it cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is no regular file", str(path))


def read_regular(path: Path, at_most: int = MAX_TEXT_NBYTES) -> bytes:
    """The content of a regular file of `at_most` bytes.

    Raises:
        OSError: If it cannot be read, is no regular file, or is longer.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > at_most:
            raise OSError(errno.EFBIG, f"is longer than {at_most} bytes", str(path))
        return file.read(at_most)


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of `path` when the block ends without an exception.

    Folders that are missing are created, but none that is `held`.

    Raises:
        OSError: If the file cannot be written; `path` is then as it was.
    """
    with opened_folder(path.parent, make=True) as folder:
        temporary = f".{path.name}.{os.getpid()}.tmp"
        try:
            with _synced_file(folder, temporary) as file:
                yield file
            check_held(path)
            folder.replace(temporary, path.name)
        except BaseException:
            folder.remove(temporary)
            raise


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until the disk has its content; its name is not synced.

    Raises:
        OSError: If the file cannot be written; a part of it may be there.
    """
    with opened_folder(path.parent) as folder, _synced_file(folder, path.name) as file:
        file.write(data)


@contextmanager
def _synced_file(folder: OpenFolder, name: str) -> Iterator[IO[bytes]]:
    """A file that replaces an existing one, on disk after the block: a link is not followed."""
    folder.remove(name)

    def opener(*_: object) -> int:
        return folder.open(name, os.O_WRONLY | os.O_EXCL)

    with open(str(folder.path / name), "wb", opener=opener) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def fsync_directory(path: Path) -> None:
    """Wait until the disk has the names of a directory: files created, renamed and removed in it.

    File systems that cannot do this are left alone.

    Raises:
        OSError: If the directory is not there, or the disk fails.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def process_runs(pid: int) -> bool:
    """Whether a process of this number runs on this machine."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def remove_leftovers(directory: Path) -> None:
    """Remove files that `atomic_write` had not finished in a process that is dead."""
    for path in directory.glob(".*.tmp"):
        pid = path.suffixes[-2:-1]
        if pid and pid[0][1:].isdigit() and not process_runs(int(pid[0][1:])):
            path.unlink(missing_ok=True)


LOCK = ".lock"

TEMPORARY, CLAIM = "pymp-*", "maze_train.lock"
"""Folders that multiprocessing makes for its sockets, and the file that marks ours."""

LOCK_GRACE_S = 3.0
"""Seconds for which the workers of a dead process may keep its lock."""


def new_directory(parent: Path) -> Path:
    """Make a directory named after the time; no other caller gets the same one.

    Its name ends with a number if there is one of that second already.
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


@contextmanager
def exclusive(directory: Path, use: str = "trains in") -> Iterator[None]:
    """Keep other processes from using `directory` while the block runs.

    A run writes into its own directory only: links that lead elsewhere are refused. One that was
    moved or removed meanwhile, or lost its lock, is not written any more (see `files.held`).

    The lock is that of the file `.lock` in the directory (`flock`). It ends with the process,
    however that ends; the file stays. A file system without locks locks nothing.

    Args:
        directory: A run directory, or another one, that exists.
        use: Verb for the message to others.

    Raises:
        RunDirectoryError: If the lock is taken, the directory cannot be written, or something
            below it leads elsewhere.
    """
    import fcntl  # not on Windows

    check_enclosed(directory)
    missing = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
    path = directory / LOCK
    try:
        # Closed on exec, as all files of Python: a program that is started does not hold the lock.
        descriptor = open_own(path, os.O_RDWR)
    except OSError as error:
        raise RunDirectoryError(f"{directory} cannot be locked: {error}") from error
    try:
        try:
            _take_lock(descriptor)
        except BlockingIOError:
            raise RunDirectoryError(
                f"another process ({_owner(descriptor)}) {use} {directory}: wait for its end, "
                f"or choose another directory"
            ) from None
        except OSError as error:
            if error.errno not in missing:
                raise RunDirectoryError(f"{path} cannot be locked: {error}") from error
        with suppress(OSError):  # the name is for people; the lock holds without it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"pid {os.getpid()} on host {socket.gethostname()}\n".encode(), 0)
        try:
            with held(directory, path):
                yield
        finally:
            # A process that was forked meanwhile shares the descriptor, and with it the lock.
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


@contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """Wait until no other process of this machine is in such a block for the same directory.

    Where a directory cannot be locked, nothing is.
    """
    descriptor = None
    with suppress(OSError, ImportError):
        import fcntl  # not on Windows

        descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _take_lock(descriptor: int) -> None:
    """Take a lock; that of a dead process soon falls free, when its workers are gone too.

    Raises:
        BlockingIOError: If another process holds it.
    """
    import fcntl

    deadline = time.monotonic() + LOCK_GRACE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
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
    """Process that wrote the lock file, as the file says."""
    text = os.pread(descriptor, 400, 0).decode(errors="replace").strip()
    return text if re.fullmatch(r"pid \d+ on host \S+", text) else "pid unknown"


def claim_temporary() -> None:
    """Mark multiprocessing's temporary folder as ours, and remove ours of processes that are dead.

    A fork server has its socket there. The folder is removed when its process ends by itself, but
    not when that is killed. The mark is a file that is locked as long as the process lives.
    """
    import fcntl
    import multiprocessing
    from multiprocessing.util import get_temp_dir

    if multiprocessing.parent_process() is not None:
        return  # The folder may be that of the parent, which continues when this process is killed.
    directory = Path(get_temp_dir())
    if (directory / CLAIM).exists():
        return
    with suppress(OSError):  # a folder that stays does no harm
        for path in directory.parent.glob(f"{TEMPORARY}/{CLAIM}"):
            with suppress(OSError), open_regular(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
        descriptor = open_own(directory / f".{CLAIM}", os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.rename(directory / f".{CLAIM}", directory / CLAIM)


DIGEST = "sha256"
"""Key of the digest, which is that of the same text without this key."""


def seal(content: dict[str, Any], *, indent: int | None = 2) -> bytes:
    """The only text of a sealed object with this content; its digest is made again.

    Args:
        content: Values of JSON.
        indent: Spaces per level; None: one line.

    Raises:
        TypeError: If the content has other values than JSON.
    """
    content = {key: value for key, value in content.items() if key != DIGEST}
    content[DIGEST] = hashlib.sha256(_text(content, indent)).hexdigest()
    return _text(content, indent)


def unseal(data: bytes) -> dict[str, Any]:
    """The content of a sealed object, its digest included.

    Raises:
        ValueError: If the text is not what `seal` makes of any content.
    """
    try:
        content = json.loads(data)
        if isinstance(content, dict):
            indent = 2 if data.startswith(b"{\n") else None
            # Every byte counts: the same content in other words was not written here.
            if seal(content, indent=indent) == data:
                return content
    except (ValueError, RecursionError) as error:
        raise ValueError(f"damaged, or no JSON: {error}") from error
    raise ValueError(f"its {DIGEST} differs: it was changed, or is damaged")


def _text(content: dict[str, Any], indent: int | None) -> bytes:
    return (json.dumps(content, indent=indent, sort_keys=True) + "\n").encode()


PACKAGES = ("maze-train", "torch", "numpy", "gymnasium")


@cache
def versions() -> Mapping[str, str]:
    """Versions of `python`, `maze_train`, `torch`, `numpy` and `gymnasium`; nothing is imported.

    One that is not known (a copy of the sources that is not installed) is `unknown`.
    """
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name.replace("-", "_")] = version(name)
        except PackageNotFoundError:
            found[name.replace("-", "_")] = "unknown"
    return MappingProxyType(found)
