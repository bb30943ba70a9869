"""Runs one Hydra job and reports failures."""

from __future__ import annotations

import glob
import logging
import math
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from maze_train.config.commands import CheckConfig, CompareConfig, ExportConfig, PushConfig
from maze_train.config.compose import build_config, composed_by_hydra, load_settings
from maze_train.config.hydra_input import (
    CONFIGURATION_ERRORS,
    ComposedJob,
    Task,
    as_given,
    given_values,
    key_of,
    message_of,
    settings_of,
    unsettable,
    varied_keys,
)
from maze_train.config.options import (
    CONFIGURATION_ERROR,
    DONE,
    FAILURE,
    PROGRAM,
    config_folders,
    options_below,
)
from maze_train.config.rollout_config import RolloutConfig, rollout_config
from maze_train.config.search_config import SearchConfig, load_search_config, without_search
from maze_train.config.sweeps import JobRecord, write_jobs
from maze_train.config.train_config import AUTO, TrainConfig
from maze_train.core.checks import expanded, matching_folders
from maze_train.core.errors import (
    ConfigError,
    EnvError,
    MazeTrainError,
    RunDirectoryError,
    TrainingError,
    failed_in_user_code,
    user_cause,
)
from maze_train.core.names import JOBS
from maze_train.core.notices import notify, say, tell_traceback, warn
from maze_train.core.run_directory import WHOLE, RunDirectory, objective_of
from maze_train.core.text import shell_word
from maze_train.core.torchrun import rank_label
from maze_train.run.resuming import restarted_run, resumed_config
from maze_train.training.outcome import Preempted

NAME, GROUP, LONGEST_NAME = "tracking.name", "tracking.group", 100
"""Settings with the name and the group of a run, and maximum length of a generated name."""


class Job(Task):
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
        work = command.work(values, job.directory, job.overrides)
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
                compare({"runs": [glob.escape(sweep_dir)], "output": sweep_dir}, None, ())()
            except MazeTrainError as error:
                notify(f"note: the runs are not compared: {error}")


def command_of(name: str | None, values: Mapping[Any, Any]) -> str:
    """Return the command of a composed configuration.

    Args:
        name: Name of the primary config.
        values: Composed values, used if the user's primary config extends a command.
    """
    if name is not None and name in COMMANDS:
        return name
    return next(key for key, command in COMMANDS.items() if command.keys <= values.keys())


def _given_directory(select: Callable[[str], object]) -> str | None:
    """Return the output directory set by the user, for the record of a job."""
    for key in ("run_dir", "output_dir", "resume"):
        found = select(key)
        if found not in (None, AUTO):
            path = expanded(str(found))
            return str(RunDirectory.to_resume(path).path) if key == "resume" else path
    return None


# Each function checks its settings and returns the function that runs the command. Modules are
# imported when the command runs, because PyTorch and matplotlib are slow to import.

Work: TypeAlias = Callable[[], float]


def train(values: dict[str, Any], directory: str | None, given: Sequence[str]) -> Work:
    """Train a policy, or resume a run with changed settings."""
    if values.get("resume") not in (None, AUTO):
        config = resumed_config(str(values["resume"]), settings_of(given, values))
    else:
        if values.get("run_dir") is None:
            values["run_dir"] = directory
        config = build_config(composed_by_hydra("train", values, given_values(given)))
    if config.resume is None and config.run_dir is not None and restarted_run() is None:
        RunDirectory(Path(config.run_dir)).check_is_free()
    return partial(_train, config, skips_finished=directory is not None and config.resume == AUTO)


def _train(config: TrainConfig, skips_finished: bool) -> float:
    """Train and return the objective of the run, see `objective_of`.

    Raises:
        RunDirectoryError: If some of the results could not be written.
    """
    from maze_train.run.train import TrainingRunner

    if skips_finished:
        from maze_train.run.build import finished_objective

        objective = finished_objective(config)
        if objective is not None:
            say(f"{config.run_dir} has already finished")
            return objective
    result = TrainingRunner(config).run()
    if result.missing:
        remedy = "restore it" if WHOLE in result.missing else "free disk space"
        raise RunDirectoryError(
            f"training finished, but some results could not be written to {result.run_dir}: "
            f"{', '.join(result.missing)}; {remedy} and resume the run to write them"
        )
    return objective_of(result.summary.as_dict(), result.history, config.selection_metric)


def roll_out(values: dict[str, Any], directory: str | None, given: Sequence[str]) -> Work:
    """Play episodes with a policy, or with each policy that a pattern in `run` matches."""
    if values.get("output_dir") is None:
        values["output_dir"] = directory
    values = composed_by_hydra("rollout", values, {}).values
    run = values.get("run")
    if not isinstance(run, str) or not glob.has_magic(run) or os.path.exists(expanded(run)):
        return partial(_roll_out, rollout_config(values))
    configs = {
        name: rollout_config({**values, "run": path})
        for name, path in matching_folders("run", run).items()
    }
    return partial(_roll_out_each, configs)


def _roll_out(config: RolloutConfig) -> float:
    from maze_train.run.rollout import RolloutRunner

    return RolloutRunner(config).run().summary.return_mean


def _roll_out_each(configs: Mapping[str, RolloutConfig]) -> float:
    from maze_train.run.rollout_table import roll_out_each

    return roll_out_each(configs)


def search(values: dict[str, Any], directory: str | None, given: Sequence[str]) -> Work:
    """Run the trials of a search and print the best trials."""
    config, settings = load_search_config(values)
    return partial(_search, config, settings, without_search(as_given(given)), directory)


def _search(
    config: SearchConfig, settings: dict[str, Any], given: list[str], directory: str | None
) -> float:
    from maze_train.tools.search import run_search

    result = run_search(config, settings, given, directory)
    say(f"\n{result}\n\nresults: {result.study}")
    return result.best_value


def check(values: dict[str, Any], directory: str | None, given: Sequence[str]) -> Work:
    """Check an environment and print the report."""
    return partial(_check, load_settings(CheckConfig, values))


def _check(config: CheckConfig) -> float:
    """Check an environment.

    Raises:
        EnvError: If a check failed.
    """
    from maze_train.run.check import check_env

    report = check_env(config.env, seed=config.seed, n_steps=config.n_check_steps)
    if report.problems:
        raise EnvError(str(report))
    say(str(report))
    return math.nan


def compare(values: dict[str, Any], directory: str | None, given: Sequence[str]) -> Work:
    """Compare runs and print the tables."""
    if isinstance(values["runs"], str):
        values["runs"] = [values["runs"]]
    return partial(_compare, load_settings(CompareConfig, values))


def _compare(config: CompareConfig) -> float:
    from maze_train.tools.compare import compare as compared

    comparison = compared(config)
    say(f"\n{comparison}\n\nresults: {comparison.output}")
    return math.nan


def export(values: dict[str, Any], directory: str | None, given: Sequence[str]) -> Work:
    """Export a policy and print a summary."""
    return partial(_export, load_settings(ExportConfig, values))


def _export(config: ExportConfig) -> float:
    from maze_train.tools.export import run_export

    say(f"\n{run_export(config)}")
    return math.nan


def push(values: dict[str, Any], directory: str | None, given: Sequence[str]) -> Work:
    """Upload a policy and print its address."""
    return partial(_push, load_settings(PushConfig, values))


def _push(config: PushConfig) -> float:
    from maze_train.tools.hub import push as pushed

    say(str(pushed(config)))
    return math.nan


class Command(NamedTuple):
    """A command of `maze-run`; a primary config has the same name."""

    work: Callable[[dict[str, Any], str | None, Sequence[str]], Work]
    """Checks the settings and returns the function that runs the command and returns the objective
    value. Called with plain values, the default output directory, and the user's overrides in
    Hydra's spelling. Raises ConfigError if a setting is invalid."""

    keys: frozenset[str] = frozenset()
    """Keys by which the command is recognised if the user's primary config has a different name."""


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "check": Command(check, frozenset({"n_check_steps"})),
        "compare": Command(compare, frozenset({"runs", "n_resamples"})),
        "export": Command(export, frozenset({"run", "format", "output"})),
        "push": Command(push, frozenset({"run", "repo_id"})),
        "rollout": Command(roll_out, frozenset({"run", "policy", "n_episodes"})),
        "search": Command(search, frozenset({"n_trials", "sampler"})),
        "train": Command(train),
    }
)


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
