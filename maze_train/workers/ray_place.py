"""Settings of workers that live in the actors of a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass

from maze_train.checks import check_at_least, check_one_of, check_positive
from maze_train.workers.remote import RemotePlace

PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True)
class RaySettings(RemotePlace):
    """What the actors of a Ray cluster need, and who they are for.

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
