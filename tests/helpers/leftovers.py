"""Detection of open files and processes left by tests."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import PIPE, Popen
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

OF_PROCESSES = ("socket", "pipe", "/memfd:maze_train", "/dev/shm/")
"""Prefixes of file names that processes use to communicate."""


def open_files() -> Counter[str]:
    """Return the sockets, pipes and shared memory that this process has open or mapped."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    files = [" ".join(reversed(line.split(maxsplit=5)[4:])) for line in maps]
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # descriptor of the listing itself
            link = os.readlink(f"/proc/self/fd/{descriptor}")
            files.append(f"{link} {os.stat(int(descriptor)).st_ino}")
    return Counter(name for name in files if name.startswith(OF_PROCESSES))


def listening(pids: list[int]) -> set[str]:
    """Return the addresses on which processes listen, in the format of /proc."""
    sockets = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(os.readlink(descriptor))
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/net", name).read_text().splitlines()[1:]
    ]
    return {
        row[1].partition(":")[0]
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in sockets
    }


def stat(pid: int | str) -> list[str]:
    """Return state, parent, group and more of a process; empty if the process does not exist."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def has_ended(pid: int) -> bool:
    """Return whether a process has exited, including zombies."""
    return stat(pid)[:1] in ([], ["Z"])


def left_of(pids: list[int], seconds: float) -> list[int]:
    """Wait for processes to exit; return the remaining ones."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if not has_ended(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def members(group: int) -> dict[int, int]:
    """Return the living processes of a group with their parents."""
    found = {int(pid): stat(pid) for pid in os.listdir("/proc") if pid.isdigit()}
    return {
        pid: int(fields[1])
        for pid, fields in found.items()
        if fields and fields[0] != "Z" and int(fields[2]) == group
    }


def cpu_seconds(group: int) -> float:
    """Return the CPU time of the processes of a group."""
    ticks = [sum(map(int, stat(pid)[11:15])) for pid in members(group)]
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def left_in(group: int, seconds: float = 30.0) -> dict[int, int]:
    """Wait for all processes of a group to exit; return the remaining ones."""
    deadline = time.monotonic() + seconds
    while (left := members(group)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@contextmanager
def run_owner(code: str, folder: Path, *arguments: str) -> Iterator[tuple[Popen[str], list[int]]]:
    """Run a script that prints the ids of its child processes; kill all of them at the end."""
    script = folder / "parent.py"
    script.write_text(code)
    owner = Popen(
        [sys.executable, str(script), *arguments],
        stdout=PIPE,
        stderr=PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    pids: list[int] = []
    try:
        assert owner.stdout is not None
        pids += [int(word) for word in owner.stdout.readline().split()]
        yield owner, pids
    finally:
        owner.kill()
        owner.communicate()
        for pid in pids:
            if not has_ended(pid):
                os.kill(pid, signal.SIGKILL)
