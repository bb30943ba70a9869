"""The connection of this process with Ray, which lasts as long as pools use it."""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from maze_train.errors import ConfigError, WorkerError
from maze_train.extras import import_extra
from maze_train.notices import tell

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maze_train.workers.ray_place import RaySettings


RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray warns of a change to come without it.
    "RAY_worker_niceness": "0",  # Workers would wait for the learner, which waits for them.
}
"""Environment of Ray, where the user's does not say otherwise: nothing is reported to anybody."""

PATIENCE_S = 5.0
"""Seconds after which it is told that workers wait for room."""


class RaySession:
    """A connection with Ray.

    Args:
        place: Settings of the first pool.
    """

    def __init__(self, place: RaySettings) -> None:
        for key, value in RAY_ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        self.ray = import_extra("ray", "ray", "runner=ray")
        self.users = 0
        self._groups: dict[Any, list[dict[str, Any]]] = {}
        self._reserved: list[Any] = []
        self._is_own = not self.ray.is_initialized()
        if self._is_own:
            with sigterm_kept():
                self._connect(place)
        self.host: str = self.ray.util.get_node_ip_address()

    def _connect(self, place: RaySettings) -> None:
        settings: dict[str, Any] = {
            "address": place.address,
            "log_to_driver": place.worker_output,
            "logging_level": logging.WARNING if place.worker_output else logging.CRITICAL,
        }
        if place.working_dir is not None:
            settings["runtime_env"] = {"working_dir": place.working_dir}
        try:
            context = self.ray.init(**settings)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"{place.section}.address",
                f"can not connect to Ray ({str(error).splitlines()[0]}): expected local, which "
                "starts Ray on this machine, or the address of a cluster that runs (auto: that of "
                "this machine, or of RAY_ADDRESS); if that has a token, it is needed in "
                "~/.ray/auth_token",
                place.address,
            ) from error
        resources = self.ray.cluster_resources()
        count = len([node for node in self.ray.nodes() if node["Alive"]])
        machines = f"{count} machine{'s' * (count > 1)}, {resources.get('CPU', 0):g} CPUs"
        dashboard = f"; dashboard: http://{context.dashboard_url}" if context.dashboard_url else ""
        logs = context.address_info["session_dir"]
        tell(f"ray: {machines}{dashboard}; logs of workers: {logs}/logs")

    def release(self) -> None:
        """Note that a pool is closed; the last one ends the connection, and a Ray of our own."""
        global _session
        self.users -= 1
        if self.users:
            return
        _session = None
        if not self.ray.is_initialized():
            return
        for group in self._reserved:
            self.ray.util.remove_placement_group(group)
        if self._is_own:
            self.ray.shutdown()

    def free_cpus(self, place: RaySettings) -> float:
        """CPUs for workers of a place: those that they have, and those that nobody has."""
        own = len(self._groups.get(place, ())) * place.cpus_per_worker
        return own + float(self.ray.available_resources().get("CPU", 0.0))

    def options(self, place: RaySettings, count: int, pool: object) -> list[dict[str, Any]]:
        """Options of the actors of a pool, which say where they live.

        The first workers of all pools of a place share what was reserved for one: environments of
        training and of evaluation do not work at the same time. A Ray of our own on one machine has
        nothing to reserve.

        Raises:
            WorkerError: If the cluster has no room.
        """
        common = {"num_cpus": 0, "num_gpus": place.gpus_per_worker}
        if place.address == "local":
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
        """A placement group with the CPUs and GPUs of so many workers."""
        bundle = {"CPU": place.cpus_per_worker, "GPU": place.gpus_per_worker}
        bundle = {name: amount for name, amount in bundle.items() if amount}
        group = self.ray.util.placement_group([bundle] * count, strategy=place.placement)
        self._reserved.append(group)
        asked = f"{count} x {bundle} ({place.placement})"
        ready, deadline = group.ready(), time.monotonic() + place.timeout_s
        if self.ray.wait([ready], timeout=min(PATIENCE_S, place.timeout_s))[0]:
            return group
        tell(f"ray: waiting for room for {asked}; {self._room()}")
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


_session: RaySession | None = None


def session_for(place: RaySettings) -> RaySession:
    """The connection of this process, which is made if there is none."""
    global _session
    if _session is None:
        _session = RaySession(place)
    return _session


def acquire(place: RaySettings) -> RaySession:
    """The connection of this process for a pool, which releases it."""
    session = session_for(place)
    session.users += 1
    return session


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Undo what Ray does to the handler of SIGTERM: a run saves, and ends in good order."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is not before:
            signal.signal(signal.SIGTERM, before)
