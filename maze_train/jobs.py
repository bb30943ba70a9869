"""Runs one Hydra job and reports failures."""

from __future__ import annotations

import glob
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

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from maze_train.config.commands import CompareConfig, ExportConfig, PushConfig
from maze_train.config.loading import load_settings
from maze_train.config.messages import CONFIGURATION_ERRORS, explain, unsettable
from maze_train.config.options import CONFIGURATION_ERROR, DONE, FAILURE, PROGRAM, group_names
from maze_train.config.overrides import RUN_DIR_PROBLEM, overrides_of, shell_word
from maze_train.config.rollout_config import RolloutConfig, load_rollout_config
from maze_train.config.search_config import load_search_config, without_search
from maze_train.config.sweepers import stops_at_failures
from maze_train.config.sweeps import JobRecord, write_jobs
from maze_train.config.train_config import AUTO, TrainConfig
from maze_train.core.checks import expanded
from maze_train.core.errors import (
    ConfigError,
    EnvError,
    MazeTrainError,
    RunDirectoryError,
    failed_in_user_code,
    foreign_cause,
)
from maze_train.core.names import JOBS
from maze_train.core.notices import notify, say, tell_traceback, warn
from maze_train.core.run_directory import WHOLE, RunDirectory
from maze_train.run.pipeline import best_of_finished, configure, prepare

NAME, LONGEST_NAME = "tracking.name", 100
"""Setting with the name of a run, and the most characters of one that a sweep gives."""


class Job:
    """Runs a composed configuration; called by Hydra, several times in a sweep.

    Errors do not go through Hydra, which would stop a sweep and print them in its own way: they are
    printed here, and kept for the exit code.

    Args:
        argv: Arguments of the command as the user typed them, for messages.
        debug: Whether the traceback of every error is shown.
    """

    def __init__(self, argv: Sequence[str] = (), debug: bool = False) -> None:
        self.argv = list(argv)
        self.debug = debug
        self.records: list[JobRecord] = []
        self._pid = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Numbers of processes may be the same on two machines.
        self.__dict__.update(state, _pid=None)

    def __call__(self, composed: DictConfig) -> float:
        """Train, play, compare, search or export, and return the value that a sweeper optimises.

        Of training, this is the best metric; of a rollout, the mean return; of a search, the value
        of its best trial; of all else, and after a failure, NaN.
        """
        settings = HydraConfig.get()
        is_sweep = settings.mode == RunMode.MULTIRUN
        directory = settings.runtime.output_dir if is_sweep else None
        # As the user wrote them: what they refer to is resolved in the configuration.
        overrides: Any = OmegaConf.to_container(settings.overrides.task, resolve=False)
        record = JobRecord(
            number=settings.job.num if is_sweep else 0,
            settings=" ".join(str(word).lstrip("+") for word in overrides),
            run_dir=os.path.abspath(_given_directory(composed) or directory or ""),
            sweep_dir=os.path.join(settings.runtime.cwd, settings.sweep.dir) if is_sweep else "",
        )
        if is_sweep:
            say(f"{PROGRAM}: {record.title}")
            self._name_run(composed, overrides)
        started_in = os.getcwd()
        try:
            if not is_sweep and settings.run.dir != ".":
                raise unused_directory(settings)
            objective = self._work(composed, directory, overrides)()
            self.note(replace(record, objective=objective))
            if is_sweep:
                self._drop_empty(settings)
            return objective
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit(), too: it must not end the other jobs
            code = report(error, self.argv, self.debug, f"{record.label}: " if is_sweep else "")
            self.note(replace(record, error=message_of(error, self.argv), code=code))
            if is_sweep:
                self._drop_empty(settings)
                if not self._is_here or stops_at_failures(settings):
                    raise
            return math.nan
        finally:
            os.chdir(started_in)  # an environment may have left it; the next job begins here

    def _work(
        self, composed: DictConfig, directory: str | None, overrides: Sequence[str]
    ) -> Callable[[], float]:
        """Check the settings of a job, and return what does its work."""
        values = plain_values(composed)
        command = COMMANDS[command_of(HydraConfig.get().job.config_name, values)]
        return command.work(values, directory, overrides)

    def check(self, config: DictConfig) -> None:
        """Check a job of a sweep before the first one begins.

        Args:
            config: Its configuration, with that of Hydra.

        Raises:
            ConfigError: If it cannot run.
        """
        hydra = HydraConfig.get()
        directory = str(Path(str(hydra.sweep.dir), str(hydra.sweep.subdir)).absolute())
        composed = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        overrides: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
        self._work(composed, directory, overrides)

    def message_of(self, error: BaseException) -> str:
        """The message of an error of `check`."""
        return message_of(error, self.argv)

    def tell_how_to_continue(self, config: DictConfig, sweep_dir: Path) -> None:
        """Print the command that continues a sweep of training which was interrupted."""
        resume = OmegaConf.select(config, "resume", default="")
        if not self._is_here or resume not in (None, AUTO):
            return
        replaced = ("hydra.sweep.dir", "resume")
        words = [word for word in self.argv if _key_of(word) not in replaced]
        command = " ".join([PROGRAM, *map(shlex.quote, words)])
        place = shell_word("hydra.sweep.dir", str(sweep_dir))
        notify(f"to continue the sweep: {command} {place} resume={AUTO}")

    def _name_run(self, composed: DictConfig, overrides: Sequence[str]) -> None:
        """Name the run after what differs between the jobs, unless the user names it."""
        if OmegaConf.select(composed, NAME, throw_on_resolution_failure=False) != "":
            return
        fixed: set[str] = set()
        parser = OverridesParser.create()
        for word in overrides_of(self.argv):
            is_varied = False
            with suppress(HydraException):  # it is written so that the command line understands it
                is_varied = parser.parse_override(word).is_sweep_override()
            if not is_varied:
                fixed.add(_key_of(word))
        varied = [word.lstrip("+") for word in overrides if _key_of(word) not in fixed]
        name = re.sub(r"[^\w.,=+-]+", "-", ",".join(varied))
        OmegaConf.update(composed, NAME, name[:LONGEST_NAME])

    @property
    def _is_here(self) -> bool:
        """Whether this is the process of the command, and not one of a job."""
        return os.getpid() == self._pid

    def preload(self) -> None:
        """Import what training needs; processes that are forked from this one need not do so."""
        import maze_train.run.runner  # noqa: F401

        with suppress(ImportError):  # jobs report what is missing
            import torch.utils.tensorboard  # noqa: F401

    def note(self, record: JobRecord) -> None:
        """Keep what became of a job; of a sweep it is written at once."""
        self.records.append(record)
        if record.sweep_dir and self._is_here:
            try:
                write_jobs(Path(record.sweep_dir), self.records)
            except OSError as error:
                warn(f"{JOBS} could not be written: {error}")

    def exit_code(self) -> int:
        """The exit code of all jobs; a sweep ends with its comparison and the count of failures."""
        codes = [record.code for record in self.records if record.code]
        if self.records and self.records[0].sweep_dir:
            self._compare(self.records[0].sweep_dir)
            if codes:
                notify(f"{PROGRAM}: {len(codes)} of {len(self.records)} jobs failed")
        return min(codes, default=DONE)

    def _compare(self, sweep_dir: str) -> None:
        """Compare the runs of a sweep, if there are any; what prevents it costs no result."""
        if any(RunDirectory(Path(record.run_dir)).is_run for record in self.records):
            try:
                compare({"runs": [glob.escape(sweep_dir)], "output": sweep_dir}, None, ())()
            except MazeTrainError as error:
                notify(f"note: the runs are not compared: {error}")

    def _drop_empty(self, settings: Any) -> None:
        """Remove the directory that Hydra made for the job, if nothing was put there."""
        with suppress(OSError):
            os.rmdir(settings.runtime.output_dir)


def unused_directory(settings: Any) -> ConfigError:
    """The error for `hydra.run.dir`, in whose directory nothing would be; an empty one goes."""
    path = Path(settings.runtime.output_dir)
    with suppress(OSError, ValueError):
        while path.relative_to(settings.runtime.cwd).parts:
            path.rmdir()
            path = path.parent
    return ConfigError("hydra.run.dir", RUN_DIR_PROBLEM, settings.run.dir)


def _key_of(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


def command_of(name: str | None, values: Mapping[Any, Any]) -> str:
    """The command of a composed configuration.

    Args:
        name: Name of the primary config.
        values: Composed values; a primary config of the user may extend ours.
    """
    if name is not None and name in COMMANDS:
        return name
    return next(key for key, command in COMMANDS.items() if command.keys <= values.keys())


def _given_directory(composed: DictConfig) -> str | None:
    """The directory that the user names for the results, as far as it can be reported."""
    for key in ("run_dir", "output_dir", "resume"):
        found = OmegaConf.select(composed, key, throw_on_resolution_failure=False)
        if found not in (None, AUTO):
            path = expanded(str(found))
            return str(RunDirectory.to_resume(path).path) if key == "resume" else path
    return None


# -- the commands ----------------------------------------------------------------------------------
# Each checks its settings, and returns what does the work. What that calls is imported then:
# PyTorch and matplotlib take their time.

Work: TypeAlias = Callable[[], float]


def train(values: dict[str, Any], directory: str | None, given: Sequence[str]) -> Work:
    """Train a policy; settings that are given change those of a run that is continued."""
    changes: dict[str, Any] = {}
    if values.get("resume") not in (None, AUTO):
        changes = settings_of(given, values)
    elif values.get("run_dir") is None:
        values["run_dir"] = directory
    config = configure(values, changes)
    if config.resume is None and config.run_dir is not None:
        RunDirectory(Path(config.run_dir)).check_is_free()
    return partial(_train, config, skips_finished=directory is not None and config.resume == AUTO)


def _train(config: TrainConfig, skips_finished: bool) -> float:
    """Train.

    Raises:
        RunDirectoryError: If some of the results could not be written.
    """
    prepared = prepare(config)
    if skips_finished and (best := best_of_finished(prepared)) is not None:
        say(f"{prepared.resumed_dir} has finished already")
        return best
    from maze_train.run.runner import TrainingRunner

    result = TrainingRunner(prepared).run()
    if result.missing:
        remedy = "put it back" if WHOLE in result.missing else "make room"
        raise RunDirectoryError(
            f"training finished, but these could not be written to {result.run_dir}: "
            f"{', '.join(result.missing)}; {remedy} and continue the run, which writes them"
        )
    return result.best_metric


def roll_out(values: dict[str, Any], directory: str | None, given: Sequence[str]) -> Work:
    """Let a policy play episodes."""
    if values.get("output_dir") is None:
        values["output_dir"] = directory
    return partial(_roll_out, load_rollout_config(values))


def _roll_out(config: RolloutConfig) -> float:
    from maze_train.run.rollout import RolloutRunner

    return RolloutRunner(config).run().summary.return_mean


def search(values: dict[str, Any], directory: str | None, given: Sequence[str]) -> Work:
    """Run the trials of a search, and print the best ones."""
    config, settings = load_search_config(values)
    return partial(_search, config, settings, without_search(given), directory)


def _search(*args: Any) -> float:
    from maze_train.tools.search import run_search

    result = run_search(*args)
    say(f"\n{result}\n\nresults: {result.study}")
    return result.best_value


def compare(values: dict[str, Any], directory: str | None, given: Sequence[str]) -> Work:
    """Compare runs, and print the tables."""
    if isinstance(values["runs"], str):
        values["runs"] = [values["runs"]]
    return partial(_compare, load_settings(CompareConfig, values))


def _compare(config: CompareConfig) -> float:
    from maze_train.tools.compare import compare as compared

    comparison = compared(config)
    say(f"\n{comparison}\n\nresults: {comparison.output}")
    return math.nan


def export(values: dict[str, Any], directory: str | None, given: Sequence[str]) -> Work:
    """Export a policy, and print what became of it."""
    return partial(_export, load_settings(ExportConfig, values))


def _export(config: ExportConfig) -> float:
    from maze_train.tools.export import run_export

    say(f"\n{run_export(config)}")
    return math.nan


def push(values: dict[str, Any], directory: str | None, given: Sequence[str]) -> Work:
    """Upload a policy, and print where it is."""
    return partial(_push, load_settings(PushConfig, values))


def _push(config: PushConfig) -> float:
    from maze_train.tools.hub import push as pushed

    say(str(pushed(config)))
    return math.nan


class Command(NamedTuple):
    """A command, which is also the name of a primary config."""

    work: Callable[[dict[str, Any], str | None, Sequence[str]], Work]
    """Checks the settings, and returns what does the work and gives the value that a sweeper
    optimises. Called with plain values, the directory of the results unless they name one, and
    settings of the user in Hydra's spelling; a wrong setting is a ConfigError."""

    keys: frozenset[str] = frozenset()
    """Keys that only its primary config has, of those before the last one."""


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "compare": Command(compare, frozenset({"runs", "n_resamples"})),
        "export": Command(export, frozenset({"run", "format", "output"})),
        "push": Command(push, frozenset({"run", "repo_id"})),
        "rollout": Command(roll_out, frozenset({"run", "policy", "n_episodes"})),
        "search": Command(search, frozenset({"n_trials", "sampler"})),
        "train": Command(train),
    }
)


def plain_values(composed: DictConfig) -> dict[str, Any]:
    """Convert Hydra's configuration to plain values, with interpolations resolved."""
    node = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}


def settings_of(overrides: Sequence[str], composed: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name, of a group the name of its option.

    Args:
        overrides: Settings of the user, in Hydra's spelling.
        composed: Its configuration as Hydra composed it, where interpolations are resolved.

    Raises:
        ConfigError: If one deletes a setting.
    """
    settings: dict[str, Any] = {}
    groups = group_names()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.is_delete() or override.is_sweep_override():
            problem = "with resume=<run dir> settings can only be set: key=value"
            raise ConfigError(override.input_line or "", problem)
        key = override.key_or_group
        settings[key] = override.value() if key in groups else _select(composed, key)
    return settings


def _select(node: Any, key: str) -> Any:
    for part in key.split("."):
        node = node[part]
    return node


def report(
    error: BaseException, argv: Sequence[str] = (), debug: bool = False, label: str = ""
) -> int:
    """Report an error on stderr: one message if it was to be expected, else with its traceback.

    Args:
        error: The error.
        argv: Arguments of the command as the user typed them, for messages.
        debug: Whether to show the traceback in any case.
        label: Prefix of the message, such as the job of a sweep.

    Returns:
        The exit code that belongs to the error.
    """
    if not isinstance(error, (MazeTrainError, *CONFIGURATION_ERRORS)):
        error = unsettable(error) or error
    is_configuration = isinstance(error, CONFIGURATION_ERRORS)
    if debug or not (is_configuration or isinstance(error, MazeTrainError)):
        tell_traceback(error)
    elif failed_in_user_code(error) or (
        isinstance(error, EnvError) and foreign_cause(error) is not None
    ):
        tell_traceback(foreign_cause(error) or error.__cause__ or error)  # in code of the user
    notify(f"{PROGRAM}: error: {label}{message_of(error, argv)}")
    return CONFIGURATION_ERROR if is_configuration else FAILURE


def message_of(error: BaseException, argv: Sequence[str] = ()) -> str:
    """The message of an error; of one that was not to be expected with its type."""
    if isinstance(error, CONFIGURATION_ERRORS):
        return explain(error, argv)
    return str(error) if isinstance(error, MazeTrainError) else f"{type(error).__name__}: {error}"
