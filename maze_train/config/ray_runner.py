"""Settings of runs on a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from maze_train.checks import absolute_path, check_at_least, check_fields
from maze_train.config.train_config import RemoteRunnerConfig
from maze_train.errors import ConfigError


@dataclass(kw_only=True)
class RayRunnerConfig(RemoteRunnerConfig):
    """Workers as actors of a Ray cluster, on one machine or many; same numbers as `dev`."""

    name: ClassVar[str] = "ray"
    place_class: ClassVar[str] = "maze_train.workers.ray_pool.RayPlace"

    address: str = "auto"
    """`local`: starts Ray on this machine for the run; `<head>:<port>`: a cluster that runs;
    `auto`: that of this machine, or of RAY_ADDRESS; without one as `local`."""

    cpus_per_worker: float = 1.0
    """CPUs of the cluster that are reserved for a worker, > 0."""

    gpus_per_worker: float = 0.0
    """GPUs that are reserved for a worker, or a part of one. >= 0."""

    cpus_per_learner: float = 1.0
    """CPUs that are reserved for a learner of `learner_group`, but the first one, which is in the
    process of the run. > 0."""

    gpus_per_learner: float = 0.0
    """GPUs that are reserved for such a learner. >= 0."""

    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """How workers are placed: PACK: on few machines; SPREAD: on many; STRICT_PACK: on one;
    STRICT_SPREAD: one on each."""

    working_dir: str | None = None
    """Folder with your own modules, which is sent to all machines; null: they are installed there,
    or lie in a folder that the machines share."""

    worker_output: bool = False
    """Whether what workers print, and what Ray reports of its machines, appears on the console."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("cpus_per_worker", "cpus_per_learner"):
            check_at_least(name, getattr(self, name), 1e-3)
        check_fields(self, 0, "gpus_per_worker", "gpus_per_learner")
        if self.working_dir is not None:
            self.working_dir = absolute_path("working_dir", self.working_dir)
        if self.address.startswith("ray://"):
            raise ConfigError(
                "address",
                "a client outside of the cluster is not supported: start the run on one of its "
                "machines, or with `ray job submit`; expected auto, local or <head>:<port>",
                self.address,
            )

    @property
    def place_settings(self) -> dict[str, Any]:
        """Arguments of `RayPlace`."""
        names = ["address", "placement", "working_dir", "worker_output"]
        names += ["cpus_per_worker", "gpus_per_worker", "cpus_per_learner", "gpus_per_learner"]
        return {**super().place_settings, **{name: getattr(self, name) for name in names}}
