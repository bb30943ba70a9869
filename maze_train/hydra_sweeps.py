"""Plug-ins of Hydra: sweeps that check all jobs, launchers, search path and shell completion."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from glob import escape, glob
from pathlib import Path
from typing import Any, ClassVar

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.conf import HydraConf, RunDir, SweepDir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.experimental.callback import Callback
from hydra.plugins.completion_plugin import CompletionPlugin
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from maze_train.config.compose import PRESETS
from maze_train.config.options import CONFIG_DIR, CONFIG_NAME, FAILURE, config_names, list_options
from maze_train.config.train_config import AUTO
from maze_train.core.checks import check_at_least, check_positive, expanded
from maze_train.core.errors import ConfigError, MazeTrainError, TrainingError
from maze_train.core.files import exclusive, new_directory, writable
from maze_train.core.folders import make_folders
from maze_train.core.names import OUTPUTS, PROGRAM
from maze_train.core.notices import notify, say
from maze_train.core.signals import Interruption
from maze_train.core.targets import TARGET
from maze_train.core.text import quoted
from maze_train.hydra_app import (
    CONFIGURATION_ERRORS,
    OPTIONS,
    PATHS,
    STAYS,
    WITH_VALUE,
    ComposedJob,
    Job,
    JobLoader,
    words_of,
)
from maze_train.workers.job_pool import (
    LOG_FILE,
    JobPool,
    JobRecord,
    LocalJobs,
    ProcessJob,
    StartedJob,
    WorkerJobs,
    tell_end,
)

SWEEPS = f"{OUTPUTS}/sweeps"
SWEEP_DIR = f"{SWEEPS}/${{now:%Y-%m-%d_%H-%M-%S}}"
"""Default directory of a sweep."""

SWEEP_DIR_KEY = "hydra.sweep.dir"
SHOWN_PROBLEMS = 5
MANY_JOBS = 10
"""Number of jobs whose check takes about a second, so that it is announced."""


def is_basic(config: DictConfig) -> bool:
    """Return whether Hydra's basic sweeper runs the jobs; other sweepers choose them."""
    return str(OmegaConf.select(config, "hydra.sweeper._target_")).endswith(".BasicSweeper")


class FailureCallback(Callback):
    """Callback that keeps Hydra from printing the error of a run, which the job has printed.

    Hydra calls this callback last.
    """

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Mark the run as completed."""
        kwargs["job_return"].status = JobStatus.COMPLETED


class RecordingLauncher(Launcher):
    """Launcher wrapper that stores the outcomes of jobs, in whichever process the jobs ran.

    Args:
        launcher: The launcher to wrap.
        config: Configuration of the sweep, shared by all of its jobs.
        task: Stores the outcomes.
    """

    def __init__(self, launcher: Launcher, config: DictConfig, task: Job) -> None:
        self._launcher, self._config, self._task = launcher, config, task

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Do nothing, since the wrapped launcher is already set up."""

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run jobs and return their results in order.

        Hydra's basic sweeper does not see failures, since it would stop at the first failure.
        """
        returned = self._launcher.launch(job_overrides, initial_job_idx)
        known = {record.number for record in self._task.records}
        for number, job in enumerate(returned, initial_job_idx):
            if number not in known:
                self._note(number, job)
        if not is_basic(self._config):
            return returned
        return [replace(job, status=JobStatus.COMPLETED) for job in returned]

    def _note(self, number: int, job: JobReturn) -> None:
        """Store the outcome of a job that ran in a different process."""
        assert job.cfg is not None
        assert job.hydra_cfg is not None
        record = replace(
            self._task.record_of(ComposedJob(job.cfg, job.hydra_cfg.hydra)),
            number=number,
            sweep_dir=str(self._config.hydra.sweep.dir),
        )
        if job.status == JobStatus.COMPLETED:
            record = replace(record, objective=job.return_value)
        else:
            record = self._task.failed(record, job._return_value)
            notify(f"{PROGRAM}: error: {record.label}: {record.error}", logging.ERROR)
        self._task.note(record)


class SweepStart(Sweeper):
    """Sweeper wrapper that checks all jobs and locks the sweep directory before the first job.

    Args:
        sweeper: The sweeper to wrap.
        config: Configuration of the sweep, shared by all of its jobs.
        context: Composes the configurations of jobs.
        task: Checks jobs and prints how to resume the sweep.
    """

    def __init__(
        self, sweeper: Sweeper, config: DictConfig, context: HydraContext, task: Job
    ) -> None:
        self._sweeper, self._config, self._context = sweeper, config, context
        self._task = task

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Do nothing, since the wrapped sweeper is already set up."""

    def sweep(self, arguments: list[str]) -> object:
        """Run the jobs.

        Raises:
            ConfigError: If a job cannot run, there are no jobs, or the directory is not writable.
            KeyboardInterrupt: If a signal was received. Raised once all jobs have ended.
            RunDirectoryError: If another process runs a sweep in the directory.
        """
        is_listed = is_basic(self._config)
        arguments = self._without_plus(arguments)
        if is_listed:  # Other sweepers choose jobs from earlier results.
            self._check_jobs(arguments)
        directory = self._claimed()
        with exclusive(directory, "sweeps in"):
            try:
                return self._sweeper.sweep(arguments)
            except KeyboardInterrupt:
                if is_listed:
                    resume = OmegaConf.select(self._config, "resume", default="")
                    self._task.tell_how_to_continue(resume, directory)
                raise

    def _without_plus(self, arguments: Sequence[str]) -> list[str]:
        """Remove `++` from overrides of settings that exist in all jobs, so that names are plain.

        Examples of such names are `hydra.job.override_dirname` and the parameters of a sweeper.
        """
        loader, words = self._context.config_loader, self._parsed(arguments)
        given = OmegaConf.to_container(self._config.hydra.overrides.hydra)
        assert isinstance(given, list)
        kept = [x for x in words if not x.is_force_add()]
        groups = loader.list_groups("")
        kept = [x for x in kept if not x.is_sweep_override() or x.key_or_group in groups]
        [choices] = BasicSweeper.split_arguments(kept, None)
        name = self._config.hydra.job.config_name
        jobs = [loader.load_configuration(name, [*given, *own], RunMode.RUN) for own in choices]
        plain, own_words = [], words[len(words) - len(arguments) :]
        for word, override in zip(arguments, own_words, strict=True):
            section, _, key = override.key_or_group.rpartition(".")
            nodes = [OmegaConf.select(job, section) if section else job for job in jobs]
            exists = all(OmegaConf.is_dict(node) and key in node for node in nodes)
            plain.append(word.lstrip("+") if override.is_force_add() and exists else word)
        return plain

    def _claimed(self) -> Path:
        """Create the sweep directory and pass its absolute path to all jobs."""
        raw = OmegaConf.to_container(self._config.hydra.sweep, resolve=False)
        assert isinstance(raw, dict)
        if raw["dir"] == SWEEP_DIR:
            given = [OmegaConf.select(self._config, key) for key in ("resume", "run_dir")]
            if given == [AUTO, None]:
                problem = f"requires the directory of the sweep; set {SWEEP_DIR_KEY}"
                raise ConfigError("resume", problem, AUTO)
            with writable(SWEEP_DIR_KEY, Path(SWEEPS)):
                name = str(new_directory(Path(SWEEPS).absolute()))
        else:
            # Resolve interpolations once, since they may differ between jobs. Use an absolute path,
            # since `hydra.job.chdir` changes the working directory.
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
        """Compose and check all jobs without writing any files.

        Raises:
            ConfigError: If there are no jobs, or some jobs cannot run. The message lists these
                jobs.
        """
        setup_globals()
        problems = []
        jobs = list(self._jobs(arguments))
        if len(jobs) >= MANY_JOBS:
            say(f"{PROGRAM}: checking {len(jobs)} jobs")
        loader = self._context.config_loader
        assert isinstance(loader, JobLoader)
        for number, overrides in enumerate(jobs):
            try:
                config = loader.check(self._config, list(overrides))
                set_number(config, number)
                self._task.check(ComposedJob(config))
            except (MazeTrainError, *CONFIGURATION_ERRORS) as error:
                problems.append((f"job {number} ({words_of(overrides)})", error))
        HydraConfig.instance().set_config(self._config)
        if problems:
            lines = [f"\n  {label}: {self._task.message_of(error)}" for label, error in problems]
            more = len(lines) - SHOWN_PROBLEMS
            shown = "".join(lines[:SHOWN_PROBLEMS]) + (f"\n  and {more} more" if more > 0 else "")
            problem = f"{len(lines)} of {len(jobs)} jobs cannot run, so none was started:{shown}"
            raise ConfigError("sweep", problem)

    def _jobs(self, arguments: Sequence[str]) -> Iterator[Sequence[str]]:
        """Yield the overrides of each job."""
        overrides = self._parsed(arguments)
        for override in overrides:
            if override.is_discrete_sweep() and not [*override.sweep_string_iterator()]:
                text = (override.input_line or "").partition("=")[2]
                problem = "has no values, so the sweep has no jobs; set at least one value"
                if override.is_choice_sweep():
                    options = list_options(override.key_or_group)
                    problem = f"matches no option, so the sweep has no jobs; available: {options}"
                raise ConfigError(override.key_or_group, problem, text)
        [jobs] = BasicSweeper.split_arguments(overrides, None)
        yield from jobs

    def _parsed(self, arguments: Sequence[str]) -> list[Override]:
        """Return the parameters of the sweeper, followed by the overrides of the command line."""
        params = OmegaConf.select(self._config, "hydra.sweeper.params") or {}
        words = [*(f"{key}={value}" for key, value in params.items()), *arguments]
        parser = OverridesParser.create(config_loader=self._context.config_loader)
        return parser.parse_overrides(words)


def job_config(
    context: HydraContext, config: DictConfig, number: int, overrides: Sequence[str]
) -> DictConfig:
    """Compose the configuration of a job, and use it to resolve `${hydra:...}`.

    Args:
        context: Composes the configuration.
        config: Configuration of the sweep.
        number: Index of the job.
        overrides: Overrides of the job.
    """
    composed = context.config_loader.load_sweep_config(config, list(overrides))
    set_number(composed, number)
    return composed


def set_number(composed: DictConfig, number: int) -> None:
    """Set the number of a job, and use its configuration to resolve `${hydra:...}`."""
    with open_dict(composed):
        composed.hydra.job.id = composed.hydra.job.num = number
    HydraConfig.instance().set_config(composed)


LAUNCHER = "hydra_plugins.maze_train.LocalLauncher"
"""Target of the launcher, in the namespace from which Hydra loads plug-ins."""


@dataclass
class LocalLauncherConf:
    """Settings of the local launcher, `hydra.launcher.<name>`."""

    _target_: str = LAUNCHER

    n_jobs: int = 0
    """Maximum number of parallel jobs (>= 0); 0: one per core."""

    gpus: list[int] = field(default_factory=list)
    """GPU indices (CUDA_VISIBLE_DEVICES), assigned to jobs round-robin, one per job; empty: all
    GPUs are visible to every job."""


class LocalLauncher(Launcher):
    """Runs jobs in parallel processes on this machine.

    Args:
        **settings: Fields of `LocalLauncherConf`.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._config = DictConfig({})
        self._context: HydraContext
        self._task: Job

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Store the context, the task and the configuration."""
        assert isinstance(task_function, Job)
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run jobs and return their results in order.

        Raises:
            ConfigError: If a setting of the launcher is invalid.
            KeyboardInterrupt: If a signal was received. Raised once all jobs have ended.
        """
        check_at_least("hydra.launcher.n_jobs", self._settings["n_jobs"], 0)
        setup_globals()
        make_folders(Path(str(self._config.hydra.sweep.dir)))
        ended: dict[int, JobReturn] = {}

        def note(job: StartedJob) -> None:
            self._task.note(job.outcome)
            tell_end(job)
            number = job.outcome.number
            overrides = job_overrides[number - initial_job_idx]
            ended[number] = self._returned(job.outcome, overrides)

        jobs = (self._job(*job) for job in enumerate(job_overrides, initial_job_idx))
        self._pool(note, len(job_overrides)).run(jobs)
        return [ended[number] for number in sorted(ended)]

    def _pool(self, ended: Callable[[StartedJob], None], count: int) -> JobPool[Any]:
        """Return the pool that runs `count` jobs."""
        if count > 1:
            self._task.preload()
        return LocalJobs(ended, **self._settings)

    def _job(self, number: int, overrides: Sequence[str]) -> ProcessJob:
        """Return a job with its composed configuration."""
        config = job_config(self._context, self._config, number, overrides)
        directory = Path(str(config.hydra.sweep.dir), str(config.hydra.sweep.subdir)).absolute()
        sweep_dir = os.path.abspath(str(config.hydra.sweep.dir))
        record = JobRecord(number, words_of(overrides), str(directory), sweep_dir, code=FAILURE)
        return ProcessJob(record, directory / LOG_FILE, self._work(config))

    def _work(self, config: DictConfig) -> Callable[[], JobRecord | None]:
        """Return the function that a job runs in its process."""
        return partial(self._run, config)

    def _run(self, config: DictConfig) -> JobRecord | None:
        """Run a job in its process; return its record, or None if the job did not finish."""
        before = len(self._task.records)
        with suppress(SystemExit):  # The job has already added its record.
            run_job(
                hydra_context=self._context,
                task_function=self._task,
                config=config,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )
        records = self._task.records[before:]
        return records[-1] if records else None

    def _returned(self, record: JobRecord, overrides: Sequence[str]) -> JobReturn:
        """Return the result of a job for Hydra's sweeper."""
        return JobReturn(
            overrides=list(overrides),
            status=JobStatus.FAILED if record.error else JobStatus.COMPLETED,
            _return_value=TrainingError(record.error) if record.error else record.objective,
        )


@dataclass
class RayLauncherConf:
    """Settings of the Ray launcher, `hydra.launcher.<name>`."""

    _target_: str = "hydra_plugins.maze_train.RayLauncher"

    address: str = "auto"
    """Address of a running cluster, `<head>:<port>`; `auto`: the cluster of this machine, or
    RAY_ADDRESS."""

    n_jobs: int = 0
    """Maximum number of parallel jobs (>= 0); 0: as many as the cluster has resources for."""

    cpus_per_job: float = 1.0
    """CPUs reserved per job (> 0)."""

    gpus_per_job: float = 0.0
    """GPUs reserved per job (>= 0, may be fractional); other GPUs are not visible to the job."""

    working_dir: str | None = None
    """Folder with your modules, which Ray copies to all machines."""


class RayLauncher(LocalLauncher):
    """Runs jobs in parallel on a Ray cluster.

    Args:
        **settings: Fields of `RayLauncherConf`.
    """

    def _pool(self, ended: Callable[[StartedJob], None], count: int) -> JobPool[Any]:
        """Return the pool that runs `count` jobs.

        Raises:
            ConfigError: If a setting is out of range.
        """
        given = self._settings
        check_positive("hydra.launcher.cpus_per_job", given["cpus_per_job"])
        check_at_least("hydra.launcher.gpus_per_job", given["gpus_per_job"], 0)
        from maze_train.cluster.pool import RayBackend  # Imported lazily, since Ray is optional.

        backend = RayBackend(
            given["n_jobs"],
            on_worker_failure="restart",
            max_worker_restarts=count,
            address=given["address"],
            cpus_per_worker=given["cpus_per_job"],
            gpus_per_worker=given["gpus_per_job"],
            working_dir=given["working_dir"],
            section="hydra.launcher",
            remedy="hydra.launcher.n_jobs or hydra.launcher.cpus_per_job",
        )
        sweep_dir = os.path.abspath(str(self._config.hydra.sweep.dir))
        return WorkerJobs(ended, backend, count, [os.getcwd(), sweep_dir])

    def _work(self, config: DictConfig) -> Callable[[], JobRecord | None]:
        """Return the function that a job runs in its process."""
        return partial(self._run_there, Singleton.get_state(), os.getcwd(), config)

    def _run_there(self, state: object, folder: str, config: DictConfig) -> JobRecord | None:
        """Run a job in a new process, after restoring Hydra's state and the working directory."""
        Singleton.set_state(state)
        os.chdir(folder)
        with Interruption():
            return self._run(config)


# -- plug-ins --------------------------------------------------------------------------------------


LAUNCHERS: dict[str, tuple[type, Any]] = {
    "local": (LocalLauncher, LocalLauncherConf),
    "ray": (RayLauncher, RayLauncherConf),
}


class MazeTrainSearchPath(SearchPathPlugin):
    """Search path: the user's folders, then the shipped folder."""

    folders: ClassVar[Sequence[str]] = ()
    """The user's folders."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the user's folders to the search path."""
        for folder in reversed(self.folders):
            path = f"file://{Path(folder).absolute()}"
            search_path.prepend(provider="user", path=path, anchor="main")


def completions(line: str, folders: Sequence[str]) -> list[str] | None:
    """Return completions of the last word: options, values of `-cn`, presets, ids, or paths.

    Args:
        line: The command line up to the cursor.
        folders: The user's configuration folders.

    Returns:
        The completions; None for other overrides, which Hydra completes.
    """
    before, _, word = line.rpartition(" ")
    previous = before.rpartition(" ")[2]
    if previous in CONFIG_NAME:
        return [name for name in config_names(folders) if name.startswith(word)]
    if previous in WITH_VALUE:
        return []
    if word.startswith("-"):
        return [option for option in OPTIONS if option.startswith(word)]
    key, equals, value = word.rpartition("=")
    group = key.lstrip("+") if equals else ""
    if group in ("env", PRESETS):  # Hydra lists neither ids nor options in sub-folders.
        names = list_options(group, folders)
        if group == "env":
            import gymnasium

            from maze_train.envs.building import register_installed

            register_installed()
            names = sorted({*names, *gymnasium.registry} - {"id"})
        return [f"{key}={name}" for name in names if name.startswith(value)]
    if not (previous in CONFIG_DIR or (equals and PATHS.fullmatch(key.lstrip("+")))):
        return None
    found = sorted(glob(f"{escape(value)}*"))
    return [f"{key}{equals}{path}{'/' if os.path.isdir(path) else ''}" for path in found]


def completing_values(shell: type[CompletionPlugin]) -> type[CompletionPlugin]:
    """Return Hydra's completion plug-in with a fix for lists and empty mappings.

    Hydra completes `runs` to `runs.`, although a list has no keys; the fixed plug-in completes
    `runs` to `runs=`.
    """

    class Completion(shell):  # type: ignore[valid-type,misc]  # a class that is an argument
        def _query(self, config_name: str | None, line: str) -> list[str]:
            found: list[str] = super()._query(config_name, line)
            if not any(word.endswith(".") for word in found):
                return found
            words = [word for word in line.split(" ")[:-1] if "=" in word]
            config = self.config_loader.load_configuration(config_name, words, RunMode.RUN)
            return [f"{word[:-1]}=" if is_value(config, word) else word for word in found]

    def is_value(config: DictConfig, word: str) -> bool:
        node = OmegaConf.select(config, word[:-1]) if word.endswith(".") else None
        return OmegaConf.is_list(node) or (OmegaConf.is_dict(node) and not node)

    return Completion


@contextmanager
def extended_hydra(folders: Sequence[str] = ()) -> Iterator[None]:
    """Register the plug-ins and defaults for Hydra's settings; restore Hydra on exit.

    The defaults apply to all primary configs, including `-cn config` for the file of an earlier
    run. For a single run, Hydra creates no files. For a sweep, Hydra creates one directory with
    numbered job directories. Logging is not configured.

    Args:
        folders: The user's configuration folders.
    """
    MazeTrainSearchPath.folders = folders
    Plugins.instance().register(MazeTrainSearchPath)
    store = ConfigStore.instance()
    launchers = store.repo["hydra"]["launcher"]
    hidden = {name: launchers.get(f"{name}.yaml") for name in LAUNCHERS}
    for name, (launcher, node) in LAUNCHERS.items():
        Plugins.instance().class_name_to_class[node._target_] = launcher
        store.store(group="hydra/launcher", name=name, node=node, provider="maze_train")
    before = store.repo["hydra"]["config.yaml"]
    plugins: Any = Plugins.instance()
    shells = plugins.plugin_type_to_subclass_list[CompletionPlugin]
    plugins.plugin_type_to_subclass_list[CompletionPlugin] = [
        completing_values(shell) for shell in shells
    ]

    def sweeper(
        *, config: DictConfig, hydra_context: HydraContext, task_function: TaskFunction
    ) -> Sweeper:
        """Return the sweeper chosen by the user, wrapped in `SweepStart`."""
        chosen = Plugins.instantiate_sweeper(
            plugins, config=config, hydra_context=hydra_context, task_function=task_function
        )
        assert isinstance(task_function, Job)
        return SweepStart(chosen, config, hydra_context, task_function)

    def recording(
        hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> Launcher:
        """Return the launcher chosen by the user, wrapped in `RecordingLauncher`."""
        chosen = Plugins.instantiate_launcher(plugins, hydra_context, task_function, config)
        name = config.hydra.runtime.choices["hydra/launcher"]
        if (other := hidden.get(name)) is not None:
            ours = type(chosen).__name__
            notify(f"note: hydra/launcher={name} is {ours} of maze_train, not {other.node[TARGET]}")
        assert isinstance(task_function, Job)
        return RecordingLauncher(chosen, config, task_function)

    plugins.instantiate_sweeper, plugins.instantiate_launcher = sweeper, recording
    store.store(group="hydra", name="config", node=_hydra_settings(), provider="maze_train")
    try:
        yield
    finally:
        MazeTrainSearchPath.folders = ()
        del plugins.instantiate_sweeper, plugins.instantiate_launcher
        plugins.plugin_type_to_subclass_list[CompletionPlugin] = shells
        store.repo["hydra"]["config.yaml"] = before
        for name, node in hidden.items():
            del launchers[f"{name}.yaml"]
            if node is not None:
                launchers[f"{name}.yaml"] = node


def _hydra_settings() -> HydraConf:
    settings = HydraConf(
        run=RunDir(dir=STAYS),
        sweep=SweepDir(dir=SWEEP_DIR, subdir="${hydra.job.num}"),
        output_subdir=None,
        callbacks={"maze_train": {TARGET: f"{FailureCallback.__module__}.FailureCallback"}},
    )
    settings.job.chdir = False
    silent = ("hydra_logging", "job_logging")
    settings.defaults = [
        {key: "none" if key in silent else value for key, value in entry.items()}
        for entry in settings.defaults
    ]
    return settings
