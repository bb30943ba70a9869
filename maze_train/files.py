"""Files and directories that are complete or not there."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from maze_train.errors import RunDirectoryError

if TYPE_CHECKING:
    from collections.abc import Iterator


MAX_TEXT_NBYTES = 1 << 28

_HELD: dict[Path, tuple[Path, int]] = {}
"""Directories that this process writes into: the mark of each, and the same file, open."""


@contextmanager
def held(directory: Path, mark: Path) -> Iterator[None]:
    """Keep what is written below a directory from making it again once it was moved or removed.

    Args:
        directory: The directory.
        mark: A file in it, or the directory itself: while that is at its place, so is the
            directory. It stays open, so that no other file gets its number.

    Raises:
        OSError: If the mark cannot be opened.
    """
    descriptor = os.open(mark, os.O_RDONLY)
    _HELD[directory] = (mark, descriptor)
    try:
        yield
    finally:
        _HELD.pop(directory, None)
        os.close(descriptor)


def check_held(path: Path) -> None:
    """Refuse a path in a directory that is held and is not at its place any more.

    Raises:
        FileNotFoundError: If it is.
    """
    for directory in (path, *path.parents):
        if directory in _HELD:
            mark, descriptor = _HELD[directory]
            with suppress(OSError):
                if os.path.samestat(os.stat(mark), os.fstat(descriptor)):
                    continue
            problem = f"was moved or removed in mid-run ({mark.name} is not that of the start)"
            raise FileNotFoundError(errno.ENOENT, problem, str(directory))


def make_folders(path: Path) -> None:
    """Create a folder and those above it, but none that is held.

    Raises:
        OSError: If one cannot be created, or was held and is gone.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    check_held(path)  # after the look: what vanishes from here on fails below
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)


WITH_LINKS = (".git", ".venv", "venv", "wandb")
"""Folders in which other programs make links of their own; no run is written into them by others.
"""


def check_enclosed(directory: Path) -> None:
    """Refuse a directory below which something leads elsewhere, before anything is written there.

    It is called for each run, study, sweep and data set: whoever writes below it then, this package
    or another one, writes there and nowhere else. The directory itself may be a link.

    Raises:
        RunDirectoryError: If a link below it leads out of it, or there is a pipe or a device.
    """
    root = Path(os.path.realpath(directory))
    waiting = [os.fspath(directory)]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as found:
                entries = list(found)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise RunDirectoryError(f"{folder} can not be read: {error}") from error
        for entry in entries:
            if entry.is_symlink():
                if not Path(os.path.realpath(entry.path)).is_relative_to(root):
                    raise RunDirectoryError(
                        f"{entry.path} is a symbolic link that leads out of {directory}, and what "
                        "is written there would land elsewhere: remove it, or name another "
                        "directory"
                    )
            elif entry.is_dir(follow_symlinks=False):
                waiting += [] if entry.name in WITH_LINKS else [entry.path]
            elif not entry.is_file(follow_symlinks=False):
                raise RunDirectoryError(f"{entry.path} is no regular file: remove it")


def open_own(path: Path, flags: int) -> int:
    """Open a file to write, or make it; nothing else is opened in its place.

    Raises:
        OSError: If it can not be opened, is no regular file, or has another name elsewhere.
    """
    try:
        flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o644)
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
            return descriptor
        os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
    raise OSError(errno.EINVAL, "is no regular file: remove it", str(path))


def open_regular(path: Path) -> IO[bytes]:
    """Open a file to read. A pipe or a device is refused at once: it would never end.

    Raises:
        OSError: If it can not be opened, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is no regular file", str(path))


def read_regular(path: Path, at_most: int = MAX_TEXT_NBYTES) -> bytes:
    """The content of a regular file of `at_most` bytes.

    Raises:
        OSError: If it can not be read, is no regular file, or is longer.
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
        OSError: If the file can not be written; `path` is then as it was.
    """
    make_folders(path.parent)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _new_file(beside) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until the disk has its content; its name is not synced.

    Raises:
        OSError: If the file can not be written; a part of it may be there.
    """
    with _new_file(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _new_file(path: Path) -> IO[bytes]:
    """A file that takes the place of what was there: a link is not followed."""
    path.unlink(missing_ok=True)
    return path.open("xb")


def fsync_directory(path: Path) -> None:
    """Wait until the disk has the names of a directory: files created, renamed and removed in it.

    File systems that can not do this are left alone.

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
