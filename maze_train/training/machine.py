"""Devices, threads and memory of this machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from maze_train.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def find_device(name: str, key: str = "algorithm.device") -> torch.device:
    """The device of a name in the configuration.

    Args:
        name: The name.
        key: Name of the setting.

    Raises:
        ConfigError: If PyTorch does not find it.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(key, f"not usable here: {reason}", name) from error
    return device


class CgroupFiles(NamedTuple):
    """Names of the files of memory in a version of control groups."""

    limit: str
    used: str
    reclaimable: str
    """Entry of `memory.stat`: bytes of file cache that are given up when memory is needed."""


V1 = CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = CgroupFiles("memory.max", "memory.current", "inactive_file")


def available_memory(
    device: torch.device, *, proc: Path = PROC, cgroups: Path = CGROUPS
) -> int | None:
    """Bytes that can still be allocated on a device.

    For the CPU, what Linux takes to be available without swapping, or less where a control group
    (a container, a job of a cluster) or one above it has a limit.

    Args:
        device: The device.
        proc: Directory in which the kernel describes processes.
        cgroups: Directory of control groups, version 1 or 2.

    Returns:
        Bytes, >= 0; None where they are not known.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    found = [_meminfo(proc), *(_left(*place) for place in _groups(proc, cgroups))]
    return min((nbytes for nbytes in found if nbytes is not None), default=None)


def available_disk(directory: Path) -> int:
    """Bytes that can still be written into a directory, which need not exist yet."""
    there = directory.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def _meminfo(proc: Path) -> int | None:
    """Bytes that are available without swapping."""
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def readable_nbytes(count: int) -> str:
    """A number of bytes for people."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 1e3:.1f} kB"


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, CgroupFiles]]:
    """The control groups of this process that may limit memory, from the innermost one."""
    for line in _lines(proc / "self/cgroup"):
        _, controllers, group = line.split(":", 2)
        if controllers == "memory":
            root, files = cgroups / "memory", V1
        elif not controllers:
            root, files = cgroups, V2
        else:
            continue
        innermost = root / group.lstrip("/")
        for directory in (innermost, *innermost.parents):
            if directory.is_relative_to(root):
                yield directory, files


def _left(group: Path, files: CgroupFiles) -> int | None:
    """Bytes that a control group leaves; None without a limit."""
    limit, used = "".join(_lines(group / files.limit)), "".join(_lines(group / files.used))
    if not limit.isdigit() or not used.isdigit():
        return None
    stat = dict(line.split(maxsplit=1) for line in _lines(group / "memory.stat"))
    return max(0, int(limit) - int(used) + int(stat.get(files.reclaimable, 0)))


def _lines(path: Path) -> list[str]:
    """Lines of a file; none, if it can not be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
