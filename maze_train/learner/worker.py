"""Learners besides the first one of a group, and the connection of all of them."""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from maze_train.errors import ConfigError
from maze_train.learner.modes import CUBLAS, REPEATABLE
from maze_train.learner.parcels import unpack
from maze_train.learner.shard import PeersLostError, Shard
from maze_train.workers.places import Portable
from maze_train.workers.pool import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from maze_train.events import Statistics
    from maze_train.learner.learner import Learner
    from maze_train.workers.memory import SharedMemory
    from maze_train.workers.pool import WorkerContext


GLOO_NETWORK = "GLOO_SOCKET_IFNAME"
"""Variable that names the interface on which gloo listens."""


@dataclass(frozen=True)
class ProcessModes:
    """Modes of a process, which other processes can take on."""

    threads: int
    deterministic: bool
    warn_only: bool
    """Whether an operation that is not deterministic makes a warning, instead of an error."""

    detect_anomaly: bool

    @classmethod
    def here(cls, threads: int = 0) -> ProcessModes:
        """The modes of this process, with another number of threads if that is not 0."""
        return cls(
            threads or torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.is_anomaly_enabled(),
        )

    def take_on(self) -> None:
        """Give this process these modes."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        if self.deterministic:
            os.environ.setdefault(CUBLAS, REPEATABLE)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch.autograd.set_detect_anomaly(self.detect_anomaly)


class LearnerWorker:
    """A learner that does what the first one of its group does, with other samples.

    Args:
        make_learner: Makes the learner.
        count: Number of learners of the group.
        timeout_s: Seconds that an exchange may take.
        context: Where it lives; the worker 0 has the learner 1.
    """

    def __init__(
        self,
        make_learner: Portable[Callable[[], Learner[Any, Any, Any]]],
        count: int,
        timeout_s: float,
        context: WorkerContext,
    ) -> None:
        self._rank, self._count, self._timeout_s = context.index + 1, count, timeout_s
        self._part = Shard(self._rank, count, context.count)
        self._learner = make_learner.value()
        self._learner.part = self._part
        self._memory: Any = None

    def _unpack(self, memory: SharedMemory | None, content: bytes, sizes: Sequence[int]) -> Any:
        """The value of a parcel, of which later ones may arrive in the same memory."""
        self._memory = memory or self._memory
        return unpack(self._memory, content, sizes)

    def begin(self, *parcel: Any) -> str | None:
        """Become equal to the first learner: its modules, its state, modes of its process.

        Returns:
            The GPU of this learner, see `gpu_of`.
        """
        # Copied, since they are kept and the memory is written again.
        state, modes, modules, chosen = deepcopy(self._unpack(*parcel))
        learner = self._learner
        if modules is not None:
            for module_id in list(learner.modules):
                learner.remove_module(module_id)
            for module_id, (module, is_frozen, own) in modules.items():
                if own is not None:
                    learner.own_settings[module_id] = own
                learner.add_module(module_id, module, frozen=is_frozen)
        learner.policies_to_train = chosen
        learner.load_state_dict(state)
        modes.take_on()
        return gpu_of(learner.device)

    def connect(self, address: Address, have_own_gpus: bool) -> bool:
        """Join the learners that meet at an address; whether they came."""
        leave()
        gpu = self._learner.device if have_own_gpus else None
        return join(address, self._rank, self._count, self._timeout_s, gpu)

    def update(self, *parcel: Any) -> Statistics | None:
        """Update; returns the statistics of its samples, None if other learners were lost."""
        try:
            self._learner.update(*self._unpack(*parcel))
        except PeersLostError:
            leave()  # Learners that wait for this one notice it.
            return None
        return self._part.statistics

    def apply(self, *parcel: Any) -> Any:
        """The result of a function of the learner."""
        return self._unpack(*parcel)(self._learner)

    def close(self) -> None:
        """Leave the group."""
        leave()


@dataclass(frozen=True)
class Address:
    """Where learners find each other.

    Where all of them live on one machine, that is a file; otherwise a port of the machine of the
    first one.
    """

    name: str
    """Path of the file, or what keys begin with at the port."""

    host: str = ""
    """Address of the machine, as the others reach it; empty: there is a file."""

    port: int = 0


class MeetingPlace:
    """An address at which learners find each other once.

    On one machine nobody but this user can read or write there. On a cluster it is open to those
    who reach the address of the machine, which is the only one that is listened on.

    Args:
        host: Address of this machine, as the other learners reach it.

    Attributes:
        address: What is given to the learners.
        listener: Descriptor of the socket on which the first one listens; None: there is a file.
    """

    def __init__(self, host: str) -> None:
        self._folder: TemporaryDirectory[str] | None = None
        self.listener: int | None = None
        if host == LOOPBACK:
            self._folder = TemporaryDirectory(prefix="maze_train_")  # of this user alone
            self.address = Address(os.path.join(self._folder.name, "store"))
            return
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, 0), family=family)
        self.address = Address(secrets.token_hex(), host, server.getsockname()[1])
        self.listener = server.detach()  # the store closes it

    def close(self) -> None:
        """Remove the file; again does nothing."""
        if self._folder is not None:
            self._folder.cleanup()


def open_store(address: Address, count: int, timeout_s: float, listener: int | None) -> Any:
    """The store at an address.

    Args:
        address: Where learners meet.
        count: Number of learners.
        timeout_s: Seconds that they may take.
        listener: Descriptor of the socket of the store, for who has it; None for all others.
    """
    timeout = timedelta(seconds=timeout_s)
    if not address.host:
        shared = dist.FileStore(address.name, count)  # type: ignore[attr-defined]  # not in its list
        shared.set_timeout(timeout)
        return shared
    store = dist.TCPStore(  # type: ignore[attr-defined]  # not in its list of names
        address.host,
        address.port,
        count,
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    return dist.PrefixStore(address.name, store)  # type: ignore[attr-defined]


@contextmanager
def network_of(address: Address) -> Iterator[None]:
    """Let learners that are about to connect listen on the loopback interface, on one machine."""
    if address.host:
        yield  # that of the host name, or of the variables
        return
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)  # read at the first exchange, once
    before = os.environ.get(GLOO_NETWORK)
    os.environ[GLOO_NETWORK] = loopback
    try:
        yield
    finally:
        if before is None:
            del os.environ[GLOO_NETWORK]
        else:
            os.environ[GLOO_NETWORK] = before


def gpu_of(device: torch.device) -> str | None:
    """What tells the GPU of a learner from all others, on whatever machine; None: it has none."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def join(
    address: Address,
    rank: int,
    count: int,
    timeout_s: float,
    gpu: torch.device | None,
    listener: int | None = None,
) -> bool:
    """Connect with the other learners; whether they came.

    Args:
        address: Where they meet.
        rank: Number of this learner.
        count: Number of learners.
        timeout_s: Seconds that an exchange may take.
        gpu: Where this learner lives, if each has a GPU of its own, as NCCL needs it; else None.
        listener: That of the `MeetingPlace`, for the first learner.
    """
    if gpu is not None:
        torch.cuda.set_device(gpu)
        # An exchange that fails raises an error here, too, instead of ending the process.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    try:
        with network_of(address):
            dist.init_process_group(
                "gloo" if gpu is None else "nccl",
                store=open_store(address, count, timeout_s, listener),
                rank=rank,
                world_size=count,
                timeout=timedelta(seconds=timeout_s),
            )
    except RuntimeError:
        return False
    return True


def leave() -> None:
    """End the connection with other learners, which notice it; again does nothing."""
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()


def copy_maker(
    learner: Learner[Any, Any, Any], rank: int
) -> Portable[Callable[[], Learner[Any, Any, Any]]]:
    """A function that makes a learner like this one in another process, but for its state.

    Args:
        learner: The first learner.
        rank: Number of the other one, on which its GPU depends.
    """
    args, kwargs = deepcopy(learner.made_from)
    make = partial(type(learner), *args, **kwargs)
    if learner.device.type == "cuda":
        make = partial(_on_gpu, make, (learner.device.index or 0) + rank)
    return Portable(make, "algorithm")


def _on_gpu(make: Callable[..., Any], number: int) -> Any:
    """A learner on one of the GPUs that this process sees, which lives on whatever machine.

    Raises:
        ConfigError: If it sees none.
    """
    count = torch.cuda.device_count()
    if not count:
        raise ConfigError(
            "runner.gpus_per_learner",
            "a learner is to use a GPU, and lives where there is none; expected 1 (or a part of "
            "one), so that it lives where one is reserved for it, or algorithm.device=cpu",
        )
    return make(device=f"cuda:{number % count}")
