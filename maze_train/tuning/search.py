"""Searches for settings: trials that Optuna chooses, in processes, with a study to go on with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from maze_train.comparison.runs import task_name
from maze_train.config.job_processes import (
    FAILURE,
    LOG_FILE,
    PROGRAM,
    JobProcesses,
    ProcessJob,
    RunningJob,
)
from maze_train.config.search_config import load_search_config
from maze_train.config.writing import config_to_dict, writable
from maze_train.envs.factory import EnvFactory
from maze_train.errors import ConfigError, TrainingError
from maze_train.locks import exclusive
from maze_train.notices import say, tell
from maze_train.runners.pipeline import configure
from maze_train.targets import TARGET
from maze_train.tracking.formatting import duration, readable
from maze_train.tracking.services import flattened
from maze_train.tracking.tracker import VALIDATION_LOSS
from maze_train.training.config import EvaluationConfig
from maze_train.tuning.report import (
    ERROR,
    SECONDS,
    SearchResult,
    result_of,
    write_picture,
    write_tables,
)
from maze_train.tuning.space import Space, shown, text_of
from maze_train.tuning.study import (
    check_settings,
    open_journal,
    open_study,
    part_named,
    reading_journal,
    release_journal,
)
from maze_train.tuning.trial import TrialRecord, TrialTask, run_trial

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from optuna.trial import FrozenTrial

    from maze_train.config.search_config import SearchConfig
    from maze_train.config.train_config import TrainConfig


def search(
    env: Any = None,
    algorithm: str | dict[str, Any] = "ppo",
    ranges: str | Mapping[str, Any] | None = None,
    **settings: Any,
) -> SearchResult:
    """Search for good settings: `maze-run -cn search`.

        result = search(
            "CartPole-v1",
            "ppo",
            {"algorithm.lr": {"low": 1e-4, "high": 1e-2, "log": True}},
            n_trials=20,
            total_steps=20_000,
            study="studies/cartpole",
        )
        train("CartPole-v1", "ppo", **result.best)

    Trials run in forks of this process, which must not have used a GPU.

    Args:
        env: A registered id, an environment class or function with a name, or the settings of the
            `env` section as a mapping; as in `train`.
        algorithm: The name of an algorithm, or its settings as a mapping with `_target_`.
        ranges: Ranges by dotted setting, `{"low": a, "high": b}` or a list of values; or the name
            of a file of `conf/search`.
        **settings: Settings of `SearchConfig` and of the runs by name.

    Raises:
        ConfigError: If a setting or a range is wrong; nothing has been written then.
        TrainingError: If all trials failed.
        MissingExtraError: If Optuna is not installed.
    """
    if env is not None and not isinstance(env, str | dict):
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
    """Begin a study, or go on with it; returns its result.

    Args:
        config: The search.
        settings: Values of the settings that all runs have, as `configure` takes them.
        given: The settings of the user, as on the command line, for the best command.
        directory: Directory of the study, unless the configuration names one.

    Raises:
        ConfigError: If a setting is wrong; nothing has been written then.
        KeyboardInterrupt: After a signal, when all trials have ended; the study can go on.
        TrainingError: If all trials failed.
    """
    for kind in ("sampler", "pruner"):
        part_named(kind, getattr(config, kind))
    base = configure(settings)
    if not base.tracking.csv:
        tell("note: trials write metrics.csv all the same, since they go on with what it holds")
    space = Space(config.ranges, settings)
    default = Path("outputs", "studies", f"{task_name(config_to_dict(base))}-{base.algorithm.name}")
    path = Path(config.study or directory or default).absolute()
    with writable("study", path):
        path.mkdir(parents=True, exist_ok=True)
    with exclusive(path, "searches in"):
        return _Search(config, settings, base, space, path, given).run()


class _Search:
    """A search under way.

    Args:
        config: The search.
        settings: Values of the settings that all runs have.
        base: The configuration that they make.
        space: The ranges.
        directory: Directory of the study.
        given: The settings of the user, as on the command line.
    """

    def __init__(
        self,
        config: SearchConfig,
        settings: Mapping[str, Any],
        base: TrainConfig,
        space: Space,
        directory: Path,
        given: Sequence[str],
    ) -> None:
        self.config, self.settings, self.base = config, settings, base
        self.space, self.directory, self.given = space, directory, given
        self.metric = config.metric or _selection_metric(base)
        evaluation = base.evaluation if config.metric is None else EvaluationConfig()
        own_mode = None if config.mode == "auto" else config.mode
        self.mode = own_mode or evaluation.selection_mode(self.metric)
        self.seed = base.seed or 0
        self._check_settings()
        release_journal(directory)
        self.storage = open_journal(directory)
        with reading_journal(directory):
            self.study = open_study(self.storage, self.mode)
            self._result()
        self.processes = JobProcesses(self._take, config.n_jobs, config.gpus)

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
        """Run the trials that are missing."""
        before = len(self.study.trials)
        if before:
            is_full = before >= self.config.n_trials
            rest = "goes on" if not is_full else "begins no other one; set n_trials to have more"
            tell(f"{PROGRAM}: the study in {self.directory} has {before} trials, and {rest}")
        try:
            self.processes.run(self._jobs())
        except KeyboardInterrupt:
            self._write()
            tell(f"{PROGRAM}: the same command goes on with the study in {self.directory}")
            raise
        result = self._write()
        if not result.best and all(row["state"] == "failed" for row in result.rows):
            raise TrainingError(
                f"all {len(result.rows)} trials failed; the last one: {result.rows[-1]['error']}"
            )
        return result

    def _write(self) -> SearchResult:
        result = self._result()
        write_tables(result)
        write_picture(result, self.study, self.space)
        return result

    def _result(self) -> SearchResult:
        return result_of(self.study, self.space, self.directory, self.metric, self.given)

    # -- trials ----------------------------------------------------------------------------------

    def _jobs(self) -> Iterator[ProcessJob]:
        """Trials that were interrupted, then new ones, each chosen when there is room for it."""
        from optuna.trial import TrialState

        for trial in self.study.get_trials(states=(TrialState.RUNNING,)):
            if trial.params.keys() == self.space.ranges.keys():
                yield self._job(trial)
            else:  # the process ended while the settings were chosen
                self._fail(trial.number, "its settings were not chosen")
        if not self.study.trials and self.config.begin_with_given:
            try:
                self.study.enqueue_trial(self.space.given(self.base))
            except ConfigError as error:
                tell(f"note: no trial has the settings as they are: {error}")
        while True:
            waiting = self.study.get_trials(states=(TrialState.WAITING,))
            number = len(self.study.trials) - len(waiting)
            if number >= self.config.n_trials:
                return
            # A new one for each trial, so that a study that was stopped goes on as if it was not.
            self.study.sampler = part_named("sampler", self.config.sampler, self.seed + number)
            trial_number = self.study.ask(self.space.distributions).number
            yield self._job(self.study.trials[trial_number])

    def _job(self, trial: FrozenTrial) -> ProcessJob:
        found = self.space.settings_of(trial.params)
        task = TrialTask(
            number=trial.number,
            study=self.directory,
            settings={**self.settings, **found},
            seeds=range(self.seed, self.seed + self.config.n_seeds),
            metric=self.config.metric,
            mode=self.mode,
            value=self.config.value,
            pruner=part_named("pruner", self.config.pruner),
        )
        words = " ".join(f"{key}={shown(text_of(value))}" for key, value in found.items())
        directory = self.directory / str(trial.number)
        record = TrialRecord(trial.number, words, str(directory), code=FAILURE)
        return ProcessJob(record, directory / LOG_FILE, lambda: run_trial(task, record))

    def _take(self, job: RunningJob) -> None:
        """Tell the study what became of a trial; one that a signal ended can go on."""
        from optuna.trial import TrialState

        record = job.outcome
        assert isinstance(record, TrialRecord)
        took = duration(job.seconds)
        trial = self.study.trials[record.number]
        seconds = trial.user_attrs.get(SECONDS, 0.0) + job.seconds
        self.storage.set_trial_user_attr(trial._trial_id, SECONDS, seconds)
        if job.result is None and self.processes.is_ending:
            say(f"{PROGRAM}: {record.name}: interrupted after {took}")
            return
        if record.error:
            self._fail(record.number, record.error)
            tell(f"{PROGRAM}: error: {record.label}: {record.error}\n  its output: {job.log}")
        elif record.pruned_at:
            self.study.tell(record.number, state=TrialState.PRUNED)
            say(f"{PROGRAM}: {record.name}: pruned at {record.pruned_at} % after {took}")
        else:
            self.study.tell(record.number, record.objective)
            best = f"best {readable(self.study.best_value)} of trial {self.study.best_trial.number}"
            value = readable(record.objective)
            say(f"{PROGRAM}: {record.name}: {value} after {took}; {best}")
        write_tables(self._result())

    def _fail(self, number: int, error: str) -> None:
        from optuna.trial import TrialState

        trial = self.study.trials[number]
        self.storage.set_trial_user_attr(trial._trial_id, ERROR, error)
        self.study.tell(number, state=TrialState.FAIL)


def _selection_metric(config: TrainConfig) -> str:
    """The metric that selects the best policy, as far as the settings say it."""
    evaluation, env = config.evaluation, config.env
    has_env = env.id is not None or env.target is not None
    if config.algorithm.learns_from == "dataset" and evaluation.goes_by_loss(has_env):
        return VALIDATION_LOSS
    return evaluation.selection_metric
