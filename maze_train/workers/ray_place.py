"""Settings of workers that live in the actors of a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from maze_train.checks import check_at_least, check_one_of, check_positive
from maze_train.targets import locate
from maze_train.workers.remote import RemotePlace, available_cores

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from maze_train.workers.pool import MakeWorker, WorkerPool


PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

RAY_POOL = "maze_train.workers.ray_pool.RayPool"
SESSION_FOR = "maze_train.workers.ray_session.session_for"
"""Found when they are asked for: settings start nothing."""


@dataclass(frozen=True)
class RayPlace(RemotePlace):
    """Actors of a Ray cluster; see `RayPool`.

    Raises:
        ConfigError: If a setting is out of its range.
    """

    address: str = "auto"
    """`local`: Ray is started on this machine, and ends with the last pool; `auto`, or
    `<head>:<port>`: a cluster that runs, and with `auto` `local` where there is none."""

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

    has_learners: bool = False
    """Whether the workers are learners, for whom room is reserved besides."""

    section: str = "runner"
    """Section of the settings that give these, for messages."""

    remedy: str = "runner.n_workers, runner.cpus_per_worker or runner.placement=PACK"
    """What to change where there is no room."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("placement", self.placement, PLACEMENTS)
        for name in ("cpus_per_worker", "cpus_per_learner"):
            check_positive(name, getattr(self, name))
        for name in ("gpus_per_worker", "gpus_per_learner"):
            check_at_least(name, getattr(self, name), 0.0)

    def _num_cores(self) -> int:
        """So many workers as there is room for."""
        if self.address == "local":
            return available_cores()
        free: float = locate(SESSION_FOR)(self).free_cpus(self)
        return max(1, int(free / self.cpus_per_worker))

    @property
    def has_own_gpus(self) -> bool:
        """Whether a whole GPU is reserved for each worker."""
        return self.gpus_per_worker >= 1

    def pool(
        self, make_workers: Sequence[MakeWorker], names: Sequence[str], calls: Mapping[str, str]
    ) -> WorkerPool:
        """A pool of workers in actors."""
        pool: WorkerPool = locate(RAY_POOL)(make_workers, names, calls, self)
        return pool

    def for_learners(self) -> RayPlace:
        """The same cluster, with the CPUs and GPUs of learners."""
        return replace(
            self,
            cpus_per_worker=self.cpus_per_learner,
            gpus_per_worker=self.gpus_per_learner,
            has_learners=True,
        )
