"""Settings of a Ray cluster, and the connection of this process with it."""

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
from typing import Any

from maze_train.core.checks import check_at_least, check_one_of, check_positive
from maze_train.core.errors import ConfigError, WorkerError
from maze_train.core.notices import notify
from maze_train.core.targets import import_extra
from maze_train.workers.places import RemotePlace, available_cores
from maze_train.workers.pool import LOOPBACK

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray warns of a change to come without it.
    "RAY_worker_niceness": "0",  # Workers would wait for the learner, which waits for them.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",  # Then Ray ends this process, with no word.
}
"""Environment of Ray, where the user's does not say otherwise: nothing is reported to anybody."""

LOOK_S, HEAD_PATIENCE_S = 2.0, 20.0
"""Seconds between two looks at the head of a cluster, and without it until it counts as lost."""

ANSWER_S = 2.0
"""Seconds that the head may take to answer."""

PATIENCE_S = 5.0
"""Seconds after which a message says that workers wait for room."""


class RaySession:
    """A connection with Ray.

    It begins where it is first needed, and ends with the last pool.

    Attributes:
        ray: The module, while there is a connection.
        is_local: Whether Ray runs on this machine alone.
        host: Address of this machine, as workers reach it.
    """

    def __init__(self) -> None:
        self.ray: Any = None
        self.is_local = False
        self.host = LOOPBACK
        self._users = 0
        self._is_own = False
        self._head = ""
        self._lost_since, self._next_look = math.inf, 0.0

    def connect(self, place: RaySettings) -> None:
        """Connect, unless that was done.

        Args:
            place: Settings of the connection.

        Raises:
            ConfigError: If there is no such cluster.
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
        self.is_local = place.address == "local"
        if self._is_own:
            with sigterm_kept():
                self._start(ray, place)
        self.ray = ray
        self._head = ray.get_runtime_context().gcs_address
        is_here = self._is_own and self.is_local
        self.host = LOOPBACK if is_here else ray.util.get_node_ip_address()

    def _start(self, ray: Any, place: RaySettings) -> None:
        settings: dict[str, Any] = {
            "log_to_driver": place.worker_output,
            "logging_level": logging.WARNING if place.worker_output else logging.CRITICAL,
        }
        if place.working_dir is not None:
            settings["runtime_env"] = {"working_dir": place.working_dir}
        try:
            address = find_cluster(ray, place.address)
            context = ray.init(address=address, **settings)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"{place.section}.address",
                f"cannot connect to Ray ({str(error).splitlines()[0]}): expected local, which "
                "starts Ray on this machine, or the address of a cluster that runs (auto: that of "
                "this machine, or of RAY_ADDRESS); if that has a token, it is needed in "
                "~/.ray/auth_token",
                place.address,
            ) from error
        self.is_local = address == "local"
        resources = ray.cluster_resources()
        count = len([node for node in ray.nodes() if node["Alive"]])
        machines = f"{count} machine{'s' * (count > 1)}, {resources.get('CPU', 0):g} CPUs"
        if address != place.address == "auto" and self.is_local:
            machines = f"no cluster runs, so Ray was started on this machine: {machines}"
        dashboard = f"; dashboard: http://{context.dashboard_url}" if context.dashboard_url else ""
        logs = context.address_info["session_dir"]
        notify(f"ray: {machines}{dashboard}; logs of workers: {logs}/logs")

    def check_head(self) -> None:
        """Look from time to time whether the head of the cluster answers.

        Raises:
            WorkerError: If it has not for a while.
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
        """Message for a head that does not answer."""
        where = f"the head of the Ray cluster ({self._head})"
        return f"{where} is lost; start Ray again, and continue the run"

    def answers(self) -> bool:
        """Whether the head of the cluster answers; else Ray would wait for it for minutes."""
        try:
            look_for(self._head)
        except OSError:
            return False
        return True

    def acquire(self, place: RaySettings) -> RaySession:
        """The connection for a pool, which releases it."""
        self.connect(place)
        self._users += 1
        return self

    def release(self) -> None:
        """Note that a pool is closed; the last one ends the connection, and a Ray of our own."""
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

    def free_cpus(self, place: RaySettings) -> float:
        """CPUs for workers of a place: those that they have, and those that no one has."""
        if self.is_local:
            return available_cores() * place.cpus_per_worker  # nothing is reserved
        own = len(self._groups.get(place, ())) * place.cpus_per_worker
        return own + float(self.ray.available_resources().get("CPU", 0.0))

    def options(self, place: RaySettings, count: int, pool: object) -> list[dict[str, Any]]:
        """Options of the actors of a pool, which say where they live.

        The first workers of all pools of a place share what was reserved for one: environments of
        training and of evaluation do not work at the same time. A Ray of our own on one machine has
        nothing to reserve.

        Raises:
            WorkerError: If the cluster has no room, or its head is lost.
        """
        common = {"num_cpus": 0, "num_gpus": place.gpus_per_worker}
        if self.is_local:
            return [common] * count
        found = self._groups.setdefault((place, id(pool)) if place.gpus_per_worker else place, [])
        if len(found) < count:
            group = self._reserve(place, count - len(found))
            for bundle in range(count - len(found)):
                strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=bundle
                )
                found.append({**common, "scheduling_strategy": strategy})
        return found[:count]

    def _reserve(self, place: RaySettings, count: int) -> Any:
        """A placement group with the CPUs and GPUs of that many workers."""
        bundle = {"CPU": place.cpus_per_worker, "GPU": place.gpus_per_worker}
        bundle = {name: amount for name, amount in bundle.items() if amount}
        try:
            group = self.ray.util.placement_group([bundle] * count, strategy=place.placement)
        except self.ray.exceptions.GetTimeoutError as error:
            raise WorkerError(self.head_lost) from error
        self._reserved.append(group)
        asked = f"{count} x {bundle} ({place.placement})"
        ready, deadline = group.ready(), time.monotonic() + place.timeout_s
        if self.ray.wait([ready], timeout=min(PATIENCE_S, place.timeout_s))[0]:
            return group
        notify(f"ray: waiting for room for {asked}; {self._room()}")
        if not self.ray.wait([ready], timeout=max(0.0, deadline - time.monotonic()))[0]:
            raise WorkerError(
                f"the cluster has no room for {asked} within worker_timeout_s = "
                f"{place.timeout_s:g} seconds; {self._room()}: ask for less with "
                f"{place.remedy}, or add machines"
            )
        return group

    def _room(self) -> str:
        free, all_ = self.ray.available_resources(), self.ray.cluster_resources()
        told = [f"{free.get(k, 0):g} of {all_.get(k, 0):g} {k}s" for k in ("CPU", "GPU")]
        return f"{told[0]} and {told[1]} are free"


def find_cluster(ray: Any, address: str) -> str:
    """The address of a cluster that answers; `local` where Ray is to be started on this machine.

    Args:
        ray: The module.
        address: See `RaySettings`.

    Raises:
        OSError: If one that is named does not answer; Ray would try it for minutes.
        ValueError: If it is not an address.
    """
    services = ray._private.services
    if address != "auto" or os.environ.get("RAY_ADDRESS"):
        named = services.canonicalize_bootstrap_address(address)
        if named is not None:
            look_for(named)
        return named or "local"
    # What `ray start` wrote down. Ray's own search would also take what another program started
    # for itself, which has another token and ends with that program.
    started = services.find_bootstrap_address(None)
    try:
        if started is not None:
            look_for(started)
    except OSError:
        return "local"  # It has ended since.
    return started or "local"


PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True)
class RaySettings(RemotePlace):
    """Resources that the actors of a Ray cluster need, and their purpose.

    Raises:
        ConfigError: If a setting is out of its range.
    """

    address: str = "auto"
    """`local`: Ray is started on this machine, and ends with the last pool; `auto`, or
    `<head>:<port>`: a cluster that runs. `auto` without one is `local`."""

    cpus_per_worker: float = 1.0
    """CPUs that are reserved for a worker, > 0."""

    gpus_per_worker: float = 0.0
    """GPUs, or a part of one, >= 0."""

    cpus_per_learner: float = 1.0
    """CPUs that are reserved for each learner but the first, > 0."""

    gpus_per_learner: float = 0.0
    """GPUs, >= 0."""

    placement: str = "PACK"
    """How workers are spread over the machines, as Ray names it: one of `PLACEMENTS`."""

    working_dir: str | None = None
    """Folder that is sent to all machines, from where workers import."""

    worker_output: bool = False
    """Whether what workers print goes to the console."""

    section: str = "runner"
    """Section of the settings that give these, for messages."""

    remedy: str = "runner.n_workers, runner.cpus_per_worker or runner.placement=PACK"
    """Settings to change where there is no room."""

    session: RaySession = field(default_factory=RaySession, repr=False, compare=False)
    """The connection, which places that are made of this one share."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("placement", self.placement, PLACEMENTS)
        check_positive("cpus_per_worker", self.cpus_per_worker)
        check_positive("cpus_per_learner", self.cpus_per_learner)
        check_at_least("gpus_per_worker", self.gpus_per_worker, 0.0)
        check_at_least("gpus_per_learner", self.gpus_per_learner, 0.0)


def look_for(address: str) -> None:
    """Look whether someone answers at `<host>:<port>`.

    Raises:
        OSError: If no one does.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), ANSWER_S):
        pass


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Undo what Ray does to the handler of SIGTERM: a run saves, and ends in good order."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is not before:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def ctrl_c_waits(what: str) -> Iterator[None]:
    """Let Ctrl-C wait for the end of what would leave processes behind.

    Args:
        what: Name of it in the message.
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
