"""Available memory, read from real and simulated kernel files."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from maze_train.config.compose import load_config
from maze_train.learner.ranks import OneRank
from maze_train.run.build import device_of
from maze_train.training.contexts import available_disk, available_memory, find_device

CPU = torch.device("cpu")
MB = 2**20
UNLIMITED_V1 = 9223372036854771712


class Kernel:
    """Simulated files of the kernel, below a directory.

    Args:
        directory: Where to write them.
        groups: Lines of `/proc/self/cgroup`.
        available_mb: Memory available on the machine; None: no such file.
    """

    def __init__(self, directory, groups=(), available_mb=1000):
        self.proc, self.cgroups = directory / "proc", directory / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        if groups:
            (self.proc / "self/cgroup").write_text("".join(f"{line}\n" for line in groups))
        if available_mb is not None:
            text = f"MemTotal: 99999999 kB\nMemFree: 5 kB\nMemAvailable: {available_mb * 1024} kB\n"
            (self.proc / "meminfo").write_text(text)

    def group_v2(self, path, limit, used_mb, cache_mb=0):
        """Write a control group of version 2."""
        files = {
            "memory.max": limit,
            "memory.current": used_mb * MB,
            "memory.stat": f"anon 1\ninactive_file {cache_mb * MB}\nactive_file 7",
        }
        self.write(self.cgroups / path, files)

    def group_v1(self, path, limit, used_mb, cache_mb=0):
        """Write a control group of version 1."""
        files = {
            "memory.limit_in_bytes": limit,
            "memory.usage_in_bytes": used_mb * MB,
            "memory.stat": f"inactive_file 1\ntotal_inactive_file {cache_mb * MB}",
        }
        self.write(self.cgroups / "memory" / path, files)

    def write(self, group, files):
        group.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (group / name).write_text(f"{content}\n")

    def available_mb(self):
        """Return the available memory in MB, or None."""
        nbytes = available_memory(CPU, proc=self.proc, cgroups=self.cgroups)
        return None if nbytes is None else nbytes / MB


def test_available_memory_without_control_groups(tmp_path):
    """The kernel's available memory is returned, not its free memory."""
    assert Kernel(tmp_path).available_mb() == 1000


def test_available_memory_may_be_unknown(tmp_path):
    """None is returned on machines without these files."""
    kernel = Kernel(tmp_path, available_mb=None)
    assert kernel.available_mb() is None
    assert available_memory(torch.device("meta")) is None


V1_LINES = ["5:cpu,cpuacct:/job", "4:memory:/job/step", "1:name=systemd:/"]


@pytest.mark.parametrize(
    ("lines", "make"), [(["0::/job/step"], Kernel.group_v2), (V1_LINES, Kernel.group_v1)]
)
def test_tightest_control_group_limit_applies(lines, make, tmp_path):
    """The tightest limit of the group and its parents counts; file cache is available."""
    unlimited = UNLIMITED_V1 if make is Kernel.group_v1 else "max"
    kernel = Kernel(tmp_path, lines)
    make(kernel, "", unlimited, 500)
    make(kernel, "job", unlimited, 500)
    make(kernel, "job/step", unlimited, 500)
    make(kernel, "job/other", 1, 0)
    assert kernel.available_mb() == 1000
    make(kernel, "job/step", 800 * MB, 500, 100)
    assert kernel.available_mb() == 400
    make(kernel, "job", 600 * MB, 500, 150)
    assert kernel.available_mb() == 250
    make(kernel, "", 600 * MB, 590)
    assert kernel.available_mb() == 10
    make(kernel, "", 600 * MB, 700)
    assert kernel.available_mb() == 0
    make(kernel, "", 10**6 * MB, 700)
    make(kernel, "job", 10**6 * MB, 700)
    make(kernel, "job/step", 10**6 * MB, 700)
    assert kernel.available_mb() == 1000


def test_control_group_at_the_mount_root_applies(tmp_path):
    """The path in the file exists on the host only; the limit is at the root."""
    kernel = Kernel(tmp_path, ["3:memory:/docker/4711", "0::/"])
    kernel.group_v1("", 300 * MB, 100)
    assert kernel.available_mb() == 200


def test_control_group_limit_without_meminfo_applies(tmp_path):
    """A limit is used even if the memory of the machine is unknown."""
    kernel = Kernel(tmp_path, ["0::/"], available_mb=None)
    kernel.group_v2("", 300 * MB, 100)
    assert kernel.available_mb() == 200
    (kernel.cgroups / "memory.stat").unlink()
    assert kernel.available_mb() == 200
    (kernel.cgroups / "memory.current").unlink()
    assert kernel.available_mb() is None


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_available_memory_of_this_machine_is_plausible():
    """Available memory is positive and below a petabyte."""
    available = available_memory(CPU)
    assert available is not None
    assert MB < available < 2**50


def test_free_memory_of_the_gpu_is_returned(monkeypatch):
    """The free memory of the requested device is returned, not its total memory."""
    free = {1: 123 * MB}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device.index], 999 * MB))
    assert available_memory(torch.device("cuda", 1)) == 123 * MB


def test_free_disk_space_of_a_missing_directory_is_known(tmp_path, monkeypatch):
    """Free space of the file system of a directory that may not exist yet."""
    free = {tmp_path: SimpleNamespace(free=MB)}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free[path])
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path, tmp_path / "runs" / "new", Path("runs")):
        assert available_disk(path) == MB
    assert available_disk(tmp_path, 4) == MB // 4


@pytest.mark.parametrize("kind", [None, "meta"])
def test_device_auto_selects_the_accelerator(monkeypatch, kind):
    """`auto` selects any accelerator; the CPU without one and for algorithms that use none."""
    device = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: device is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    assert find_device("auto") == (device or CPU)
    for key in ("algorithm.device", "learner_group.device"):
        for algorithm, expected in (("ppo", device or CPU), ("es", CPU)):
            config = load_config({"env": "CartPole-v1", "algorithm": algorithm, key: "auto"})
            assert device_of(config, OneRank()) == expected
