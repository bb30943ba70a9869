"""Folders in which this package writes: nothing is written through a link that a stranger made.

Runs, studies and sweeps may come from a stranger. Folders below them are opened one after the
other, each relative to the one above it, without following symbolic links.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from maze_train.core.errors import RunDirectoryError

_HELD: dict[Path, tuple[Path, int]] = {}
"""Directories that this process writes into: the mark of each, and the same file, open."""


@contextmanager
def held(directory: Path, mark: Path) -> Iterator[None]:
    """Refuse to write below a directory after it was moved or removed.

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


OPENS_BELOW = {os.open, os.mkdir, os.rename} <= os.supports_dir_fd
"""Whether the system opens files relative to an open folder. Windows does not."""

NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)

RUN, OF_RUN = "config.yaml", ("best", "checkpoints", "metrics.csv", "policy.pt", "summary.json")
OF_SEVERAL = ("study.journal", "study.yaml", "multirun.yaml", "jobs.csv")
"""Files by which the directory of a run, or of a study or a sweep, is recognised."""


def outermost_run(path: Path) -> Path | None:
    """Return the outermost run, study or sweep that contains an absolute path.

    None if there is none: then every folder in the path is the choice of the user.
    """
    folders = (*reversed(path.parents), path)
    for folder in folders:
        if folder in _HELD:
            return folder
    return next(filter(_is_run, folders), None)


def _is_run(folder: Path) -> bool:
    """Whether a folder looks like the directory of a run, a study or a sweep."""
    names = {name for name in (RUN, *OF_RUN, *OF_SEVERAL) if os.path.lexists(folder / name)}
    return not names.isdisjoint(OF_SEVERAL) or (RUN in names and len(names) > 1)


def _absolute(path: Path) -> Path:
    """Return the absolute path without `..`, which leads elsewhere after a link."""
    found = Path(path.absolute().anchor)
    for part in path.absolute().parts[1:]:
        if part == "..":
            _check_links(found)
            found = Path(os.path.realpath(found)).parent
        else:
            found /= part
    return found


def _check_links(path: Path) -> None:
    """Refuse an absolute path that passes a symbolic link below a run, a study or a sweep.

    Raises:
        OSError: If it does.
    """
    root = outermost_run(path)
    below = [] if root is None else [path, *path.parents][: len(path.relative_to(root).parts)]
    for folder in reversed(below):
        if folder.is_symlink():
            raise _link_error(folder)


def _link_error(path: Path) -> OSError:
    problem = (
        f"is a symbolic link below a run, a study or a sweep ({outermost_run(path)}), and is not "
        "followed: remove it, or name the directory that it leads to"
    )
    return OSError(errno.ELOOP, problem, str(path))


@dataclass(frozen=True)
class OpenFolder:
    """A folder in which files are written, opened without following a link below a run."""

    path: Path
    descriptor: int | None
    """Descriptor of the folder; None where the system cannot open files relative to one."""

    def open(self, name: str, flags: int) -> int:
        """Open or create a file; a symbolic link is not followed.

        Raises:
            OSError: If it cannot be opened.
        """
        with self._naming(name) as place:
            flags |= os.O_CREAT | NO_LINK | getattr(os, "O_NONBLOCK", 0)
            return os.open(place, flags, 0o666, dir_fd=self.descriptor)

    def replace(self, name: str, target: str) -> None:
        """Rename a file in the folder; an existing target is replaced.

        Raises:
            OSError: If it cannot be renamed.
        """
        with self._naming(name) as place, self._naming(target) as new:
            os.replace(place, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there.

        Raises:
            OSError: If it cannot be removed.
        """
        with self._naming(name) as place, suppress(FileNotFoundError):
            os.unlink(place, dir_fd=self.descriptor)

    @contextmanager
    def _naming(self, name: str) -> Iterator[str]:
        """Yield the name as system calls take it; errors name the whole path."""
        try:
            yield str(self.path / name) if self.descriptor is None else name
        except OSError as error:
            error.filename, error.filename2 = str(self.path / name), None
            raise


@contextmanager
def opened_folder(path: Path, *, make: bool = False) -> Iterator[OpenFolder]:
    """Open a folder to write into. All files of this package are written through it.

    Below the outermost run, study or sweep no symbolic link is followed, since a stranger may have
    made it. Folders above are the choice of the user.

    Args:
        path: The folder.
        make: Whether to create missing folders, except those that are `held`.

    Raises:
        OSError: If it cannot be opened, or a part below a run is a link.
    """
    path = _absolute(path)
    root = outermost_run(path)
    if root is None or not OPENS_BELOW:
        _check_links(path)
        missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
        check_held(path)  # after the look: what vanishes from here on fails below
        for folder in reversed(missing if make else []):
            folder.mkdir(exist_ok=True)
        root = path
    check_held(path)
    if not OPENS_BELOW:
        yield OpenFolder(path, None)
        return
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(root, flags)
    try:
        for folder in reversed([path, *path.parents][: len(path.relative_to(root).parts)]):
            try:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(folder.name, dir_fd=descriptor)
                inner = os.open(folder.name, flags | NO_LINK, dir_fd=descriptor)
            except OSError as error:
                if folder.is_symlink():
                    raise _link_error(folder) from error
                error.filename = str(folder)
                raise
            os.close(descriptor)
            descriptor = inner
        yield OpenFolder(path, descriptor)
    finally:
        os.close(descriptor)


def make_folders(path: Path) -> None:
    """Create a folder and those above it, but none that is held, and none through a link.

    A folder that another package writes into is made, or checked, by this function as well.

    Raises:
        OSError: If one cannot be created, was held and is gone, or is a link below a run.
    """
    with opened_folder(path, make=True):
        pass


def check_enclosed(directory: Path) -> None:
    """Refuse a directory below which something leads elsewhere, before anything is written there.

    Called for each run, study, sweep and dataset. Later writes below the directory, by this package
    or a third-party one, then stay below it. The directory itself may be a link, unless it lies
    below another run, study or sweep.

    Raises:
        RunDirectoryError: If a link below it leads out of it, or there is a pipe or a device.
    """
    try:
        _check_links(_absolute(directory))
    except OSError as error:
        raise RunDirectoryError(f"{error.filename} {error.strerror}") from error
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
            raise RunDirectoryError(f"{folder} cannot be read: {error}") from error
        for entry in entries:
            if entry.is_symlink():
                if not Path(os.path.realpath(entry.path)).is_relative_to(root):
                    raise RunDirectoryError(
                        f"{entry.path} is a symbolic link that leads out of {directory}, and what "
                        "is written there would land elsewhere: remove it, or name another "
                        "directory"
                    )
            elif entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
            elif not entry.is_file(follow_symlinks=False):
                raise RunDirectoryError(f"{entry.path} is no regular file: remove it")


def files_below(directory: Path, pattern: str = "*") -> list[Path]:
    """Return the regular files at any depth whose names match; links are not followed.

    What is uploaded is chosen by this function: a link could lead to a private file.
    """
    found = (
        Path(folder, name)
        for folder, _, names in os.walk(directory)
        for name in names
        if fnmatchcase(name, pattern)
    )
    return sorted(path for path in found if stat.S_ISREG(path.lstat().st_mode))
