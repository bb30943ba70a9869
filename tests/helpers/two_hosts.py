"""Two network namespaces that behave like two machines on one network, and faults in them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from maze_train import Callback, TrainingView

if TYPE_CHECKING:
    from collections.abc import Iterator


class Host(NamedTuple):
    """A network namespace with one address."""

    name: str
    interface: str
    address: str

    def command(self, *words: str) -> list[str]:
        """Return a command that runs in the namespace."""
        return ["ip", "netns", "exec", self.name, *words]

    def pids(self) -> list[int]:
        """Return the processes of the namespace."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def processes(self) -> list[str]:
        """Return the command lines of the processes."""
        found = []
        for pid in self.pids():
            with suppress(OSError):  # The process has ended.
                found.append(Path(f"/proc/{pid}/cmdline").read_text())
        return found

    def connect(self, state: str) -> None:
        """Set the network interface `up` or `down`."""
        _ip("-n", self.name, "link", "set", self.interface, state)

    def kill(self) -> None:
        """Kill all processes of the namespace."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def _remove(name: str) -> None:
    """Kill the processes of a namespace, and remove the namespace."""
    Host(name, "", "").kill()
    _ip("netns", "del", name)


def _create(hosts: list[Host]) -> None:
    """Create connected namespaces; remove those of test processes that were killed."""
    for name, pid in re.findall(r"^(maze(\d+)[ab])\b", _ip("netns", "list"), re.MULTILINE):
        if not os.path.exists(f"/proc/{pid}"):
            _remove(name)
    for host in hosts:
        _ip("netns", "add", host.name)
    ends = [(host.interface, "netns", host.name) for host in hosts]
    _ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
    for host in hosts:
        _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
        _ip("-n", host.name, "link", "set", "lo", "up")
        host.connect("up")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Create two connected network namespaces; skip the test where this is not allowed."""
    pid = os.getpid()
    first, second = (
        Host(f"maze{pid}{end}", f"mz{pid}{end}", f"10.77.0.{number}")
        for number, end in enumerate("ab", 1)
    )
    try:
        try:
            _create([first, second])
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or str(error)
            pytest.skip(f"no network namespaces: {reason}")
        yield first, second
    finally:
        for host in (first, second):
            with suppress(OSError, subprocess.CalledProcessError):
                _remove(host.name)


class LosesHost(Callback):
    """Callback that disconnects a host, or kills its processes, in the third update.

    Args:
        host: Name, interface and address of the host.
        kills: Whether to kill the processes of the host.
        returns: Shell command that starts the host again after some seconds; empty: none.
    """

    def __init__(self, host: list[str], kills: bool = False, returns: str = "") -> None:
        self.host, self.kills, self.returns = Host(*host), kills, returns

    def on_update_end(self, run: TrainingView) -> None:
        """Cause the fault once."""
        if run.progress.updates != 3:
            return
        if self.kills:
            self.host.kill()
        else:
            self.host.connect("down")
        if self.returns:
            subprocess.Popen(["sh", "-c", f"sleep 4; {self.returns}"], stdin=subprocess.DEVNULL)
