"""Training of one policy by several processes of torchrun."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from maze_train.core.errors import ConfigError, TrainingError
from maze_train.core.events import Statistics
from maze_train.core.torchrun import LAUNCHED, TorchrunVariables
from maze_train.core.types import Tensor
from maze_train.learner.config import LearnerGroupConfig
from maze_train.learner.learner import Learner
from maze_train.learner.learners import Learners
from maze_train.learner.parallel import RANKS, SAME_COMMAND, SingleProcess
from maze_train.learner.peers import check_modules
from maze_train.learner.process_group import GLOO_NETWORK, leave, start_group
from maze_train.learner.shard import Shard
from maze_train.workers.backends import WorkerBackend

T = TypeVar("T")

CONNECT_S, MEET_S = 10.0, 600.0
"""Maximum time in seconds to reach the store of torchrun, and to wait for the other processes."""

EXCHANGE_S = 7200.0
"""Maximum duration of an exchange in seconds. Processes wait while the first process evaluates or
writes files. If a process ends, its connections close, and the other processes end at once."""

LOST = f"another process of the run ended, or did not answer within {EXCHANGE_S / 3600:g} hours"


class StopTogether(Exception):  # noqa: N818 (a message, not an error)
    """Carries an exception of the first process to the other processes.

    Args:
        error: The exception to raise in every process.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class ProcessesLostError(TrainingError):
    """Raised if another process of the run has ended."""


class TorchrunProcesses(SingleProcess):
    """Processes of torchrun, each with one learner and a subset of the environments.

    All processes have identical learners, replay buffers and counters. Experience and statistics
    are exchanged, so every process learns from the experience of all environments, and `Shard`
    sums the weighted gradients. Only environments and global random number generators differ.

    Args:
        variables: Environment variables set by torchrun.

    Raises:
        ConfigError: If torchrun cannot be reached, another process has the same rank, or a process
            does not start a run.
    """

    is_shared = True

    def __init__(self, variables: TorchrunVariables) -> None:
        leave()  # Leave the group of an earlier run that failed.
        self.variables = variables
        self.rank, self.count = variables.rank, variables.count
        self.local_count = variables.local_count
        store = _store(variables)
        attempt, rank = f"maze_train/{variables.attempt}", self.rank
        me = f"{socket.gethostname()}:{os.getpid()}"
        if (holder := store.compare_set(f"{attempt}/{rank}", "", me).decode()) != me:
            raise ConfigError(
                "RANK",
                f"process {holder} has this rank, and this process only inherited the variables of "
                f"torchrun: unset {LAUNCHED} to train in one process",
                rank,
            )
        self._store, number = store, store.add(f"{attempt}/runs/{rank}", 1)
        self._dir_key = _dir_key(number)
        run = f"{attempt}/{number}"
        store.set(f"{run}/{rank}", me)
        if missing := _absent(store, [f"{run}/{other}" for other in range(self.count)]):
            problem = f"did not start a run within {MEET_S:g} s; every process must start it"
            raise ConfigError("RANK", problem, missing)
        # NCCL (which connects on first use) exchanges CUDA tensors, gloo all other tensors.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        host = "" if variables.local_count == self.count else variables.host
        group = dist.PrefixStore(run, store)  # type: ignore[attr-defined]  # not in its list
        try:
            start_group(backend, group, rank, self.count, EXCHANGE_S, host)
        except RuntimeError as error:
            raise ProcessesLostError(
                f"the processes could not connect ({error}): if all of them run, select a network "
                f"that reaches all machines with {GLOO_NETWORK} and NCCL_SOCKET_IFNAME"
            ) from error

    def __str__(self) -> str:
        """Return a description for the console."""
        kinds = "NCCL on GPUs, gloo otherwise" if torch.cuda.is_available() else "gloo"
        hosts = self.count // self.local_count
        machines = f" on {hosts} machines" if hosts > 1 else ""
        learners = "1 learner" if self.count == 1 else f"{self.count} learners"
        return f"torchrun: {learners}{machines}, one per process ({kinds})"

    def device(self, name: str, key: str) -> str:
        """Return the device of this process: the GPU of its local rank.

        Args:
            name: Name of the device.
            key: Name of the setting for error messages.

        Raises:
            ConfigError: If processes would share a GPU.
        """
        processes = self.local_count
        if name.startswith("cuda:") and processes > 1:
            problem = f"{processes} processes cannot share a GPU; expected cuda, or cpu"
            raise ConfigError(key, problem, name)
        if name not in ("auto", "cuda") or not torch.cuda.is_available():
            return name
        number, found = self.variables.local_rank, torch.cuda.device_count()
        if number >= found:
            problem = f"{processes} processes need a GPU each, but this machine has only {found}; "
            problem += f"use --nproc-per-node {found}, or {key}=cpu"
            raise ConfigError(key, problem, name)
        torch.cuda.set_device(number)
        return f"cuda:{number}"

    def first(self, function: Callable[[], T]) -> T:
        """Call a function in the first process and return the result in all processes.

        If the function raises `StopTogether`, the contained error is raised in every process.
        """
        outcome: list[Any] = [None, None]
        if self.is_first:
            try:
                outcome[0] = function()
            except StopTogether as stop:
                outcome[1] = stop.error
        self._exchange(dist.broadcast_object_list, outcome, 0)
        if outcome[1] is not None:
            raise outcome[1]
        result: T = outcome[0]
        return result

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes; every process must call this method."""
        values: list[Any] = [None] * self.count
        self._exchange(dist.all_gather_object, values, value)
        return values

    def gather_tensor(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, which must have the same shape."""
        if not tensor.numel():
            return [tensor] * self.count
        # Collective operations do not support all dtypes, so the tensor is sent as bytes.
        own = tensor.contiguous().view(torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.count)]
        self._exchange(dist.all_gather, found, own)
        return [each.view(tensor.dtype) for each in found]

    def sum(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by the sum of the tensors of all processes."""
        self._exchange(dist.all_reduce, tensor)
        return tensor

    def largest(self, number: int) -> int:
        """Return the largest number of all processes; every process must call this method."""
        found = torch.tensor([number])
        self._exchange(dist.all_reduce, found, dist.ReduceOp.MAX)
        return int(found)

    def state(self, own: T) -> T | dict[str, list[T]] | None:
        """Return the states of all processes in the first process, and None in other processes."""
        if self.count == 1:
            return own
        states: list[Any] | None = [None] * self.count if self.is_first else None
        self._exchange(dist.gather_object, own, states)
        return None if states is None else {RANKS: states}

    def check_same(self, key: str, value: object, remedy: str = SAME_COMMAND) -> None:
        """Check that a value is the same in all processes.

        Raises:
            ConfigError: If the values differ.
        """
        values = self.gather(value)
        if others := [rank for rank, other in enumerate(values) if other != values[0]]:
            raise ConfigError(key, f"differs between rank 0 and {others}; {remedy}")

    def started(self, run_dir: str) -> None:
        """Store the directory of the run for a restart."""
        self._store.set(self._dir_key, run_dir)

    def leave(self) -> None:
        """Leave the process group, which the other processes detect."""
        leave()

    def _exchange(self, call: Callable[..., object], *args: object) -> None:
        """Make a collective call.

        Raises:
            ProcessesLostError: If the exchange fails.
        """
        try:
            call(*args)
        except RuntimeError as error:
            # Subclasses such as OutOfMemoryError are errors of this process.
            if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
                raise
            raise ProcessesLostError(f"{LOST}; the exchange failed with: {error}") from error


class ProcessShard(Shard):
    """Shard of one process of torchrun; statistics are merged in every process.

    Args:
        processes: The processes.
    """

    def __init__(self, processes: SingleProcess) -> None:
        super().__init__(processes.rank, processes.count)
        self._processes = processes

    def end(self, statistics: Statistics) -> None:
        """Merge the statistics of all shards."""
        for own in self._processes.gather(self.statistics):
            statistics.merge(own)

    def _sum(self, values: Tensor) -> Tensor:
        return self._processes.sum(values)


class ProcessLearners(Learners):
    """Learner of this process, with minibatches sharded over all processes of torchrun.

    Args:
        processes: The processes.
        learner: The learner.
        settings: Settings of the learner group.
        backend: Not used; torchrun has started the processes.

    Raises:
        ConfigError: If the modules do not support several learners.
    """

    def __init__(
        self,
        processes: SingleProcess,
        learner: Learner[Any, Any, Any],
        settings: LearnerGroupConfig,
        backend: WorkerBackend,
    ) -> None:
        super().__init__(learner, settings)
        self._count = processes.count
        self.check_modules()
        learner.parallel = ProcessShard(processes)

    def check_modules(self) -> None:
        """Raise ConfigError if results would depend on the number of processes."""
        if self._count > 1:
            check_modules(self.first, self._count, "WORLD_SIZE")


def restarted_run(variables: TorchrunVariables) -> str | None:
    """Return the run directory of an earlier torchrun attempt; None in the first attempt."""
    store = _store(variables)
    number = store.add(f"maze_train/{variables.attempt}/runs/{variables.rank}", 0) + 1
    key = _dir_key(number)
    return store.get(key).decode() if store.check([key]) else None


def _dir_key(number: int) -> str:
    return f"maze_train/dir/{number}"


def _store(variables: TorchrunVariables) -> Any:
    """Return the store of torchrun.

    Raises:
        ConfigError: If torchrun cannot be reached.
    """
    host, port = variables.host, variables.port
    try:
        if variables.is_stored:  # Fail early: PyTorch retries refused connections for a long time.
            socket.create_connection((host, port), CONNECT_S).close()
        return dist.TCPStore(  # type: ignore[attr-defined]  # not in its list of names
            host,
            port,
            is_master=not variables.is_stored and variables.rank == 0,
            timeout=timedelta(seconds=MEET_S),
            multi_tenant=True,
        )
    except (OSError, RuntimeError) as error:
        problem = f"{LAUNCHED} is set, but torchrun does not answer at port {port} ({error}); unset"
        problem += f" {LAUNCHED} to train in one process, or start this process by torchrun"
        raise ConfigError("MASTER_ADDR", problem, host) from error


def _absent(store: Any, keys: list[str]) -> list[int]:
    """Wait for all keys; return the indices of the keys that were not set within `MEET_S`."""
    try:
        store.wait(keys, timedelta(seconds=MEET_S))
    except RuntimeError:
        return [i for i, key in enumerate(keys) if not store.check([key])]
    return []
