"""Directories that one process uses."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from maze_train.errors import RunDirectoryError
from maze_train.files import check_enclosed, held, open_own, open_regular, process_runs

if TYPE_CHECKING:
    from collections.abc import Iterator


LOCK = ".lock"

TEMPORARY, CLAIM = "pymp-*", "maze_train.lock"
"""Folders that multiprocessing makes for its sockets, and the file that marks ours."""

LOCK_GRACE_S = 3.0
"""Seconds for which the workers of a dead process may keep its lock."""


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
        RunDirectoryError: If the lock is taken, the directory can not be written, or something
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
        raise RunDirectoryError(f"{directory} can not be locked: {error}") from error
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
                raise RunDirectoryError(f"{path} can not be locked: {error}") from error
        with suppress(OSError):  # the name is for people; the lock holds without it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"pid {os.getpid()} on host {socket.gethostname()}\n".encode(), 0)
        with held(directory, path):
            yield
        # A process that was forked meanwhile shares the descriptor, and with it the lock.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
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
        return  # The folder may be that of the parent, which goes on when this process is killed.
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
