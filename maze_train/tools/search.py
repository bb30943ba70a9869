"""Hyperparameter searches with Optuna: study, trials, processes."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import yaml

from maze_train.config.compose import load_config
from maze_train.config.hydra_input import message_of
from maze_train.config.options import FAILURE, PROGRAM
from maze_train.config.search_config import GROUP, SearchConfig, load_search_config
from maze_train.config.sweeps import (
    LOG_FILE,
    JobRecord,
    LocalJobs,
    ProcessJob,
    StartedJob,
    tell_failure,
)
from maze_train.config.train_config import AUTO, TrainConfig
from maze_train.config.writing import MAX_BYTES, plain_values
from maze_train.core.conversion import config_to_dict
from maze_train.core.errors import (
    ConfigError,
    RunDirectoryError,
    TrainingError,
    did_you_mean,
    nearest,
)
from maze_train.core.files import atomic_write, exclusive, open_own, read_regular, writable
from maze_train.core.folders import make_folders
from maze_train.core.names import JOURNAL, METRICS, OUTPUTS, STUDY_FILE
from maze_train.core.notices import notify, say, tell_traceback, warn
from maze_train.core.plain_yaml import dump_yaml, load_yaml
from maze_train.core.report import new_figure
from maze_train.core.run_directory import objective_of
from maze_train.core.targets import TARGET, is_within, locate
from maze_train.core.text import duration, flattened, readable
from maze_train.envs.factory import EnvFactory
from maze_train.run.opponents import with_random_opponent
from maze_train.run.train import TrainingRunner
from maze_train.tools.runs import task_name
from maze_train.tools.search_report import (
    ERROR,
    SECONDS,
    SearchResult,
    Space,
    draw_search,
    optuna,
    result_of,
    shown,
    text_of,
    write_result,
)
from maze_train.training.callbacks import Callback, TrainingView
from maze_train.training.config import EvaluationConfig

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.study import Study
    from optuna.trial import FrozenTrial


STUDY = "search"
"""Name of the study in its journal."""

DEFAULTS = {"median": {"n_warmup_steps": 30}}
"""Default arguments of samplers and pruners that differ from Optuna's defaults."""

MAY_DIFFER = ("tracking", "checkpoint", "trust", "moved")
"""Sections of settings that do not affect the values of trials."""


def open_journal(directory: Path) -> BaseStorage:
    """Open the storage of the study in a directory; each process must open the storage separately.

    Raises:
        RunDirectoryError: If the file cannot be read, or is a different journal.
    """
    storages = optuna().storages
    path = directory / JOURNAL
    with reading_journal(directory):
        os.close(open_own(path, os.O_RDWR))  # Optuna itself follows links.
        storage: BaseStorage = storages.JournalStorage(
            storages.journal.JournalFileBackend(str(path))
        )
    return storage


@contextmanager
def reading_journal(directory: Path) -> Iterator[None]:
    """Convert Optuna's errors about a damaged journal to RunDirectoryError.

    Raises:
        RunDirectoryError: If reading the journal fails in this context.
    """
    damages = (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError)
    try:
        yield
    except (*damages, RuntimeError, AssertionError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise RunDirectoryError(f"{directory / JOURNAL} cannot be read: {problem}") from error


def release_journal(directory: Path) -> None:
    """Remove the journal lock of a killed process, since the lock would block Optuna.

    No other process may use the directory.

    Raises:
        RunDirectoryError: If the lock cannot be removed.
    """
    lock = directory / f"{JOURNAL}.lock"
    try:
        lock.unlink(missing_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"{lock} cannot be removed: {error}; remove the file") from error


def open_study(storage: BaseStorage, mode: str) -> Study:
    """Return the study in a storage; create a missing study.

    Args:
        storage: The storage.
        mode: `max` or `min`: whether to maximise or minimise.
    """
    study: Study = optuna().create_study(
        storage=storage, study_name=STUDY, direction=f"{mode}imize", load_if_exists=True
    )
    return study


def check_settings(directory: Path, settings: Mapping[str, Any]) -> None:
    """Write the common settings of the trials, or compare them with the existing file.

    Raises:
        ConfigError: If the existing study has different settings.
        RunDirectoryError: If the file is damaged.
    """
    path = directory / STUDY_FILE
    text = dump_yaml(dict(settings))
    if not path.exists():
        with writable("study", directory), atomic_write(path) as file:
            file.write(text.encode())
        return
    try:
        text_before = read_regular(path, MAX_BYTES).decode()
        before = flattened(plain_values(text_before))
    except (OSError, ValueError, ArithmeticError, yaml.YAMLError, AttributeError) as error:
        raise RunDirectoryError(f"{path} is damaged: {error}") from error
    now = flattened(load_yaml(text))
    for key in before | now:
        if key not in before and not key.startswith(f"{GROUP}."):
            continue  # A setting of a newer version.
        if str(before.get(key)) != str(now.get(key)) and not is_within(key, MAY_DIFFER):
            problem = f"the study in {directory} has {before.get(key)}; use this value to resume "
            problem += "the study, or set another directory: study=<directory>"
            raise ConfigError(key, problem, now.get(key))


def part_named(kind: str, node: str | Mapping[str, Any], seed: int | None = None) -> Any:
    """Build a sampler or pruner of Optuna.

    Args:
        kind: `sampler` or `pruner`.
        node: First part of the class name, or a mapping with `name` and the arguments.
        seed: Seed, if the class has a seed; added to the seed in the arguments.

    Raises:
        ConfigError: If the name is unknown, or the arguments are invalid.
    """
    given: dict[str, Any] = {"name": node} if isinstance(node, str) else dict(node)
    name, module = str(given.pop("name", "")), getattr(optuna(), f"{kind}s")
    suffix = kind.capitalize()
    classes = {
        key.removesuffix(suffix).lower(): getattr(module, key)
        for key in dir(module)
        if key.endswith(suffix) and not key.startswith("Base")
    }
    cls = classes.get(name.lower())
    if cls is None:
        hint = did_you_mean(nearest(name, classes, count=1), "", " ")
        raise ConfigError(kind, f"unknown; {hint}allowed: {', '.join(classes)}", name)
    if seed is not None and "seed" in inspect.signature(cls).parameters:
        given["seed"] = int(given.get("seed") or 0) + seed
    try:
        return cls(**{**DEFAULTS.get(name.lower(), {}), **given})
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(kind, str(error).replace(".__init__()", ""), node) from error


TEST_EPISODES = 20
"""Number of test episodes of each run, if the settings have none."""

GRID = 5
"""Interval between reports in percent of a run."""


@dataclass(frozen=True)
class TrialRecord(JobRecord):
    """Record of a finished trial; the objective is the value of the trial."""

    pruned_at: int = 0
    """Percentage of the run at which the trial was pruned; 0 if the trial was not pruned."""

    word: ClassVar[str] = "trial"


@dataclass(frozen=True)
class TrialTask:
    """Arguments of a process that runs a trial."""

    number: int
    study: Path
    """Directory of the study."""

    settings: Mapping[str, Any]
    """Settings of the runs, without seed and directory."""

    seeds: Sequence[int]
    metric: str
    """Column of metrics.csv."""

    mode: Literal["max", "min"]
    value: str
    """Value of a run, see `SearchConfig.value`."""

    pruner: Any
    """Pruner of Optuna."""

    def directory_of(self, seed: int) -> Path:
        """Return the run directory for a seed."""
        directory = self.study / str(self.number)
        return directory / f"seed_{seed}" if len(self.seeds) > 1 else directory


class PruningCallback(Callback):
    """Reports the metric of a run to the study, and stops the run if the pruner returns True.

    Trials may have epochs of different lengths, so values are reported on a common grid of
    percentages of the run. The value at a grid point is the latest value of the metric at that
    time.

    Args:
        task: The trial.
    """

    def __init__(self, task: TrialTask) -> None:
        self.pruned_at = 0
        self._metric, self._pruner = task.metric, task.pruner
        self._storage = open_journal(task.study)  # Must not be shared with the parent process.
        self._study = open_study(self._storage, task.mode)
        study_id = self._storage.get_study_id_from_name(STUDY)
        self._id = self._storage.get_trial_id_from_study_id_trial_number(study_id, task.number)

    def on_run_start(self, run: TrainingView) -> None:
        """Stop a resumed run that was already pruned."""
        self._prune(run)

    def on_epoch_end(self, run: TrainingView) -> None:
        """Report the metric if it was logged in this epoch."""
        value = run.metrics.get(self._metric, math.nan)
        percent = math.floor(100 * run.progress.fraction + 1e-9)
        known = self._storage.get_trial(self._id).intermediate_values
        if math.isfinite(value):
            for step in range(GRID, percent + 1, GRID):
                if step not in known:
                    self._storage.set_trial_intermediate_value(self._id, step, value)
        self._prune(run)

    def _prune(self, run: TrainingView) -> None:
        trial = self._storage.get_trial(self._id)
        if not run.stop_reason and trial.last_step and self._pruner.prune(self._study, trial):
            self.pruned_at = trial.last_step
            run.stop(f"pruned at {self.pruned_at} %")


def run_trial(task: TrialTask, record: TrialRecord) -> TrialRecord:
    """Run a trial; after an error, record the message and print the traceback to stderr."""
    try:
        values = []
        for seed in task.seeds:
            value, pruned_at = _run(task, seed, is_first=seed == task.seeds[0])
            values.append(value)
            if pruned_at:
                return replace(record, objective=value, pruned_at=pruned_at, code=0)
        return replace(record, objective=math.fsum(values) / len(values), code=0)
    except Exception as error:
        tell_traceback(error)
        return replace(record, error=message_of(error))


def _run(task: TrialTask, seed: int, is_first: bool) -> tuple[float, int]:
    """Start or resume a run; return its value and the percentage at which the run was pruned.

    Raises:
        TrainingError: If the run has no finite value of the metric.
    """
    run_dir = str(task.directory_of(seed))
    values = {**task.settings, "seed": seed, "run_dir": run_dir, "resume": AUTO}
    values["tracking.csv"] = True
    metric = task.metric
    pruning = PruningCallback(task) if is_first else None
    result = TrainingRunner(load_config(values), [pruning] if pruning else []).run()
    history = result.history
    found = [row[metric] for row in history if math.isfinite(row.get(metric, math.nan))]
    if not found:
        known = ", ".join(history[-1]) if history else "nothing"
        raise TrainingError(f"no finite {metric}; {METRICS} has {known}")
    value = found[-1]
    if task.value == "best":
        value = max(found) if task.mode == "max" else min(found)
    elif task.value == "test":
        value = objective_of(result.summary.as_dict(), history, metric)
    return value, pruning.pruned_at if pruning else 0


def search(
    env: object = None,
    algorithm: str | dict[str, Any] = "ppo",
    ranges: str | Mapping[str, Any] | None = None,
    **settings: object,
) -> SearchResult:
    """Search for hyperparameters with Optuna, like `maze-run search`.

        result = search(
            "CartPole-v1",
            "ppo",
            {"algorithm.lr": {"low": 1e-4, "high": 1e-2, "log": True}},
            n_trials=20,
            total_steps=20_000,
            study="studies/cartpole",
        )
        train("CartPole-v1", "ppo", **result.best)

    Trials run in forked processes, so this process must not have used a GPU.

    Args:
        env: A registered id, an environment class or function that can be imported by name, or the
            settings of the `env` section as a mapping.
        algorithm: The name of an algorithm, or its settings as a mapping with `_target_`.
        ranges: Search space by dotted setting, `{"low": a, "high": b}` or a list of values; or the
            name of a file in `conf/search`.
        **settings: Settings of `SearchConfig` and of the runs, keyed by name.

    Raises:
        ConfigError: If a setting or a range is invalid. Raised before anything is written.
        TrainingError: If all trials failed.
        MissingExtraError: If Optuna is not installed.
    """
    if env is not None and not isinstance(env, str | Mapping):
        env = {TARGET: EnvFactory.from_any(env).config.target}
    given = {} if env is None else {"env": env}
    given |= {} if ranges is None else {"search": ranges}
    config, shared = load_search_config({**given, "algorithm": algorithm, **settings})
    words = [f"{key}={text_of(value)}" for key, value in flattened(shared).items()]
    return run_search(config, shared, words)


def run_search(
    config: SearchConfig,
    settings: Mapping[str, Any],
    given: Sequence[str] = (),
    directory: str | None = None,
) -> SearchResult:
    """Start or resume a study; return its result.

    Args:
        config: The search.
        settings: Settings common to all runs, as for `load_config`.
        given: The user's overrides as on the command line, to print the best command.
        directory: Default directory of the study.

    Raises:
        ConfigError: If a setting is invalid. Raised before anything is written.
        KeyboardInterrupt: If a signal was received. Raised once all trials have ended; the study
            can be resumed.
        TrainingError: If all trials failed.
    """
    for kind in ("sampler", "pruner"):
        part_named(kind, config.value_of(kind))
    base = with_random_opponent(load_config(settings))
    if base.evaluation.opponents:
        settings = {**settings, "evaluation.opponents": base.evaluation.opponents}
    metric = config.metric or base.selection_metric
    if config.value == "test" and metric.startswith("eval/") and base.evaluation.n_episodes:
        n_episodes = base.evaluation.final_episodes or TEST_EPISODES
        settings = {**settings, "evaluation.final_episodes": n_episodes}
        base = load_config(settings)
    if not base.tracking.csv:
        notify(f"note: trials always write {METRICS}, since resuming a trial requires this file")
    space = Space(config.ranges, settings)
    default = Path(OUTPUTS, "studies", f"{task_name(config_to_dict(base))}-{base.algorithm.name}")
    path = Path(config.study or directory or default).absolute()
    with writable("study", path):
        make_folders(path)
    with exclusive(path, "searches in"):
        return _Search(config, settings, base, space, path, given).run()


@dataclass
class _Search:
    """A running search."""

    config: SearchConfig
    settings: Mapping[str, Any]
    """Settings common to all runs."""

    base: TrainConfig
    """Configuration built from `settings`."""

    space: Space
    directory: Path
    given: Sequence[str]
    """The user's overrides, as on the command line."""

    def __post_init__(self) -> None:
        config, base = self.config, self.base
        self.metric = config.metric or base.selection_metric
        evaluation = base.evaluation if config.metric is None else EvaluationConfig()
        own_mode = None if config.mode == "auto" else config.mode
        self.mode = own_mode or evaluation.selection_mode(self.metric)
        self.seed = base.seed or 0
        self._check_settings()
        release_journal(self.directory)
        self.storage = open_journal(self.directory)
        with reading_journal(self.directory):
            self.study = open_study(self.storage, self.mode)
            self._result()
        self.pool = LocalJobs(self._take, config.n_jobs, config.gpus)
        self.states = optuna().trial.TrialState

    def _check_settings(self) -> None:
        own = {
            "search": {
                key: {name: value for name, value in vars(found).items() if value is not None}
                for key, found in self.space.ranges.items()
            },
            "metric": self.metric,
            "mode": self.mode,
            "value": self.config.value,
            "n_seeds": self.config.n_seeds,
        }
        values = {**config_to_dict(self.base), "seed": self.seed}
        values = {key: value for key, value in values.items() if key not in ("run_dir", "resume")}
        check_settings(self.directory, {**own, **values})

    def run(self) -> SearchResult:
        """Run the missing trials."""
        before = len(self.study.trials)
        if before:
            is_full = before >= self.config.n_trials
            rest = "is complete; increase n_trials to run more" if is_full else "is resumed"
            notify(f"{PROGRAM}: the study in {self.directory} has {before} trials, and {rest}")
        if before < self.config.n_trials:
            self._import_parts()
        try:
            self.pool.run(self._jobs())
        except KeyboardInterrupt:
            self._write(is_final=False)
            notify(f"{PROGRAM}: run the same command again to resume the study in {self.directory}")
            raise
        result = self._write()
        if not result.best and all(row["state"] == "failed" for row in result.rows):
            raise TrainingError(
                f"all {len(result.rows)} trials failed; last error: {result.rows[-1]['error']}"
            )
        return result

    def _import_parts(self) -> None:
        """Import the modules needed for training before forking trials."""
        for name in ("learner_class", "trainer_class"):
            path = self.base.algorithm.value_of(name)
            if path:
                locate(path, f"algorithm.{name}")
        new_figure(1.0, 1.0)

    def _write(self, is_final: bool = True, with_picture: bool = True) -> SearchResult:
        """Write the tables; while the study runs, errors are only printed as warnings."""
        result = self._result()
        has_picture = with_picture and bool(result.best)
        figure = draw_search(result, self.space) if has_picture else None
        try:
            write_result(result, figure)
        except ConfigError as error:
            if is_final:
                raise
            warn(f"{error}; the search continues and will write these files later")
        return result

    def _result(self) -> SearchResult:
        return result_of(self.study, self.space, self.directory, self.metric, self.given)

    def _jobs(self) -> Iterator[ProcessJob]:
        """Yield interrupted trials, then new trials that are sampled when a process is free."""
        for trial in self.study.get_trials(states=(self.states.RUNNING,)):
            if trial.params.keys() == self.space.ranges.keys():
                with reading_journal(self.directory):  # The stored choices might differ.
                    job = self._job(trial)
                yield job
            else:  # The process was killed while sampling the settings.
                self._fail(trial.number, "the settings were not sampled")
        if not self.study.trials and self.config.begin_with_given:
            try:
                self.study.enqueue_trial(self.space.given(self.base))
            except ConfigError as error:
                notify(f"note: no trial uses the configured settings: {error}")
        while True:
            waiting = self.study.get_trials(states=(self.states.WAITING,))
            number = len(self.study.trials) - len(waiting)
            if number >= self.config.n_trials:
                return
            # A new sampler per trial, so that a resumed study samples the same settings.
            self.study.sampler = part_named("sampler", self.config.sampler, self.seed + number)
            with reading_journal(self.directory):  # The stored choices might differ.
                trial_number = self.study.ask(self.space.distributions).number
                job = self._job(self.study.trials[trial_number])
            yield job

    def _job(self, trial: FrozenTrial) -> ProcessJob:
        found = self.space.settings_of(trial.params)
        task = TrialTask(
            number=trial.number,
            study=self.directory,
            settings={**self.settings, **found},
            seeds=range(self.seed, self.seed + self.config.n_seeds),
            metric=self.metric,
            mode=self.mode,
            value=self.config.value,
            pruner=part_named("pruner", self.config.pruner),
        )
        words = " ".join(f"{key}={shown(text_of(value))}" for key, value in found.items())
        directory = self.directory / str(trial.number)
        record = TrialRecord(trial.number, words, str(directory), code=FAILURE)
        return ProcessJob(record, directory / LOG_FILE, lambda: run_trial(task, record))

    def _take(self, job: StartedJob) -> None:
        """Report the outcome of a trial to the study; an interrupted trial is only printed."""
        record = job.outcome
        assert isinstance(record, TrialRecord)
        took = duration(job.seconds)
        trial = self.study.trials[record.number]
        seconds = trial.user_attrs.get(SECONDS, 0.0) + job.seconds
        self.storage.set_trial_user_attr(trial._trial_id, SECONDS, seconds)
        if job.result is None and self.pool.is_ending:
            say(f"{PROGRAM}: {record.name}: interrupted after {took}")
            return
        if record.error:
            self._fail(record.number, record.error)
            tell_failure(job)
        elif record.pruned_at:
            self.study.tell(record.number, state=self.states.PRUNED)
            say(f"{PROGRAM}: {record.name}: pruned at {record.pruned_at} % after {took}")
        else:
            self.study.tell(record.number, record.objective)
            best = f"best {readable(self.study.best_value)} of trial {self.study.best_trial.number}"
            value = readable(record.objective)
            say(f"{PROGRAM}: {record.name}: {value} after {took}; {best}")
        self._write(is_final=False, with_picture=False)

    def _fail(self, number: int, error: str) -> None:
        trial = self.study.trials[number]
        self.storage.set_trial_user_attr(trial._trial_id, ERROR, error)
        self.study.tell(number, state=self.states.FAIL)
