"""Hydra launcher that runs the jobs of a sweep in parallel, each in a process of its own."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf, open_dict

from maze_train.checks import check_at_least
from maze_train.config.job_processes import (
    FAILURE,
    LOG_FILE,
    PROGRAM,
    JobProcesses,
    ProcessJob,
    StartedJob,
)
from maze_train.config.sweep_jobs import JobRecord
from maze_train.errors import TrainingError
from maze_train.notices import say, tell
from maze_train.tracking.formatting import duration, readable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hydra.types import HydraContext, TaskFunction


LAUNCHER = "hydra_plugins.maze_train.LocalLauncher"
"""Name of the launcher for Hydra, which takes plug-ins from this namespace only."""


@dataclass
class LocalLauncherConf:
    """Settings of the launcher, `hydra.launcher.<name>`."""

    _target_: str = LAUNCHER

    n_jobs: int = 0
    """Jobs at a time; 0: one per core. >= 0."""

    gpus: list[int] = field(default_factory=list)
    """GPUs of which the jobs see one each in turn (CUDA_VISIBLE_DEVICES); none: all of them."""


def stops_at_failures(hydra_settings: Any) -> bool:
    """Whether the sweeper has to know of a failure: some count them, Hydra's own stops."""
    sweeper = str(OmegaConf.select(hydra_settings, "sweeper._target_"))
    return not sweeper.endswith(".BasicSweeper")


class LocalLauncher(Launcher):
    """Runs up to `n_jobs` jobs at a time; the others wait.

    Args:
        n_jobs: Jobs at a time; 0: one per core.
        gpus: GPUs of which the jobs see one each in turn.
    """

    def __init__(self, n_jobs: int = 0, gpus: Sequence[int] = ()) -> None:
        self._n_jobs = n_jobs
        self._gpus = list(gpus)
        self._config = DictConfig({})
        self._context: HydraContext | None = None
        self._task: Any = None

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what jobs are made from."""
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run jobs, and return what became of them in their order.

        Raises:
            ConfigError: If a setting of the launcher is wrong.
            KeyboardInterrupt: After a signal, when all jobs have ended.
        """
        check_at_least("hydra.launcher.n_jobs", self._n_jobs, 0)
        setup_globals()
        Path(str(self._config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        ended: dict[int, JobReturn] = {}

        def note(job: StartedJob) -> None:
            self._task.note(job.outcome)
            _tell_end(job)
            ended[job.outcome.number] = self._returned(job.outcome)

        jobs = (self._job(*job) for job in enumerate(job_overrides, initial_job_idx))
        self._jobs(note, len(job_overrides)).run(jobs)
        return [ended[number] for number in sorted(ended)]

    def _jobs(self, ended: Callable[[StartedJob], None], count: int) -> Any:
        """What runs so many jobs."""
        return JobProcesses(ended, self._n_jobs, self._gpus)

    def _job(self, number: int, overrides: Sequence[str]) -> ProcessJob:
        """A job with its composed configuration."""
        assert self._context is not None
        config = self._context.config_loader.load_sweep_config(self._config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        HydraConfig.instance().set_config(config)  # The name of its directory refers to the job.
        settings = " ".join(word.lstrip("+") for word in filter_overrides(overrides))
        directory = Path(str(config.hydra.sweep.dir), str(config.hydra.sweep.subdir)).absolute()
        sweep_dir = os.path.abspath(str(config.hydra.sweep.dir))
        record = JobRecord(number, settings, str(directory), sweep_dir, code=FAILURE)
        return ProcessJob(record, directory / LOG_FILE, self._work(config))

    def _work(self, config: DictConfig) -> Callable[[], JobRecord | None]:
        """What a job does in its process."""
        return partial(self._run, config)

    def _run(self, config: DictConfig) -> JobRecord | None:
        """Run a job in its process; returns its record, if it has come to one."""
        assert self._context is not None
        before = len(self._task.records)
        with suppress(SystemExit):  # of the job, which has a record then
            run_job(
                hydra_context=self._context,
                task_function=self._task,
                config=config,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )
        records: list[JobRecord] = self._task.records[before:]
        return records[-1] if records else None

    def _returned(self, record: JobRecord) -> JobReturn:
        """A job as Hydra's sweepers know it; Hydra's own would stop at a failure."""
        is_failure = bool(record.error) and stops_at_failures(self._config.hydra)
        return JobReturn(
            overrides=record.settings.split(),
            status=JobStatus.FAILED if is_failure else JobStatus.COMPLETED,
            _return_value=TrainingError(record.error) if is_failure else record.objective,
        )


def _tell_end(job: StartedJob) -> None:
    record, took = job.outcome, duration(job.seconds)
    if record.error:
        tell(f"{PROGRAM}: error: {record.label}: {record.error}\n  its output: {job.log}")
    else:
        best = f", best {readable(record.objective)}" if math.isfinite(record.objective) else ""
        say(f"{PROGRAM}: job {record.number}: done in {took}{best}")
