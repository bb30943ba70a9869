"""Safe writes into run directories from untrusted sources.

Directories of runs, studies and sweeps may be untrusted. Files are never written through symbolic
links below these directories: each folder is opened relative to its parent, without following
links.
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
from maze_train.core.names import CONFIG, OF_RUN, OF_SEVERAL

_GUARDED: dict[Path, tuple[Path, int]] = {}
"""Marker file, and an open descriptor of the file, by guarded directory."""


@contextmanager
def guarded(directory: Path, mark: Path) -> Iterator[None]:
    """Guard a directory in the block: if the directory is moved or removed, writes below it fail.

    Args:
        directory: The directory.
        mark: A file in the directory, or the directory itself (on Windows, then not guarded); used
            to detect that the directory was moved or removed. The file remains open, so that its
            inode number is not reused.

    Raises:
        OSError: If the marker cannot be opened.
    """
    if mark == directory and not OPENS_BELOW:
        yield
        return
    descriptor = os.open(mark, os.O_RDONLY)
    _GUARDED[directory] = (mark, descriptor)
    try:
        yield
    finally:
        _GUARDED.pop(directory, None)
        os.close(descriptor)


def check_guarded(path: Path) -> None:
    """Raise if a path is in a guarded directory that was moved or removed.

    Raises:
        FileNotFoundError: If the directory was moved or removed.
    """
    for directory in (path, *path.parents):
        if directory in _GUARDED:
            mark, descriptor = _GUARDED[directory]
            with suppress(OSError):
                if os.path.samestat(os.stat(mark), os.fstat(descriptor)):
                    continue
            problem = f"was moved or removed during the run ({mark.name} is not the original file)"
            raise FileNotFoundError(errno.ENOENT, problem, str(directory))


OPENS_BELOW = {os.open, os.mkdir, os.rename} <= os.supports_dir_fd
"""Whether the OS can open files relative to an open directory (not on Windows)."""

NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
PLAIN = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""Flags to open a file without waiting and, on Windows, without translating line ends."""


def outermost_run(path: Path) -> Path | None:
    """Return the outermost run, study or sweep directory that contains an absolute path.

    None means that the user chose all folders of the path.
    """
    folders = (*reversed(path.parents), path)
    for folder in folders:
        if folder in _GUARDED:
            return folder
    return next(filter(_is_run, folders), None)


def _is_run(folder: Path) -> bool:
    """Return whether a folder contains files of a run, a study or a sweep."""
    names = {name for name in (CONFIG, *OF_RUN, *OF_SEVERAL) if os.path.lexists(folder / name)}
    return not names.isdisjoint(OF_SEVERAL) or (CONFIG in names and len(names) > 1)


def _absolute(path: Path) -> Path:
    """Return the absolute path without `..`, which is resolved after links."""
    found = Path(path.absolute().anchor)
    for part in path.absolute().parts[1:]:
        if part == "..":
            _check_links(found)
            found = Path(os.path.realpath(found)).parent
        else:
            found /= part
    return found


def _check_links(path: Path) -> None:
    """Raise if an absolute path contains a symbolic link below a run, a study or a sweep.

    Raises:
        OSError: If the path contains a symbolic link.
    """
    root = outermost_run(path)
    below = [] if root is None else [path, *path.parents][: len(path.relative_to(root).parts)]
    for folder in reversed(below):
        if folder.is_symlink():
            raise _link_error(folder)


def _link_error(path: Path) -> OSError:
    problem = (
        f"is a symbolic link inside a run, study or sweep directory ({outermost_run(path)}): "
        "remove it, or use the directory that it points to"
    )
    return OSError(errno.ELOOP, problem, str(path))


@dataclass(frozen=True)
class OpenFolder:
    """Open folder for writing files; links below runs are not followed."""

    path: Path
    descriptor: int | None
    """Descriptor of the folder; None if the OS does not support relative paths."""

    def open(self, name: str, flags: int) -> int:
        """Open or create a file without following symbolic links.

        Raises:
            OSError: If the file cannot be opened.
        """
        with self._naming(name) as place:
            flags |= os.O_CREAT | NO_LINK | PLAIN
            return os.open(place, flags, 0o666, dir_fd=self.descriptor)

    def replace(self, name: str, target: str) -> None:
        """Rename a file in the folder; an existing target is replaced.

        Raises:
            OSError: If the file cannot be renamed.
        """
        with self._naming(name) as place, self._naming(target) as new:
            os.replace(place, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """Remove a file if it exists.

        Raises:
            OSError: If the file cannot be removed.
        """
        with self._naming(name) as place, suppress(FileNotFoundError):
            os.unlink(place, dir_fd=self.descriptor)

    @contextmanager
    def _naming(self, name: str) -> Iterator[str]:
        """Yield the name for system calls; errors contain the full path."""
        try:
            yield str(self.path / name) if self.descriptor is None else name
        except OSError as error:
            error.filename, error.filename2 = str(self.path / name), None
            raise


@contextmanager
def opened_folder(path: Path, *, make: bool = False) -> Iterator[OpenFolder]:
    """Open a folder for writing. maze_train writes all files through this function.

    Symbolic links below the outermost run, study or sweep are not followed, because such links may
    be untrusted. Links above this directory are followed.

    Args:
        path: The folder.
        make: Whether to create missing folders, except guarded folders (see `guarded`).

    Raises:
        OSError: If the folder cannot be opened, or a component below a run is a link.
    """
    path = _absolute(path)
    root = outermost_run(path)
    if root is None or not OPENS_BELOW:
        _check_links(path)
        missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
        check_guarded(path)  # If folders are removed later, the following mkdir fails.
        for folder in reversed(missing if make else []):
            folder.mkdir(exist_ok=True)
        root = path
    check_guarded(path)
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
    """Create a folder and its parents, without following links below a run.

    Third-party writers require existing folders, which are created by this function. Guarded
    folders are not created.

    Raises:
        OSError: If a folder cannot be created, is guarded but missing, or is a link below a run.
    """
    with opened_folder(path, make=True):
        pass


def check_enclosed(directory: Path) -> None:
    """Raise if a directory contains links to targets outside the directory.

    Called before the first write to a run, study, sweep or dataset, so that no later write can
    leave the directory. The directory itself may be a link, except below a different run, study or
    sweep.

    Raises:
        RunDirectoryError: If the target of a link is outside the directory, or the directory
            contains a pipe or a device.
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
                        f"{entry.path} is a symbolic link to a target outside {directory}: remove "
                        "the link, or choose another directory"
                    )
            elif entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
            elif not entry.is_file(follow_symlinks=False):
                raise RunDirectoryError(f"{entry.path} is not a regular file: remove it")


def files_below(directory: Path, pattern: str = "*") -> list[Path]:
    """Return the matching regular files at any depth; links are not followed.

    Used for uploads, because a link could point to a private file.
    """
    found = (
        Path(folder, name)
        for folder, _, names in os.walk(directory)
        for name in names
        if fnmatchcase(name, pattern)
    )
    return sorted(path for path in found if stat.S_ISREG(path.lstat().st_mode))
