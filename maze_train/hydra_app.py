"""The application of Hydra: override grammar, composed jobs, and error messages.

The module normalises command-line arguments, starts Hydra, and runs each configuration that Hydra
composes; `hydra_sweeps` contains sweeps and plug-ins.

Hydra requires a different spelling for each kind of override: `algorithm=ppo` for a group in the
defaults list, `+a.b=c` for a new key, `++a.b=c` for any key. This module accepts every key without
a plus sign. Settings classes report unknown keys.
"""

from __future__ import annotations

import argparse
import errno
import glob
import logging
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial, reduce
from itertools import pairwise
from operator import getitem
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, QuotedString
from hydra.core.utils import filter_overrides
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from maze_train.config.compose import ENV_OPTIONS, PRESETS, unknown_option
from maze_train.config.options import (
    CONFIG_DIR,
    CONFIG_NAME,
    CONFIGURATION_ERROR,
    DONE,
    FAILURE,
    config_folders,
    config_names,
    group_names,
    list_options,
    options_below,
    shipped_root,
)
from maze_train.config.other_names import ours_for
from maze_train.config.train_config import AUTO
from maze_train.core.checks import expanded
from maze_train.core.errors import (
    ConfigError,
    EnvError,
    MazeTrainError,
    MissingExtraError,
    SpaceError,
    TrainingError,
    did_you_mean,
    failed_in_user_code,
    nearest,
    user_cause,
)
from maze_train.core.names import JOBS, PROGRAM
from maze_train.core.notices import notify, say, tell_traceback, warn
from maze_train.core.run_directory import RunDirectory
from maze_train.core.signals import Preempted
from maze_train.core.text import quoted, shell_word
from maze_train.core.torchrun import rank_label
from maze_train.jobs import COMMANDS, Given, Work, command_of, compare
from maze_train.workers.job_pool import JobRecord, write_jobs

WITH_VALUE = ("--config-path", "-cp", "--package", "-p", "--cfg", "-c")
"""Options whose values are not completed."""
INFO = ("--info", "-i")
OPTIONS = (
    *WITH_VALUE, *INFO, *CONFIG_NAME, *CONFIG_DIR, "--shell_completion", "-sc",
    "--shell-completion", "--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r",
    "--multirun", "-m", "--",
)  # fmt: skip
"""All options of the command: options of Hydra, and options handled before Hydra starts."""
PATHS = re.compile(
    r"run_dir|resume|base_run|runs?|output|output_dir|record_dir|study|video_file|runner\.dataset"
    r"|runner\.working_dir|policies\.[^.]+(\.source)?|hydra\.sweep\.dir"
)
"""Settings whose values are paths; the values are quoted verbatim."""
ASSIGNMENT = re.compile(r"(?P<plus>\+{0,2})(?P<key>[^\s=+~][^\s=]*)=(?P<value>.*)", re.DOTALL)
CONFIG_PATH_PROBLEM = "replaces the shipped folder, so it needs a complete -cn; use --config-dir"
WITH_PLUS = "to add it, write + before the override"
LINE = "COMP_LINE"
"""Environment variable with the command line to complete."""
MAX_KEPT = 1_000
"""Maximum number of composed jobs in memory."""
STAYS = "."
"""Default of `hydra.run.dir`: Hydra creates no directory for a single run, which uses `run_dir`."""

CONFIGURATION_ERRORS = (
    *(ConfigError, SpaceError, MissingExtraError),
    *(HydraException, OmegaConfBaseException, yaml.YAMLError),
)
"""Errors in the configuration, for which `maze-run` returns exit code 2."""


NAME, GROUP, LONGEST_NAME = "tracking.name", "tracking.group", 100
"""Settings with the name and the group of a run, and maximum length of a generated name."""

# -- the command line ------------------------------------------------------------------------------


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options and the overrides of a command line with Hydra's parser.

    Args:
        argv: The arguments after the program name. Options may appear anywhere.

    Raises:
        ConfigError: If an option does not exist, or its value is missing or invalid.
    """
    parser = get_args_parser()
    parser.allow_abbrev = parser.exit_on_error = False
    # The value of `--info` is optional, and an override is not a value.
    words = [
        "--info=all" if word in INFO and "=" in following else word
        for word, following in pairwise([*argv, ""])
    ]
    try:
        options, unknown = parser.parse_known_intermixed_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(error.argument_name or "", error.message) from error
    for word in unknown:
        name = word.partition("=")[0]
        close = [*nearest(name, OPTIONS, count=1), *ours_for(name.lstrip("-"))]
        hint = did_you_mean(close, "", " ")
        raise ConfigError(
            name,
            f"no such option; {hint}settings are written without dashes, such as "
            f"algorithm.lr=0.001; {PROGRAM} --help lists the options",
        )
    return options


def overrides_of(argv: Sequence[str]) -> list[str]:
    """Return the overrides of a valid command line."""
    overrides: list[str] = parsed(argv).overrides
    return overrides


def normalise(
    overrides: Iterable[str], folders: Sequence[str] = (), is_sweep: bool = False
) -> list[str]:
    """Return overrides in Hydra's spelling.

    `+algorithm=ppo` becomes `algorithm=ppo`; `algorithm.lr=1` and `+algorithm.lr=1` become
    `++algorithm.lr=1`; `env=Taxi-v3` becomes `env=id ++env.id=Taxi-v3`. Paths are quoted if
    necessary. Deletions (`~key`), Hydra's settings, and keys with a package (`env@eval_env`) or a
    path are not changed.

    Args:
        overrides: Overrides as the user typed them.
        folders: The user's configuration folders; overrides of their groups are not changed.
        is_sweep: Whether commas separate the values of a sweep.

    Raises:
        ConfigError: If the values of `env` are ids as well as options.
    """
    groups = group_names()
    own_groups = {name for folder in folders for name in group_names(Path(folder))} - {*groups}
    given, words = list(overrides), list[str]()
    has_preset = any(key_of(word) == PRESETS for word in given)
    for word in given:
        match = ASSIGNMENT.fullmatch(word)
        if match is None:
            words.append(word)
            continue
        key, value = match["key"], match["value"]
        if PATHS.fullmatch(key):
            value = as_path(value, is_sweep)
        is_hydras = key == "hydra" or key.startswith(("hydra.", "hydra/"))
        if key in groups and not value.startswith("{"):
            words += _choice(key, value, folders, has_preset)
        elif is_hydras or key in own_groups or "@" in key or "/" in key:
            words.append(f"{match['plus']}{key}={value}")
        else:
            words.append(f"++{key}={value}")
    return words


def _choice(group: str, text: str, folders: Sequence[str], has_preset: bool) -> list[str]:
    """Return the override of a group in Hydra's spelling."""
    parsed = _parsed([f"{group}={text}"])
    value = parsed[0].value() if parsed else text
    if isinstance(value, bool | int | float | None):
        return [f"{group}='{text}'"]
    if isinstance(value, Glob):  # Hydra does not list the options in sub-folders.
        names = value.filter(list_options(group, folders))
        return [f"{group}={','.join(names)}" if names else f"{group}={text}"]
    if group != "env":
        return [f"{group}={text}"]
    # A preset may set `env.id` itself, so that another option would have no effect.
    names = [str(name) for name in (value.list if isinstance(value, ChoiceSweep) else [value])]
    own = {*ENV_OPTIONS}.union(*(options_below(Path(folder), group) for folder in folders))
    options = own if has_preset else {*list_options(group, folders)}
    if {*names} <= options:
        return [f"{group}={text}"]
    if own & {*names}:
        ids = ", ".join(name for name in names if name not in own)
        problem = f"{ids}: ids of environments and options of the group env cannot be combined"
        raise ConfigError(group, f"{problem}; write an option for each of them", text)
    return ["env=id", f"++env.id={text}"]


def as_given(overrides: Iterable[str]) -> list[str]:
    """Return overrides in Hydra's spelling as the user may type them; inverse of `normalise`."""
    words = [word.lstrip("+") for word in overrides]
    if "env=id" not in words:
        return words
    return [
        f"env={word.removeprefix('env.id=')}" if word.startswith("env.id=") else word
        for word in words
        if word != "env=id"
    ]


def _parsed(words: Iterable[str]) -> list[Override]:
    """Return the overrides that Hydra can parse; Hydra reports invalid overrides itself."""
    parser, found = OverridesParser.create(), []
    for word in words:
        with suppress(HydraException, ValueError):
            found.append(parser.parse_override(word))
    return found


def as_path(value: str, is_sweep: bool) -> str:
    """Return the value of a path setting, quoted if Hydra's grammar requires it.

    If Hydra parses the value as a string, null, a list or a sweep, the value is returned unchanged.

    Args:
        value: Value as typed: a path, paths in brackets, or comma-separated paths of a sweep.
        is_sweep: Whether commas separate the values of a sweep.
    """
    found = _parsed([f"path={value}"])
    if found and not isinstance(found[0].value(), bool | int | float):
        return value
    if value[:1] + value[-1:] == "[]":
        return f"[{_each_as_path(value[1:-1])}]"
    return _each_as_path(value) if is_sweep and "," in value else quoted(value)


def _each_as_path(values: str) -> str:
    return ",".join(as_path(value.strip(), is_sweep=False) for value in values.split(","))


def check_choices(overrides: Iterable[str], groups: Collection[str]) -> None:
    """Check that each group override names an option, since Hydra's message would be unclear.

    Args:
        overrides: Overrides in Hydra's spelling.
        groups: All groups except Hydra's, whose names contain a slash.

    Raises:
        ConfigError: If the value of a group is not a name.
    """
    for override in _parsed(overrides):
        key, value = override.key_or_group, override.value()
        is_group = key in groups or "/" in key or key == "hydra"
        if not (is_group or key == "hydra.verbose") or (override.is_delete() and value is None):
            continue
        texts = (str, QuotedString, Glob if is_group else bool)
        for choice in value.list if isinstance(value, ChoiceSweep) else [value]:
            if is_group and isinstance(choice, dict):
                continue  # A mapping of settings is allowed in place of a name.
            entries = choice if isinstance(choice, list) else [choice]
            if not all(isinstance(entry, texts) for entry in entries):
                expected = "the name of an option" if is_group else "true, false or names"
                text = (override.input_line or "").partition("=")[2]
                raise ConfigError(key, f"expected {expected}", text)


def start(job: Job, options: argparse.Namespace, config_name: str, completed: str = "") -> None:
    """Start Hydra, which composes the configuration and calls `job` (in a sweep, once per job).

    Args:
        job: Called with each composed configuration.
        options: The parsed command line, with overrides in Hydra's spelling.
        config_name: Default name of the primary config.
        completed: Command line to complete for the shell; empty if not completing.

    Raises:
        ConfigError: If options cannot be combined, or the configuration of `--cfg` is invalid.
    """
    shown = [name for name in ("run", "cfg", "info", "shell_completion") if vars(options)[name]]
    if len(shown) > 1 or (options.multirun and shown not in ([], ["cfg"])):
        raise ConfigError(f"--{shown[-1]}", "cannot be combined with the other options")
    if options.resolve and not options.cfg:
        raise ConfigError("--resolve", "shows the resolved configuration; add --cfg job")
    name = options.config_name or config_name
    overrides: list[str] = options.overrides
    version.setbase("1.3")
    hydra = Hydra("maze_run", JobLoader(_search_path(options)))
    GlobalHydra.instance().initialize(hydra)
    try:
        if options.hydra_help:
            hydra.hydra_help(name, get_args_parser(), options)
        elif options.info:
            hydra.show_info(options.info, config_name=name, overrides=overrides)
        elif options.shell_completion:
            with _completing(completed):
                hydra.shell_completion(config_name=name, overrides=overrides)
        elif options.cfg:
            for words in _jobs_of(overrides, hydra) if options.multirun else [overrides]:
                _show(job, hydra, options, name, words)
        else:
            mode = hydra.get_mode(config_name=name, overrides=overrides) or RunMode.RUN
            mode = RunMode.MULTIRUN if options.multirun else mode
            run = hydra.run if mode == RunMode.RUN else hydra.multirun
            run(name, job, [*overrides, f"hydra.mode={mode.name}"])
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        path, problem = Path(str(error.filename)), "no such option; the name is too long"
        raise ConfigError(path.parent.name, problem, path.stem) from None
    except ValueError as error:
        if "integer string conversion" not in str(error):
            raise
        raise ConfigError("overrides", "a number has too many digits") from None
    finally:
        GlobalHydra.instance().clear()


def _search_path(options: argparse.Namespace) -> ConfigSearchPath:
    """Return the search path: `--config-dir`, the shipped folder or `--config-path`."""
    path = options.config_path or "pkg://maze_train.conf"
    is_folder = "://" not in path
    search_path = create_config_search_path(os.path.abspath(path) if is_folder else path)
    if options.config_dir is not None:
        folder = os.path.abspath(options.config_dir)
        if not os.path.isdir(folder):
            raise ConfigError("--config-dir", "no such directory", options.config_dir)
        search_path.prepend("command-line", f"file://{folder}", SearchPathQuery("schema", None))
    return search_path


@contextmanager
def _completing(line: str) -> Iterator[None]:
    """Set the command line to complete and the name of the program, which Hydra's plug-ins read."""
    before, argv = os.environ.get(LINE), sys.argv
    sys.argv = [PROGRAM]
    if line:
        os.environ[LINE] = line
    try:
        yield
    finally:
        sys.argv = argv
        if before is not None:
            os.environ[LINE] = before


def _jobs_of(overrides: Sequence[str], hydra: Hydra) -> list[Sequence[str]]:
    """Return the overrides of each job of a sweep."""
    parser = OverridesParser.create(config_loader=hydra.config_loader)
    [jobs] = BasicSweeper.split_arguments(parser.parse_overrides(list(overrides)), None)
    return list(jobs)


def _show(
    job: Job, hydra: Hydra, options: argparse.Namespace, name: str, overrides: Sequence[str]
) -> None:
    """Print the configuration of a job, and check it.

    Raises:
        ConfigError: If the job cannot run.
    """
    words = list(overrides)
    if options.multirun:
        say(f"# {words_of(words)}")
    hydra.show_cfg(name, words, options.cfg, options.package, options.resolve)
    sys.stdout.flush()
    if options.cfg == "job":
        config = hydra.compose_config(name, words, RunMode.RUN, with_log_configuration=False)
        with open_dict(config.hydra), read_write(config.hydra):
            config.hydra.mode = RunMode.RUN
            config.hydra.runtime.output_dir = os.path.abspath(str(config.hydra.run.dir))
        HydraConfig.instance().set_config(config)
        job.check(ComposedJob(config))


class JobLoader(ConfigLoaderImpl):
    """Config loader that composes each job of a sweep once, for its check and for its run."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self._checked: dict[tuple[str, ...], DictConfig] = {}

    def load_sweep_config(
        self, master_config: DictConfig, sweep_overrides: list[str]
    ) -> DictConfig:
        """Return the configuration of a job, composed by `check` if the job was checked."""
        config = self._checked.pop(tuple(sweep_overrides), None)
        if config is None:
            return super().load_sweep_config(master_config, sweep_overrides)
        with open_dict(config.hydra), read_write(config.hydra):  # Set after the check.
            config.hydra.sweep.dir = master_config.hydra.sweep.dir
            config.hydra.overrides.hydra = master_config.hydra.overrides.hydra
        return config

    def check(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Compose the configuration of a job, and keep it for its run."""
        config = super().load_sweep_config(master_config, sweep_overrides)
        if len(self._checked) < MAX_KEPT:
            self._checked[tuple(sweep_overrides)] = config
        return config

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_checked": {}}


class ComposedJob:
    """Composed configuration of one job, independent of Hydra's types.

    Args:
        config: The composed configuration.
        hydra: Hydra's settings of the job; None for the settings of the current job.
    """

    def __init__(self, config: DictConfig, hydra: DictConfig | None = None) -> None:
        self._config = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        self._hydra = HydraConfig.get() if hydra is None else hydra
        self.is_sweep = self._hydra.mode == RunMode.MULTIRUN
        """Whether the job belongs to a sweep."""
        self.number: int = self._hydra.job.num if self.is_sweep else 0
        """Index of the job in the sweep; 0 outside a sweep."""
        self.config_name: str | None = self._hydra.job.config_name
        """Name of the primary config."""
        words = OmegaConf.to_container(self._hydra.overrides.task, resolve=False)
        assert isinstance(words, list)
        self.overrides: list[str] = words
        """The user's overrides, with interpolations unresolved."""

    @property
    def settings(self) -> str:
        """The user's overrides, as written on the command line."""
        return words_of(self.overrides)

    @property
    def sweep_dir(self) -> str:
        """Directory of the sweep; empty outside a sweep."""
        base, sweep = self._hydra.runtime.cwd, self._hydra.sweep
        return os.path.join(base, str(sweep.dir)) if self.is_sweep else ""

    @property
    def directory(self) -> str | None:
        """Directory of the job in the sweep, or `hydra.run.dir` if set; None otherwise."""
        if self.is_sweep:
            return os.path.join(self.sweep_dir, str(self._hydra.sweep.subdir))
        return None if self._hydra.run.dir == STAYS else str(self._hydra.runtime.output_dir)

    @property
    def is_verbose(self) -> bool:
        """Whether `hydra.verbose` requests log lines."""
        return bool(self._hydra.verbose)

    def values(self) -> dict[str, Any]:
        """Return the configuration as plain values, with interpolations resolved."""
        return resolved_values(self._config)

    def select(self, key: str) -> object:
        """Return the value of a dotted key, or None if the key does not exist."""
        return OmegaConf.select(self._config, key, throw_on_resolution_failure=False)

    def put(self, key: str, value: object) -> None:
        """Set the value of a dotted key."""
        OmegaConf.update(self._config, key, value)

    def drop_empty(self) -> None:
        """Remove the directory that Hydra created for the job, and its parents, if empty."""
        path, top = Path(self._hydra.runtime.output_dir), self.sweep_dir or self._hydra.runtime.cwd
        with suppress(OSError, ValueError):
            while path.relative_to(top).parts:
                path.rmdir()
                path = path.parent


class Job:
    """Runs a composed configuration; in a sweep, called by Hydra once per job.

    Errors are printed, recorded for the exit code, and raised, so that callbacks of Hydra see the
    failure. The launcher and `FailureCallback` keep Hydra from printing the errors again.

    Args:
        argv: Command-line arguments as the user typed them, for messages.
        debug: Whether to print the traceback of every error.
    """

    def __init__(self, argv: Sequence[str] = (), debug: bool = False) -> None:
        self.argv = list(argv)
        self.debug = debug
        self.records: list[JobRecord] = []
        self._pid = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Process ids on different machines may be equal.
        self.__dict__.update(state, _pid=None)

    def __call__(self, composed: DictConfig) -> float:
        """Run a job and return the objective value for the sweeper."""
        return self.run(ComposedJob(composed))

    def run(self, job: ComposedJob) -> float:
        """Run the command of a job and return the objective value for the sweeper.

        The objective is the result of training (see `objective_of`), the mean return of a rollout,
        or the value of the best trial of a search; NaN for other commands.
        """
        record = self.record_of(job)
        if job.is_verbose:
            logging.basicConfig(format="[%(asctime)s][%(name)s][%(levelname)s] - %(message)s")
        if job.is_sweep:
            say(f"{PROGRAM}: {record.title}")
            self._name_run(job)
        started_in = os.getcwd()
        try:
            if self._is_restarted(job):
                job.put("resume", AUTO)
            objective = self.check(job)()
            self.note(replace(record, objective=objective))
            job.drop_empty()
            return objective
        except (KeyboardInterrupt, Preempted):
            raise
        except BaseException as error:
            report(error, self.argv, self.debug, f"{record.label}: " if job.is_sweep else "")
            failed = self.failed(record, error)
            self.note(failed)
            job.drop_empty()
            if isinstance(error, Exception):
                raise
            # Others, such as SystemExit, would end all jobs.
            raise TrainingError(failed.error) from error
        finally:
            os.chdir(started_in)  # An environment may have changed the working directory.

    def _is_restarted(self, job: ComposedJob) -> bool:
        """Return whether a launcher has restarted a preempted job, whose directory contains a run.

        The sweep has checked that the directories of its jobs contain no runs.
        """
        given = [job.select(key) for key in ("run_dir", "resume")]
        if self._is_here or job.directory is None or given != [None, None]:
            return False
        return RunDirectory(Path(job.directory)).is_run

    def record_of(self, job: ComposedJob) -> JobRecord:
        """Return the record of a job that has not ended."""
        return JobRecord(
            number=job.number,
            settings=job.settings,
            run_dir=os.path.abspath(_given_directory(job.select) or job.directory or ""),
            sweep_dir=job.sweep_dir,
        )

    def failed(self, record: JobRecord, error: BaseException) -> JobRecord:
        """Return the record of a job that raised an error."""
        return replace(record, error=message_of(error, self.argv), code=_code_of(error))

    def check(self, job: ComposedJob) -> Work:
        """Check the settings of a job and return the function that runs it.

        Raises:
            ConfigError: If the job cannot run, or torchrun started a process that does not train a
                single policy.
        """
        values = job.values()
        command = COMMANDS[command_of(job.config_name, values)]
        if rank_label() and (job.is_sweep or command is not COMMANDS["train"]):
            problem = "it starts the processes of one training run; run sweeps and other commands "
            raise ConfigError("torchrun", f"{problem}without torchrun")
        given = Given(
            as_given(job.overrides),
            given_values(job.overrides),
            partial(settings_of, job.overrides, values),
        )
        work = command.work(values, job.directory, given)
        env = values.get("env")
        if isinstance(env, Mapping) and values.get("resume") in (None, AUTO):
            name, backend = env.get("id"), env.get("backend", "gymnasium")
            if name is not None and backend in ("gymnasium", "native"):
                from maze_train.envs.factory import check_registered

                folders = map(Path, config_folders(self.argv))
                own = [option for folder in folders for option in options_below(folder, "env")]
                check_registered(str(name), own)
        return work

    def message_of(self, error: BaseException) -> str:
        """Return the message for an error raised by `check`."""
        return message_of(error, self.argv)

    def tell_how_to_continue(self, resume: str | None, sweep_dir: Path) -> None:
        """Print the command that resumes an interrupted training sweep."""
        if not self._is_here or resume not in (None, AUTO):
            return
        replaced = ("hydra.sweep.dir", "resume")
        words = [word for word in self.argv if key_of(word) not in replaced]
        command = " ".join([PROGRAM, *map(shlex.quote, words)])
        place = shell_word("hydra.sweep.dir", str(sweep_dir))
        notify(f"to resume the sweep: {command} {place} resume={AUTO}")

    def _name_run(self, job: ComposedJob) -> None:
        """Set the default name of a run from the settings that vary in the sweep.

        The default group is the name of the sweep directory.
        """
        if job.select(NAME) == "":
            varied = ",".join(varied_keys(self.argv, job.overrides))
            job.put(NAME, re.sub(r"[^\w.,=+-]+", "-", varied)[:LONGEST_NAME])
        if job.select(GROUP) == "" and job.sweep_dir:
            job.put(GROUP, Path(job.sweep_dir).name)

    @property
    def _is_here(self) -> bool:
        """Return whether this is the main process, not the process of a job."""
        return os.getpid() == self._pid

    def preload(self) -> None:
        """Import the modules needed for training, so that forked processes share them."""
        import maze_train.run.train  # noqa: F401

        with suppress(ImportError):  # Jobs report missing packages.
            import torch.utils.tensorboard  # noqa: F401

    def note(self, record: JobRecord) -> None:
        """Store the outcome of a job; in a sweep, write the outcome to disk immediately."""
        self.records.append(record)
        if record.sweep_dir and self._is_here:
            try:
                write_jobs(Path(record.sweep_dir), self.records)
            except OSError as error:
                warn(f"{JOBS} could not be written: {error}")

    def exit_code(self) -> int:
        """Return the exit code; after a sweep, also compare the runs and report failures."""
        codes = [record.code for record in self.records if record.code]
        if self.records and self.records[0].sweep_dir:
            self._compare(self.records[0].sweep_dir)
            if codes:
                notify(f"{PROGRAM}: {len(codes)} of {len(self.records)} jobs failed")
        return min(codes, default=DONE)

    def _compare(self, sweep_dir: str) -> None:
        """Compare the runs of a sweep, if any; errors are only printed as a note."""
        if any(RunDirectory(Path(record.run_dir)).is_run for record in self.records):
            try:
                compare({"runs": [glob.escape(sweep_dir)], "output": sweep_dir}, None, Given())()
            except MazeTrainError as error:
                notify(f"note: the runs are not compared: {error}")


def _given_directory(select: Callable[[str], object]) -> str | None:
    """Return the output directory set by the user, for the record of a job."""
    for key in ("run_dir", "output_dir", "resume"):
        found = select(key)
        if found not in (None, AUTO):
            path = expanded(str(found))
            return str(RunDirectory.to_resume(path).path) if key == "resume" else path
    return None


# -- overrides and messages ------------------------------------------------------------------------


def varied_keys(argv: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a job that vary within its sweep.

    Args:
        argv: Command-line arguments as the user typed them.
        overrides: Overrides of the job.
    """
    words = overrides_of(argv)  # Not normalised, so Hydra might fail to parse some overrides.
    varied = {found.key_or_group for found in _parsed(words) if found.is_sweep_override()}
    fixed = {key_of(word) for word in words} - varied
    return [word for word in as_given(overrides) if key_of(word) not in fixed]


def key_of(override: str) -> str:
    """Return the key of an override without `+` signs."""
    return override.partition("=")[0].lstrip("+")


def words_of(overrides: Sequence[str]) -> str:
    """Return the overrides as on the command line, without the settings of Hydra."""
    return " ".join(as_given(filter_overrides(overrides)))


def resolved_values(composed: DictConfig) -> dict[str, Any]:
    """Convert a composed configuration to plain values, with interpolations resolved."""
    node = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}


def settings_of(overrides: Sequence[str], composed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overridden settings by dotted name; the value of a group is the option's name.

    Args:
        overrides: The user's overrides, in Hydra's spelling.
        composed: The composed configuration, with interpolations resolved.

    Raises:
        ConfigError: If an override deletes a setting or sweeps over values.
    """
    settings: dict[str, Any] = {}
    groups = group_names()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.is_delete() or override.is_sweep_override():
            problem = "with resume=<run dir>, expected key=value (no deletions, no sweeps)"
            raise ConfigError(override.input_line or "", problem)
        key = override.key_or_group
        settings[key] = override.value() if key in groups else _select(composed, key)
    return settings


def given_values(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the overridden settings by dotted name, with interpolations unresolved."""
    parsed = [o for o in _parsed(overrides) if not o.is_delete() and o.input_line != "env=id"]
    return {o.key_or_group: o.value() for o in parsed}


def _select(node: Mapping[str, Any], key: str) -> object:
    return reduce(getitem, key.split("."), node)


def explain(error: BaseException, argv: Sequence[str] = ()) -> str:
    """Return the user-facing message of one of the `CONFIGURATION_ERRORS`.

    Args:
        error: The error.
        argv: Command line as typed, to find the user's configuration folders and quote overrides.
    """
    if isinstance(error, MissingConfigException):
        if (folder := parsed(argv).config_path) and "/" not in (error.missing_cfg_file or ""):
            return str(ConfigError("--config-path", CONFIG_PATH_PROBLEM, folder))
        return _line_of(error, argv) + str(_missing_config(error, config_folders(argv)))
    if isinstance(error, OverrideParseException):
        return as_typed(f"{error.override}: cannot be read: {_first_line(error)}", argv)
    if isinstance(error, HydraException):
        return _line_of(error, argv) + as_typed(_composition(error), argv)
    if isinstance(error, OmegaConfBaseException):
        key = f"{error.full_key}: " if error.full_key else ""
        return f"{key}{_first_line(error)}"
    if isinstance(error, yaml.YAMLError):
        return " ".join(str(error).split())
    return str(error)


def message_of(error: BaseException, argv: Sequence[str] = ()) -> str:
    """Return the message of an error; unexpected errors include their type."""
    if isinstance(error, CONFIGURATION_ERRORS):
        return explain(error, argv)
    return str(error) if isinstance(error, MazeTrainError) else f"{type(error).__name__}: {error}"


def as_typed(message: str, argv: Sequence[str]) -> str:
    """Replace the normalised overrides in a message of Hydra by the overrides as typed."""
    message = message.replace("++env.id=", "env=")
    for word in overrides_of(argv):
        match = ASSIGNMENT.fullmatch(word)
        if match is not None:
            pattern = rf"(?<![\w.+])\+*{re.escape(match['key'])}="
            message = word[: match.start("value")].join(re.split(pattern, message))
    return message


def unsettable(error: BaseException) -> ConfigError | None:
    """Return a ConfigError for an override on which Hydra fails with a built-in exception.

    Example: `model.hidden_sizes.a=1`, a key below a list. The override is read from the traceback,
    since it is only available as a local variable of Hydra's function.

    Returns:
        The error, or None if the exception was not raised while applying an override.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        override = frame.f_locals.get("override")
        if frame.f_code.co_name == "_apply_overrides_to_config" and override is not None:
            problem = f"cannot be set in the configuration: {_first_line(error)}"
            return ConfigError(override.key_or_group, problem, override.value())
    return None


def _line_of(error: HydraException, argv: Sequence[str]) -> str:
    """Return the file and line of an invalid `override /<group>: <name>`; empty if not found."""
    folders = [*config_folders(argv), str(shipped_root())]
    group, _, name = (getattr(error, "missing_cfg_file", "") or "").rpartition("/")
    if "No match in the defaults list" in str(error):
        group, name = _not_overridden(str(error)), ""
    wanted = re.compile(rf"\s*-?\s*override\s+/?{re.escape(group)}\s*:\s*{re.escape(name)}")
    chosen = re.findall(r"experiment=(\S+)", " ".join(argv)) if group else []
    for option in chosen:
        for path in (Path(folder, "experiment", f"{option}.yaml") for folder in folders):
            lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
            for number, line in enumerate(lines, 1):
                if wanted.match(line):
                    return f"{path}, line {number}: "
    return ""


def _not_overridden(text: str) -> str:
    """Return the name of the group that Hydra could not override."""
    found = text.split("Could not override '")[1].partition("'")[0].partition("@")[0]
    return found.removeprefix("experiment/")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].strip()


def _missing_config(error: MissingConfigException, folders: Sequence[str]) -> ConfigError:
    """Return the error for an unknown option or primary config."""
    missing = (error.missing_cfg_file or "").removesuffix(".yaml")
    group, slash, name = missing.partition("/")
    if not slash:
        searched = [*folders, str(shipped_root())]
        names = config_names(folders)
        hint = did_you_mean(nearest(missing, names, count=1))
        problem = f"there is no {missing}.yaml in {', '.join(searched)}{hint or ';'}"
        return ConfigError("-cn", f"{problem} available: {', '.join(names)}", missing)
    if group == "env":
        problem = "no such option; registered ids are set in the body of a file: env: {id: "
        return ConfigError("env", f"{problem}{name}}}", name)
    if group in group_names():
        return unknown_option(group, name, folders)
    group, _, name = missing.rpartition("/")
    available = ", ".join(error.options or ()) or "none"
    return ConfigError(group, f"no such option; available: {available}", name)


def _without_comma(override: str) -> str:
    """Return a hint for numbers with commas such as `100,000`; empty for other values."""
    key, _, value = override.partition("=")
    if re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+", value):
        number = value.replace(",", "")
    elif re.fullmatch(r"-?\d+,\d+(e-?\d+)?", value):
        number = value.replace(",", ".")
    else:
        return ""
    return f"; write numbers without commas: {key}={number}"


def _composition(error: HydraException) -> str:
    """Return the message for overrides that do not match the configuration."""
    text = _first_line(error)
    if text.startswith("Ambiguous value for argument"):
        override = text.partition("'")[2].removesuffix("'")
        return (
            f"{override}: the value has commas; add -m for one run per value, or write a list [a,b]"
            f"{_without_comma(override)}"
        )
    if "No match in the defaults list" in text:
        group = _not_overridden(text)
        if text.startswith("In 'experiment/") and "@" in text:
            return f"{group}: groups in an experiment file need a slash: override /{group}"
        problem = f"{group}: not a group of the primary config (-cn)"
        if group not in group_names():
            return f"{problem}; {WITH_PLUS}"
        return f"{problem}; set single values ({group}.<key>=<value>) instead"
    if "@experiment." in text:
        return f"{text.rstrip('.')}: begin the file with the line `# @package _global_`"
    hint = f"; {WITH_PLUS}" if "To append to your config" in str(error) else ""
    cause = error.__cause__
    detail = "" if cause is None or _first_line(cause) in text else _first_line(cause)
    return ": ".join(part for part in (text.rstrip("."), detail) if part) + hint


def report(
    error: BaseException, argv: Sequence[str] = (), debug: bool = False, label: str = ""
) -> int:
    """Print an error to stderr: the message of an expected error, otherwise the traceback.

    Args:
        error: The error.
        argv: Command-line arguments as the user typed them, for messages.
        debug: Whether to also print the traceback of expected errors.
        label: Prefix of the message, such as the job of a sweep.

    Returns:
        The exit code.
    """
    if not isinstance(error, (MazeTrainError, *CONFIGURATION_ERRORS)):
        error = unsettable(error) or error
    code = _code_of(error)
    if debug or not (code == CONFIGURATION_ERROR or isinstance(error, MazeTrainError)):
        tell_traceback(error)
    elif failed_in_user_code(error) or (
        isinstance(error, EnvError) and user_cause(error) is not None
    ):
        tell_traceback(user_cause(error) or error.__cause__ or error)  # In user code.
    notify(f"{PROGRAM}: error: {rank_label()}{label}{message_of(error, argv)}", logging.ERROR)
    return code


def _code_of(error: BaseException) -> int:
    """Return the exit code for an error."""
    return CONFIGURATION_ERROR if isinstance(error, CONFIGURATION_ERRORS) else FAILURE
