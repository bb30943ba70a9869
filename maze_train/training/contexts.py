"""PyTorch modes and profiling of a run; devices and memory of this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

from maze_train.core.errors import ConfigError, TrainingError
from maze_train.core.files import atomic_write
from maze_train.core.notices import warn
from maze_train.envs.vector import MazeVectorEnv
from maze_train.learner.modules import CUBLAS, REPEATABLE
from maze_train.learner.ranks import Ranks
from maze_train.spaces.columns import Columns
from maze_train.spaces.describe import flat_spaces

ANOMALY = (
    *("runner.detect_anomaly", "returned nan values"),
    "the warning above shows the line that called it",
)
NOT_DETERMINISTIC = (
    *("runner.deterministic", "deterministic_algorithms"),
    "choose other layers, or set runner.deterministic=false",
)
"""Setting, text of the PyTorch errors caused by the setting, and remedy."""


@contextmanager
def modes(*, deterministic: bool, detect_anomaly: bool = False) -> Iterator[None]:
    """Set the PyTorch modes of a run and restore the previous modes at the end.

    Args:
        deterministic: Whether nondeterministic operations raise an error.
        detect_anomaly: Whether to use autograd anomaly detection, which names the operation that
            produced a NaN.

    Raises:
        TrainingError: If an operation has no deterministic algorithm, or produces NaN.
    """
    with ExitStack() as stack:
        if deterministic:
            stack.enter_context(_explained(*NOT_DETERMINISTIC))
            stack.enter_context(_deterministic())
        if detect_anomaly:
            stack.enter_context(_explained(*ANOMALY))
            stack.enter_context(torch.autograd.set_detect_anomaly(True))
        yield


@contextmanager
def _explained(key: str, words: str, remedy: str) -> Iterator[None]:
    """Add the responsible setting and a remedy to PyTorch errors that contain `words`."""
    try:
        yield
    except RuntimeError as error:
        if words not in str(error):
            raise
        raise TrainingError(f"{key} = True: {error}; {remedy}") from error


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    is_new = CUBLAS not in os.environ
    os.environ.setdefault(CUBLAS, REPEATABLE)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        if is_new:
            del os.environ[CUBLAS]


class UpdateProfiler:
    """Profiles some updates and writes a trace for Chrome or Perfetto.

    Args:
        updates: First and last profiled update, counted from 1; None: no profile.
        folder: Directory of the trace file.
    """

    def __init__(self, updates: Sequence[int] | None, folder: Path) -> None:
        self.first, self.last = updates or (0, 0)
        self.path = folder / f"updates_{self.first}_{self.last}.json"
        self._profile: torch.profiler.profile | None = None

    def around(self, number: int) -> AbstractContextManager[None]:
        """Return the context of an update."""
        return self._watched(number) if self.first <= number <= self.last else nullcontext()

    @contextmanager
    def _watched(self, number: int) -> Iterator[None]:
        if self._profile is None:
            # Without `acc_events`, some versions of PyTorch warn that repeated cycles clear events.
            self._profile = torch.profiler.profile(acc_events=True)
            self._profile.start()
        with torch.profiler.record_function(f"update {number}"):
            yield
        if number == self.last:
            self.stop()

    def stop(self) -> None:
        """Write the trace so far; repeated calls do nothing."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        profile.stop()
        try:
            with atomic_write(self.path) as file:
                profile.export_chrome_trace(file.name)
        except (OSError, RuntimeError) as error:  # Training continues without a trace.
            warn(f"{self.path} could not be written: {error}")


PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def find_device(name: str, key: str = "algorithm.device") -> torch.device:
    """Return a device by name.

    Args:
        name: Name of the device.
        key: Name of the setting for error messages.

    Raises:
        ConfigError: If PyTorch cannot use the device.
    """
    if name == "auto":
        found = (
            torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        )
        name = "cpu" if found is None else found.type
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(key, f"not available on this machine: {reason}", name) from error
    return device


class CgroupFiles(NamedTuple):
    """File names of the memory limits in one version of control groups."""

    limit: str
    used: str
    reclaimable: str
    """Entry of `memory.stat`: bytes of reclaimable file cache."""


V1 = CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = CgroupFiles("memory.max", "memory.current", "inactive_file")


def check_fits(env: MazeVectorEnv, num_steps: int, processes: Ranks) -> None:
    """Check that the observations of a rollout fit into the available memory.

    Raises:
        ConfigError: If the observations do not fit.
    """
    simulator, count = env.simulator, processes.count
    device = torch.device("cpu") if simulator is None else simulator.device
    leaves = flat_spaces(env.single_observation_space)
    row = sum(spec.nbytes for spec in Columns.of(leaves).values())
    # Simulators may also return the final observation of each episode.
    nbytes = row * env.num_envs * (num_steps + 1) * (1 if simulator is None else 2)
    if count > 1:  # Rollouts are received from all processes, and then joined.
        nbytes *= 1 + 2 * count
    free = available_memory(device, processes.local_count)
    if free is not None and nbytes > free:
        raise ConfigError(
            "algorithm.n_rollout_steps",
            f"the observations of a rollout need {readable_nbytes(nbytes)}, but only "
            f"{readable_nbytes(free)} are free on {device}{each_of(processes.local_count)}; reduce "
            "it or runner.concurrency",
            num_steps,
        )


def each_of(count: int) -> str:
    """Return an addition to messages about resources that `count` processes share."""
    return f" for each of the {count} processes" if count > 1 else ""


def available_memory(
    device: torch.device, count: int = 1, *, proc: Path = PROC, cgroups: Path = CGROUPS
) -> int | None:
    """Return the number of bytes that this process can still allocate on a device.

    For the CPU: the minimum of the memory available without swapping and the memory left in each
    control group (container, cluster job) of this process, divided by `count`.

    Args:
        device: The device.
        count: Number of processes on this machine that share the memory of the CPU.
        proc: Path of procfs.
        cgroups: Directory of control groups, version 1 or 2.

    Returns:
        Bytes, >= 0; None if unknown.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    found = [_meminfo(proc), *(_left(*place) for place in _groups(proc, cgroups))]
    return min((nbytes // count for nbytes in found if nbytes is not None), default=None)


def available_disk(directory: Path, count: int = 1) -> int:
    """Return the free bytes on the disk of a directory for each of `count` processes.

    The directory might not exist yet.
    """
    there = directory.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free // count


def _meminfo(proc: Path) -> int | None:
    """Return the bytes that are available without swapping."""
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def readable_nbytes(count: int) -> str:
    """Format a number of bytes."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 1e3:.1f} kB"


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, CgroupFiles]]:
    """Yield the control groups that may limit the memory of this process, innermost first."""
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
    """Return the bytes left in a control group; None without a limit."""
    limit, used = "".join(_lines(group / files.limit)), "".join(_lines(group / files.used))
    if not limit.isdigit() or not used.isdigit():
        return None
    stat = dict(line.split(maxsplit=1) for line in _lines(group / "memory.stat"))
    return max(0, int(limit) - int(used) + int(stat.get(files.reclaimable, 0)))


def _lines(path: Path) -> list[str]:
    """Return the lines of a file; an empty list if the file cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
