"""Training of one policy by several processes of torchrun."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from maze_train.core.errors import ConfigError
from maze_train.core.torchrun import LAUNCHED, TorchrunVariables
from maze_train.learner.process_group import GLOO_NETWORK, leave, start_group
from maze_train.learner.ranks import GroupRanks, RanksLostError

CONNECT_S, MEET_S = 10.0, 600.0
"""Maximum time in seconds to reach the store of torchrun, and to wait for the other processes."""

EXCHANGE_S = 7200.0
"""Maximum duration of an exchange in seconds. Processes wait while the first process evaluates or
writes files. If a process ends, its connections close, and the other processes end at once."""


class TorchrunRanks(GroupRanks):
    """Processes of torchrun, each with one learner and a subset of the environments.

    All processes have identical learners, replay buffers and counters. Experience and statistics
    are exchanged, so every process learns from the experience of all environments, and gradients
    are summed. Only environments and global random number generators differ.

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
        super().__init__(variables.rank, variables.count)
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
            raise RanksLostError(
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

    def started(self, run_dir: str) -> None:
        """Store the directory of the run for a restart."""
        self._store.set(self._dir_key, run_dir)


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
