"""Hides what macOS and Windows lack: run as `python other_platform.py <script> [arguments]`."""

from __future__ import annotations

import os
import runpy
import select
import shutil
import signal
import stat
import sys
from pathlib import Path
from typing import Any

MODULES = ("fcntl", "resource", "termios", "pwd", "grp")
MISSING: dict[Any, tuple[str, ...]] = {
    select: ("poll", "epoll"),
    signal: (
        *("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGKILL", "SIGALRM", "SIGCHLD"),
        *("alarm", "siginterrupt", "pthread_sigmask", "sigwait"),
    ),
    os: (
        *("fork", "forkpty", "setsid", "killpg", "nice", "getuid", "geteuid", "getpgid"),
        *("sched_getaffinity", "memfd_create", "mkfifo", "chown", "fchown", "fchmod"),
        *("O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK", "uname", "register_at_fork"),
    ),
}
DIRECTORIES = ("supports_dir_fd", "supports_fd", "supports_follow_symlinks")


REPLACE, OPEN, KILL, UNLINK = os.replace, os.open, os.kill, os.unlink


def hide() -> None:
    """Remove modules and names, refuse to open directories, and to replace or remove open files."""
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for module, names in MISSING.items():
        for name in set(names) & vars(module).keys():
            delattr(module, name)
    for name in DIRECTORIES:
        setattr(os, name, set())
    changed: Any = os
    changed.replace = changed.rename = replace_closed
    changed.unlink = changed.remove = unlink_closed
    changed.open, changed.kill = open_file, kill_this
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    sys.platform = "other"


def replace_closed(source: Any, target: Any, **how: Any) -> None:
    """Rename a file if it is closed."""
    if any(value is not None for value in how.values()):
        raise NotImplementedError("dir_fd unavailable on this platform")
    for path in (source, target):
        check_closed(path)
    REPLACE(source, target)


def unlink_closed(path: Any, **how: Any) -> None:
    """Remove a file if it is closed, or if it is a temporary file, opened for removal."""
    if sys._getframe(1).f_globals["__name__"] != "tempfile":
        check_closed(path)
    UNLINK(path, **how)


def check_closed(path: Any) -> None:
    """Raise an error if this process has a file open."""
    if is_open(path):
        raise PermissionError(13, "The process cannot access the file", str(path))


def open_file(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    """Open a file by its path."""
    if dir_fd is not None:
        raise NotImplementedError("dir_fd unavailable on this platform")
    if Path(os.fspath(path)).is_dir():
        raise PermissionError(13, "Permission denied", str(path))
    return OPEN(path, flags, mode)


def kill_this(pid: int, number: int) -> None:
    """Send a signal that exists; Windows would end the process for others."""
    if number not in (signal.SIGINT, signal.SIGTERM):
        raise OSError(22, "Invalid argument")
    KILL(pid, number)


def is_open(path: Any) -> bool:
    """Whether this process has a file open."""
    try:
        wanted = os.stat(path)
    except FileNotFoundError:
        return False
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found = os.fstat(int(descriptor))
        except OSError:
            continue
        same = (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino)
        if same and stat.S_ISREG(found.st_mode):
            return True
    return False


if __name__ == "__main__":
    # Imported before names are hidden, which other packages read for their kind of platform.
    import sysconfig

    import gymnasium  # noqa: F401
    import rich.console  # noqa: F401
    import torch  # noqa: F401

    sysconfig.get_config_vars()
    hide()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
