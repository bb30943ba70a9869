"""The start of a sweep: before its first job, all are checked and its directory is claimed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import filter_overrides, setup_globals
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from maze_train.config.messages import CONFIGURATION_ERRORS
from maze_train.config.overrides import quoted
from maze_train.config.train_config import AUTO
from maze_train.core.checks import expanded
from maze_train.core.errors import ConfigError, MazeTrainError
from maze_train.core.files import exclusive, new_directory, writable
from maze_train.core.folders import make_folders

SWEEPS = "outputs/sweeps"
SWEEP_DIR = f"{SWEEPS}/${{now:%Y-%m-%d_%H-%M-%S}}"
"""Directory of a sweep, unless the user names one."""

SWEEP_DIR_KEY = "hydra.sweep.dir"
SHOWN_PROBLEMS = 5


def stops_at_failures(hydra_settings: Any) -> bool:
    """Whether the sweeper has to know of a failure: some count them, Hydra's own stops."""
    sweeper = str(OmegaConf.select(hydra_settings, "sweeper._target_"))
    return not sweeper.endswith(".BasicSweeper")


class SweepStart(Sweeper):
    """Checks the jobs of a sweep and claims its directory, then lets a sweeper run them.

    Args:
        sweeper: The sweeper that the user chose.
        config: Configuration of the sweep, to which all of its jobs refer.
        context: Composes the configurations of jobs.
        task: Checks a job, and says how the sweep is continued: a `maze_train.jobs.Job`.
    """

    def __init__(
        self, sweeper: Sweeper, config: DictConfig, context: HydraContext, task: Any
    ) -> None:
        self._sweeper, self._config, self._context = sweeper, config, context
        self._task = task

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Do nothing: the sweeper is set up already."""

    def sweep(self, arguments: list[str]) -> Any:
        """Run the jobs.

        Raises:
            ConfigError: If a job cannot run, there is none, or the directory cannot be written.
            KeyboardInterrupt: After a signal, when all jobs have ended.
            RunDirectoryError: If another process sweeps in the directory.
        """
        is_listed = not stops_at_failures(self._config.hydra)
        if is_listed:  # the jobs of other sweepers depend on results
            self._check_jobs(arguments)
        directory = self._claimed()
        with exclusive(directory, "sweeps in"):
            try:
                return self._sweeper.sweep(arguments)
            except KeyboardInterrupt:
                if is_listed:
                    self._task.tell_how_to_continue(self._config, directory)
                raise

    def _claimed(self) -> Path:
        """Make the directory of the sweep, and let all jobs have its absolute path."""
        raw: Any = OmegaConf.to_container(self._config.hydra.sweep, resolve=False)
        if raw["dir"] == SWEEP_DIR:
            given = [OmegaConf.select(self._config, key) for key in ("resume", "run_dir")]
            if given == [AUTO, None]:
                problem = f"needs the directory of the sweep: set {SWEEP_DIR_KEY}"
                raise ConfigError("resume", problem, AUTO)
            with writable(SWEEP_DIR_KEY, Path(SWEEPS)):
                name = str(new_directory(Path(SWEEPS).absolute()))
        else:
            # Its interpolations may have another value in each job. `hydra.job.chdir` must not
            # change where it is.
            where = str(raw["dir"])
            where = os.path.expanduser(where) if "${" in where else expanded(where)
            name = str(Path.cwd() / where)
        with read_write(self._config.hydra), open_dict(self._config):
            self._config.hydra.sweep.dir = name
            self._config.hydra.overrides.hydra.append(f"{SWEEP_DIR_KEY}={quoted(name)}")
        directory = Path(str(self._config.hydra.sweep.dir))
        with writable(SWEEP_DIR_KEY, directory):
            make_folders(directory)
        return directory

    def _check_jobs(self, arguments: Sequence[str]) -> None:
        """Compose and check all jobs; nothing is written.

        Raises:
            ConfigError: If there is no job, or some cannot run; it lists them.
        """
        setup_globals()
        problems = []
        jobs = list(self._jobs(arguments))
        for number, overrides in enumerate(jobs):
            settings = " ".join(word.lstrip("+") for word in filter_overrides(overrides))
            try:
                self._task.check(job_config(self._context, self._config, number, overrides))
            except (MazeTrainError, *CONFIGURATION_ERRORS) as error:
                problems.append((f"job {number} ({settings})", error))
        HydraConfig.instance().set_config(self._config)
        if problems:
            lines = [f"\n  {label}: {self._task.message_of(error)}" for label, error in problems]
            more = len(lines) - SHOWN_PROBLEMS
            shown = "".join(lines[:SHOWN_PROBLEMS]) + (f"\n  and {more} more" if more > 0 else "")
            problem = f"{len(lines)} of {len(jobs)} jobs cannot run, so none has begun:{shown}"
            raise ConfigError("sweep", problem)

    def _jobs(self, arguments: Sequence[str]) -> Iterator[Sequence[str]]:
        """The overrides of all jobs."""
        loader, params = self._context.config_loader, self._config.hydra.sweeper.params or {}
        words = [*(f"{key}={value}" for key, value in params.items()), *arguments]
        overrides = OverridesParser.create(config_loader=loader).parse_overrides(words)
        for override in overrides:
            if override.is_discrete_sweep() and not [*override.sweep_string_iterator()]:
                text = (override.input_line or "").partition("=")[2]
                problem = "has no value, so there is no job; expected at least one"
                if override.is_choice_sweep():
                    options = loader.get_group_options(override.key_or_group)
                    problem = f"matches nothing, so there is no job; available: {options}"
                raise ConfigError(override.key_or_group, problem, text)
        [jobs] = BasicSweeper.split_arguments(overrides, None)
        yield from jobs


def job_config(
    context: HydraContext, config: DictConfig, number: int, overrides: Sequence[str]
) -> DictConfig:
    """The composed configuration of a job, to which `${hydra:...}` refers from here on.

    Args:
        context: Composes it.
        config: Configuration of the sweep.
        number: Number of the job.
        overrides: Its overrides.
    """
    composed = context.config_loader.load_sweep_config(config, list(overrides))
    with open_dict(composed):
        composed.hydra.job.id = composed.hydra.job.num = number
    HydraConfig.instance().set_config(composed)
    return composed
