"""Process groups of PyTorch: rendezvous, joining and leaving."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.util import get_temp_dir
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from maze_train.core.files import claim_temporary
from maze_train.core.torch_private import cpu_backend
from maze_train.workers.pool import LOOPBACK

GLOO_NETWORK = "GLOO_SOCKET_IFNAME"
"""Environment variable for the network interface of gloo."""

SIOCGIFADDR = 0x8915
"""Linux request for the IPv4 address of a network interface."""


@dataclass(frozen=True)
class Address:
    """Rendezvous address of the learners.

    Learners on one machine connect through a file. Learners on several machines connect through a
    TCP port of the first learner's machine.
    """

    name: str
    """Path of the file, or prefix of the keys in the TCP store."""

    host: str = ""
    """Address of the first learner's machine; empty if a file is used."""

    port: int = 0


class Rendezvous:
    """Single-use rendezvous of learners.

    On one machine, only the current user can access the file. On a cluster, the socket is bound to
    `host`, and every process that can reach this address can connect.

    Args:
        host: Address of this machine for the other learners; empty: use a file.

    Attributes:
        address: Address to pass to the learners.
        listener: File descriptor of the listening socket; None if a file is used.
    """

    def __init__(self, host: str) -> None:
        self._folder: TemporaryDirectory[str] | None = None
        self.listener: int | None = None
        if host == LOOPBACK:
            # Only the user can access this folder. If this process is killed, the next run
            # removes the folder.
            claim_temporary()
            self._folder = TemporaryDirectory(prefix="maze_train_", dir=get_temp_dir())
            self.address = Address(os.path.join(self._folder.name, "store"))
            return
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, 0), family=family)
        self.address = Address(secrets.token_hex(), host, server.getsockname()[1])
        self.listener = server.detach()  # The store closes the socket.

    def close(self) -> None:
        """Remove the file; a second call does nothing."""
        if self._folder is not None:
            self._folder.cleanup()


def open_store(address: Address, count: int, timeout_s: float, listener: int | None) -> Any:
    """Open the store at an address.

    Args:
        address: Rendezvous address.
        count: Number of learners.
        timeout_s: Timeout in seconds.
        listener: File descriptor of the listening socket in the process that owns it, otherwise
            None.
    """
    from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

    timeout = timedelta(seconds=timeout_s)
    if not address.host:
        shared = FileStore(address.name, count)
        shared.set_timeout(timeout)
        return shared
    store = TCPStore(
        address.host,
        address.port,
        count,
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    return PrefixStore(address.name, store)


def interface_to(host: str) -> str | None:
    """Return the network interface through which this machine reaches a host.

    Args:
        host: Address of another machine or of this machine; empty: this machine.

    Returns:
        Name of the interface; None if it is unknown: on systems other than Linux, for IPv6, and if
        the name of the host refers to this machine itself (127.0.0.1).
    """
    interfaces = [name for _, name in socket.if_nameindex()]
    if not host:
        return next(name for name in interfaces if name.startswith("lo"))
    if sys.platform != "linux":
        return None
    from fcntl import ioctl  # Not available on Windows.

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with suppress(OSError):
            probe.connect((host, 1))  # Selects the route; UDP sends nothing.
        local = socket.inet_aton(probe.getsockname()[0])
        for name in interfaces:
            with suppress(OSError):  # An interface without an address.
                found = ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24]
                if found == local and not name.startswith("lo"):
                    return name
    return None


@contextmanager
def network_to(host: str) -> Iterator[None]:
    """Connect gloo through the interface that reaches `host`; see `interface_to`.

    By default, gloo uses the address of the machine's own name, which is often 127.0.0.1: other
    machines could not connect. Among several machines, `GLOO_SOCKET_IFNAME` has precedence.
    """
    before = os.environ.get(GLOO_NETWORK)
    interface = interface_to(host)
    if interface is None or (host and before is not None):
        yield
        return
    if not host:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)  # NCCL reads this on first use.
    os.environ[GLOO_NETWORK] = interface
    try:
        yield
    finally:
        if before is None:
            del os.environ[GLOO_NETWORK]
        else:
            os.environ[GLOO_NETWORK] = before


def gpu_of(device: torch.device) -> str | None:
    """Return the globally unique ID of a learner's GPU; None without a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def join(
    address: Address,
    rank: int,
    count: int,
    timeout_s: float,
    gpu: torch.device | None,
    listener: int | None = None,
) -> bool:
    """Create the process group; return whether all learners joined.

    Args:
        address: Rendezvous address.
        rank: Rank of this learner.
        count: Number of learners.
        timeout_s: Timeout of a collective operation in seconds.
        gpu: GPU of this learner (selects NCCL); None (selects gloo) on a CPU or a shared GPU.
        listener: `Rendezvous.listener`, for the first learner.
    """
    if gpu is not None:
        torch.cuda.set_device(gpu)
    # NCCL exchanges CUDA tensors, gloo all other tensors.
    backend = "gloo" if gpu is None else "cpu:gloo,cuda:nccl"
    try:
        store = open_store(address, count, timeout_s, listener)
        start_group(backend, store, rank, count, timeout_s, address.host)
    except RuntimeError:
        return False
    return True


def start_group(
    backend: str, store: Any, rank: int, count: int, timeout_s: float, host: str
) -> None:
    """Create the process group.

    Args:
        backend: PyTorch backend, such as `gloo`.
        store: Store that the members use to find each other.
        rank: Rank of this member.
        count: Number of members.
        timeout_s: Timeout of a collective operation in seconds.
        host: See `interface_to`.

    Raises:
        RuntimeError: If a member does not join.
    """
    hook = sys.excepthook
    # If this variable is set, failed operations raise an error instead of ending the process.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    try:
        with network_to(host):
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=count,
                timeout=timedelta(seconds=timeout_s),
            )
    finally:
        sys.excepthook = hook  # PyTorch wraps the hook on each call.


def leave() -> None:
    """Leave the process group, which the other learners detect; a second call has no effect."""
    if dist.is_initialized():
        backend = cpu_backend(dist.group.WORLD)
        with suppress(RuntimeError):
            dist.destroy_process_group()
        del backend  # After the group; see `cpu_backend`.
