"""Settings of a Ray cluster, and the connection to the cluster."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from maze_train.core.checks import check_at_least, check_one_of, check_positive
from maze_train.core.errors import ConfigError, WorkerError
from maze_train.core.notices import notify
from maze_train.core.targets import import_extra
from maze_train.workers.backends import RemoteBackend, available_cores
from maze_train.workers.pool import LOOPBACK

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Avoids a deprecation warning.
    "RAY_worker_niceness": "0",  # Same priority as the learner, which waits for the workers.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",  # Ray exits without a message after this time.
}
"""Defaults for environment variables of Ray; usage statistics are disabled."""

LOOK_S, HEAD_PATIENCE_S = 2.0, 20.0
"""Interval between checks of the cluster head, and time until it counts as lost, in seconds."""

ANSWER_S = 2.0
"""Time limit for the head to answer, in seconds."""

PATIENCE_S = 5.0
"""Time in seconds until a message reports that workers are waiting for resources."""


class RaySession:
    """Connection to Ray, opened on first use and closed with the last pool.

    Attributes:
        ray: The module `ray` while connected, otherwise None.
        is_local: Whether Ray runs only on this machine.
        host: Address of this machine for workers.
    """

    def __init__(self) -> None:
        self.ray: Any = None
        self.is_local = False
        self.host = LOOPBACK
        self._users = 0
        self._is_own = False
        self._head = ""
        self._lost_since, self._next_look = math.inf, 0.0

    def connect(self, backend: RaySettings) -> None:
        """Connect to Ray. Connecting again has no effect.

        Args:
            backend: Settings of the connection.

        Raises:
            ConfigError: If the cluster cannot be reached.
            MissingExtraError: If Ray is not installed.
        """
        if self.ray is not None:
            return
        for key, value in RAY_ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        ray = import_extra("ray", "ray", "runner=ray")
        self._groups: dict[Any, list[dict[str, Any]]] = {}
        self._reserved: list[Any] = []
        self._is_own = not ray.is_initialized()
        self.is_local = backend.address == "local"
        if self._is_own:
            with sigterm_kept():
                self._start(ray, backend)
        self.ray = ray
        self._head = ray.get_runtime_context().gcs_address
        is_here = self._is_own and self.is_local
        self.host = LOOPBACK if is_here else ray.util.get_node_ip_address()

    def _start(self, ray: ModuleType, backend: RaySettings) -> None:
        settings: dict[str, Any] = {
            "log_to_driver": backend.worker_output,
            "logging_level": logging.WARNING if backend.worker_output else logging.CRITICAL,
        }
        if backend.working_dir is not None:
            settings["runtime_env"] = {"working_dir": backend.working_dir}
        try:
            address = find_cluster(ray, backend.address)
            context = ray.init(address=address, **settings)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"{backend.section}.address",
                f"cannot connect to Ray ({str(error).splitlines()[0]}): expected local, to "
                "start Ray on this machine, or the address of a running cluster (auto: RAY_ADDRESS "
                "or a cluster on this machine); if the cluster uses a token, copy the token to "
                "~/.ray/auth_token and set RAY_AUTH_MODE=token",
                backend.address,
            ) from error
        self.is_local = address == "local"
        resources = ray.cluster_resources()
        count = len([node for node in ray.nodes() if node["Alive"]])
        machines = f"{count} machine{'s' * (count > 1)}, {resources.get('CPU', 0):g} CPUs"
        if address != backend.address == "auto" and self.is_local:
            machines = f"no running cluster, started Ray on this machine: {machines}"
        dashboard = f"; dashboard: http://{context.dashboard_url}" if context.dashboard_url else ""
        logs = context.address_info["session_dir"]
        notify(f"ray: {machines}{dashboard}; logs of workers: {logs}/logs")

    def check_head(self) -> None:
        """Check whether the head of the cluster answers; at most once per `LOOK_S` seconds.

        Raises:
            WorkerError: If the head has not answered for `HEAD_PATIENCE_S` seconds.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._lost_since = math.inf if self.answers() else min(self._lost_since, now)
        self._next_look = time.monotonic() + LOOK_S
        if self._next_look - self._lost_since >= HEAD_PATIENCE_S:
            raise WorkerError(self.head_lost)

    @property
    def head_lost(self) -> str:
        """Error message for a lost head."""
        where = f"the head of the Ray cluster ({self._head})"
        return f"{where} is lost; restart Ray, and resume the run"

    def answers(self) -> bool:
        """Whether the head answers at once; Ray's own requests would retry for minutes."""
        try:
            look_for(self._head)
        except OSError:
            return False
        return True

    def acquire(self, backend: RaySettings) -> RaySession:
        """Connect for a pool. The pool must call `release`."""
        self.connect(backend)
        self._users += 1
        return self

    def release(self) -> None:
        """Release the connection. The last pool disconnects, and stops a local Ray instance."""
        self._users -= 1
        if self._users:
            return
        ray, self.ray = self.ray, None
        if not ray.is_initialized():
            return
        for group in self._reserved if self.answers() else ():
            ray.util.remove_placement_group(group)
        if self._is_own:
            with ctrl_c_waits("ending Ray"):
                ray.shutdown()

    def free_cpus(self, backend: RaySettings) -> float:
        """Return the number of CPUs for workers of a backend: reserved and free CPUs."""
        if self.is_local:
            return available_cores() * backend.cpus_per_worker  # A local Ray reserves no CPUs.
        own = len(self._groups.get(backend, ())) * backend.cpus_per_worker
        return own + float(self.ray.available_resources().get("CPU", 0.0))

    def options(self, backend: RaySettings, count: int, pool: object) -> list[dict[str, Any]]:
        """Return the resources and placement of the actors of a pool.

        All pools of a backend share one reservation, because training and evaluation environments
        do not run at the same time. A local Ray instance needs no reservation.

        Raises:
            WorkerError: If the cluster does not have the resources, or the head is lost.
        """
        common = {"num_cpus": 0, "num_gpus": backend.gpus_per_worker}
        if self.is_local:
            return [common] * count
        found = self._groups.setdefault(
            (backend, id(pool)) if backend.gpus_per_worker else backend, []
        )
        if len(found) < count:
            group = self._reserve(backend, count - len(found))
            for bundle in range(count - len(found)):
                strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=bundle
                )
                found.append({**common, "scheduling_strategy": strategy})
        return found[:count]

    def _reserve(self, backend: RaySettings, count: int) -> object:
        """Reserve a placement group with the CPUs and GPUs of `count` workers."""
        bundle = {"CPU": backend.cpus_per_worker, "GPU": backend.gpus_per_worker}
        bundle = {name: amount for name, amount in bundle.items() if amount}
        try:
            group = self.ray.util.placement_group([bundle] * count, strategy=backend.placement)
        except self.ray.exceptions.GetTimeoutError as error:
            raise WorkerError(self.head_lost) from error
        self._reserved.append(group)
        asked = f"{count} x {bundle} ({backend.placement})"
        ready, deadline = group.ready(), time.monotonic() + backend.timeout_s
        if self.ray.wait([ready], timeout=min(PATIENCE_S, backend.timeout_s))[0]:
            return group
        notify(f"ray: waiting for resources for {asked}; {self.room()}")
        if not self.ray.wait([ready], timeout=max(0.0, deadline - time.monotonic()))[0]:
            raise WorkerError(
                f"the cluster has no resources for {asked} within worker_timeout_s = "
                f"{backend.timeout_s:g} seconds; {self.room()}: reduce the request with "
                f"{backend.remedy}, or add machines"
            )
        return group

    def is_reserved(self, options: dict[str, Any]) -> bool:
        """Return whether the resources of an actor are reserved, or need no reservation.

        They are not while the reservation waits for a replacement of a lost machine.
        """
        strategy = options.get("scheduling_strategy")
        if strategy is None:
            return True
        table = self.ray.util.placement_group_table(strategy.placement_group)
        return str(table["state"]) == "CREATED"

    def room(self) -> str:
        """Return the free and total resources of the cluster, for messages."""
        free, all_ = self.ray.available_resources(), self.ray.cluster_resources()
        told = [f"{free.get(k, 0):g} of {all_.get(k, 0):g} {k}s" for k in ("CPU", "GPU")]
        return f"{told[0]} and {told[1]} are free"


def find_cluster(ray: ModuleType, address: str) -> str:
    """Return the address of a running cluster; `local` to start Ray on this machine.

    Args:
        ray: The module.
        address: See `RaySettings`.

    Raises:
        OSError: If the cluster at `address` does not answer; Ray itself would retry for minutes.
        ValueError: If the address is malformed.
    """
    services = ray._private.services
    if address != "auto" or os.environ.get("RAY_ADDRESS"):
        named = services.canonicalize_bootstrap_address(address)
        if named is not None:
            look_for(named)
        return named or "local"
    # Only clusters started with `ray start` are considered. Ray's search would also find private
    # instances of other programs, which use a different token and end with these programs.
    started = services.find_bootstrap_address(None)
    try:
        if started is not None:
            look_for(started)
    except OSError:
        return "local"  # The cluster has been stopped.
    return started or "local"


PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True)
class RaySettings(RemoteBackend):
    """Address and resources of a Ray cluster.

    Raises:
        ConfigError: If a setting is out of range.
    """

    address: str = "auto"
    """`local` starts Ray on this machine and stops Ray when the last pool closes. `auto` or
    `<head>:<port>` connects to a running cluster. Without a running cluster, `auto` is the same as
    `local`."""

    cpus_per_worker: float = 1.0
    """CPUs reserved for each worker (> 0)."""

    gpus_per_worker: float = 0.0
    """GPUs reserved for each worker (>= 0); may be a fraction."""

    cpus_per_learner: float = 1.0
    """CPUs reserved for each learner except the first (> 0)."""

    gpus_per_learner: float = 0.0
    """GPUs reserved for each learner except the first (>= 0)."""

    placement: str = "PACK"
    """Ray placement strategy of the workers: one of `PLACEMENTS`."""

    working_dir: str | None = None
    """Folder with modules to send to all machines."""

    worker_output: bool = False
    """Whether to print the output of workers to the console."""

    section: str = "runner"
    """Section of these settings in the configuration, for messages."""

    remedy: str = "runner.n_workers, runner.cpus_per_worker or runner.placement=PACK"
    """Settings to change if resources are insufficient, for messages."""

    session: RaySession = field(default_factory=RaySession, repr=False, compare=False)
    """Connection to Ray, shared by copies of these settings."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("placement", self.placement, PLACEMENTS)
        check_positive("cpus_per_worker", self.cpus_per_worker)
        check_positive("cpus_per_learner", self.cpus_per_learner)
        check_at_least("gpus_per_worker", self.gpus_per_worker, 0.0)
        check_at_least("gpus_per_learner", self.gpus_per_learner, 0.0)


def look_for(address: str) -> None:
    """Check whether a server answers at `<host>:<port>`.

    Raises:
        OSError: If there is no answer.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), ANSWER_S):
        pass


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Restore the SIGTERM handler after Ray has replaced it, so that a run can save before exit."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is not before:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def ctrl_c_waits(what: str) -> Iterator[None]:
    """Delay Ctrl-C until the end of the block, so that all processes are stopped.

    Args:
        what: Description of the block for the message.
    """
    before = signal.getsignal(signal.SIGINT)
    noted: list[int] = []

    def note(number: int, frame: object) -> None:
        if not noted:
            notify(f"SIGINT: {what} first")
        noted.append(number)

    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if noted:
            before(signal.SIGINT, None)
