"""Resuming a run: its directory, changed settings, and the state of a checkpoint."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from maze_train.config.compose import (
    PARTS,
    Composed,
    build_config,
    choices_in,
    names_in,
    nested,
    options,
)
from maze_train.config.removed import check_removed, without_removed
from maze_train.config.results import (
    content_digest,
    digests_of_run,
    leaves,
    matters,
    place_of_name,
    texts_of,
)
from maze_train.config.stored import config_text, is_signed, read_settings, settings_of_run
from maze_train.config.train_config import AUTO, RunnerConfig, TrainConfig
from maze_train.config.trust import check_given, given_in_python, modules_to_trust
from maze_train.core.checks import absolute_path
from maze_train.core.conversion import config_to_dict
from maze_train.core.errors import ConfigError, RunDirectoryError
from maze_train.core.files import read_regular
from maze_train.core.names import CONFIG
from maze_train.core.notices import notify, warn
from maze_train.core.report import text_table
from maze_train.core.run_directory import (
    FAILURES,
    MetricsRow,
    RunDirectory,
    checkpoint_name,
    objective_of,
)
from maze_train.core.targets import TARGET, InlineObject, arguments_for, has_no_name, is_within
from maze_train.core.text import importable, shell_word
from maze_train.core.torchrun import TorchrunVariables
from maze_train.training.config import RANDOM_OPPONENT
from maze_train.training.outcome import LIMITS

if TYPE_CHECKING:
    from maze_train.core.types import Tensor
    from maze_train.training.checkpoints import Checkpoint, CheckpointInfo, CheckpointStore
    from maze_train.training.trainer import Trainer


class Resumption:
    """Resumes a run from one of its checkpoints.

    Args:
        directory: Directory of the run.
        resume: Setting that names the run; may name a checkpoint.

    Attributes:
        checkpoint: Checkpoint to resume from; None: the run restarts at step 0.
    """

    def __init__(self, directory: Path, resume: str | None) -> None:
        from maze_train.training.checkpoints import CheckpointStore

        self.directory = directory
        self._name = checkpoint_name(resume)
        self._store = CheckpointStore(RunDirectory(directory).checkpoints)
        self.checkpoint = self._store.find(self._name)
        self.has_damaged_metrics = False

    def read(self) -> Checkpoint | None:
        """Read the checkpoint to resume from; None if there is no checkpoint.

        Raises:
            RunDirectoryError: If all checkpoints are damaged, or the checkpoint in `resume` is
                damaged or missing.
        """
        return self._store.load(self._name)

    def checked(self, config: TrainConfig, notes: bool = True) -> TrainConfig:
        """Compare the settings with the stored settings; see `continued`."""
        return continued(config, self.directory, self.checkpoint, notes)

    def objective(self, settings: str, metric: str) -> float | None:
        """Return the objective of a run that has already finished, see `objective_of`.

        Args:
            settings: Configuration of the resumed run as text.
            metric: Metric that selects the best policy.

        Returns:
            The objective; None if the run is unfinished or the result is unknown.
        """
        last, run = self.checkpoint, RunDirectory(self.directory)
        try:
            # Without checkpoints, the settings are stored only in the configuration file.
            stored = last.settings if last else read_regular(run.config).decode()
            summary = run.outcome
            is_over = str(summary["stop_reason"]) not in ("", *FAILURES)
            is_last = last is None or last.updates == int(summary["updates"])
            objective = objective_of(summary, run.rows(), metric)
        except (OSError, RunDirectoryError, ValueError, LookupError, TypeError):
            return None
        if not (is_over and is_last and stored == settings):
            return None
        return objective

    def load(self, store: CheckpointStore, config: TrainConfig) -> Checkpoint | None:
        """Load and check the checkpoint to resume from; None without a checkpoint.

        Args:
            store: The checkpoints of the run, whose directory must be locked.
            config: Configuration of the resumed run.

        Raises:
            ConfigError: If the checkpoint is damaged, and the settings differ from the settings of
                the earlier checkpoint that is loaded instead.
            RunDirectoryError: If all checkpoints are damaged, or the checkpoint in `resume` is
                damaged or missing.
        """
        found, compared = store.load(self._name), self.checkpoint
        if found is not None:
            if compared is None or compared.path != found.path:
                continued(config, self.directory, found)
            reason = RunDirectory(self.directory).outcome.get("stop_reason", "")
            if reason not in ("", *FAILURES, *LIMITS):
                notify(f"note: continuing a run that was stopped by a callback ({reason})")
        return found

    def restore(self, trainer: Trainer, checkpoint: Checkpoint) -> None:
        """Restore the state of the trainer from the checkpoint.

        Raises:
            RunDirectoryError: If the algorithm or the networks differ.
        """
        from maze_train.run.saved_policies import weights_that_differ

        with fitting(checkpoint):
            saved = by_name(checkpoint.state["learners"]["learner"]["modules"])
            if differing := weights_that_differ(saved, by_name(trainer.learners.get_weights())):
                raise does_not_fit(checkpoint, f"weights differ: {differing}")
            trainer.load_state_dict(checkpoint.state)

    def past_rows(self, checkpoint: Checkpoint, has_table: bool) -> tuple[MetricsRow, ...]:
        """Return the rows of metrics up to the checkpoint; empty if the table is damaged.

        Args:
            checkpoint: The checkpoint.
            has_table: Whether the table must have a row for each epoch.
        """
        run = RunDirectory(self.directory)
        # The checkpoint contains the rows that wait for the results of an evaluation.
        last_epoch = checkpoint.epoch - len(checkpoint.state.get("rows", ()))
        try:
            rows = run.rows(last_epoch)
        except RunDirectoryError as error:
            self.has_damaged_metrics = True
            kept = f"the table was renamed to {run.damaged_metrics.name}"
            warn(f"{error}; {kept}, and a new table begins after {checkpoint.path.name}")
            return ()
        if has_table and len(rows) < last_epoch:
            missing = f"{last_epoch - len(rows)} of {last_epoch} epochs"
            warn(f"{run.metrics.name} lacks {missing} before {checkpoint.path.name}")
        return tuple(rows)


def run_to_resume(config: TrainConfig) -> Path | None:
    """Return the directory of the run to resume, or None for a new run.

    Raises:
        ConfigError: If the directory given by `resume` contains no run.
    """
    if config.resume is None:
        return None
    if config.resume == AUTO:
        assert config.run_dir is not None
        run = RunDirectory(Path(config.run_dir))
        return run.path if run.config.exists() else None
    directory = _run_dir_of(config.resume)
    if config.run_dir is not None and Path(config.run_dir) != directory:
        problem = f"resume continues in {directory}; remove run_dir"
        raise ConfigError("run_dir", problem, config.run_dir)
    return directory


def _run_dir_of(resume: str) -> Path:
    run = RunDirectory.to_resume(absolute_path("resume", resume))
    if not run.is_run:
        problem = f"no run found; expected a directory with {CONFIG}, or auto with run_dir"
        raise ConfigError("resume", problem, resume)
    return run.path


def resumed_config(resume: str, changes: Mapping[str, Any]) -> TrainConfig:
    """Return the stored configuration of a run with changes.

    Args:
        resume: Directory of a run, or of one of its checkpoints.
        changes: Settings as for `load_config`. If the runner is a name, such as `runner="local"`,
            the settings common to all runners (for example `concurrency`) keep their stored values.

    Raises:
        ConfigError: If the directory contains no run, `changes` selects an experiment, the run
            requires untrusted code (see `StoredSettings`), or Python objects are missing.
        RunDirectoryError: If the stored configuration is damaged.
    """
    if "experiment" in changes:
        problem = "a resumed run keeps its stored settings; remove this setting"
        raise ConfigError("experiment", problem, changes["experiment"])
    directory = _run_dir_of(resume)
    choices, others = choices_in("train", {**changes, "resume": resume})
    sections = {name: options("train", ((name, choices[name]),))[name] for name in choices}
    sections |= nested({key: value for key, value in others.items() if "." not in key})
    single = {key: value for key, value in others.items() if "." in key}
    own, removed = without_removed(nested(single, sections))
    stored = read_settings(directory, own.get("trust"), own)
    if not isinstance(stored.values.get("runner"), dict):
        raise RunDirectoryError(f"{stored.path} is damaged: no runner is set")
    check_removed({**stored.removed, **removed})
    if "runner" in choices:
        shared = {field.name for field in fields(RunnerConfig)}
        kept = {key: value for key, value in stored.values["runner"].items() if key in shared}
        sections["runner"] = {**sections["runner"], **kept}
    values = nested(single, {**stored.values, **sections})
    check_given(values)
    stored.check(values, PARTS)
    return build_config(Composed(values, names_in(choices, others)))


def after_restart(config: TrainConfig) -> TrainConfig:
    """Return a configuration that resumes the run of an earlier torchrun attempt, if any."""
    earlier = restarted_run()
    return config if earlier is None else replace(config, resume=earlier, run_dir=None)


def restarted_run() -> str | None:
    """Return the directory of the run to resume after a restart by torchrun; None otherwise."""
    variables = TorchrunVariables.read()
    if variables is None or not variables.attempt:
        return None
    from maze_train.learner.torchrun import restarted_run

    return restarted_run(variables)


def continued(
    config: TrainConfig,
    directory: Path,
    checkpoint: CheckpointInfo | None = None,
    notes: bool = True,
) -> TrainConfig:
    """Compare the configuration of a resumed run with the stored settings; restore the seed.

    All changed settings are printed with both values. If a changed setting affects the results, an
    error is raised.

    Args:
        config: The configuration.
        directory: Directory of the run.
        checkpoint: Checkpoint to resume from, which contains the stored settings. None: the run
            restarts at step 0, `config.yaml` contains the stored settings, and all settings may
            change.
        notes: Whether to print the changed settings.

    Returns:
        The configuration with the seed of the run, and the random opponents of the run, if any.

    Raises:
        ConfigError: If a setting that affects the results has changed.
        RunDirectoryError: If the stored configuration is damaged.
    """
    if checkpoint is not None:
        place = f"checkpoint {checkpoint.path}"
        stored = settings_of_run(checkpoint.path, config, text=checkpoint.settings)
    else:
        place, stored = (
            f"the run in {directory}",
            settings_of_run(RunDirectory(directory).config, config),
        )
    if config.seed is None:
        config = replace(config, seed=stored.seed)
    evaluation, before = config.evaluation, stored.evaluation.opponents
    # Defaults that earlier versions stored.
    if not (evaluation.opponents or evaluation.metric) and before == RANDOM_OPPONENT:
        evaluation = replace(evaluation, opponents=before)
    if not evaluation.concurrency:
        evaluation = replace(evaluation, concurrency=stored.evaluation.concurrency)
    config = replace(config, evaluation=evaluation)
    before, now = leaves(config_to_dict(stored)), leaves(config_to_dict(config))
    changed = _without_sections(
        [
            key
            for key in sorted({*before, *now})
            if before.get(key) != now.get(key)
            and not _is_given_again(before.get(key), now.get(key))
        ],
        stored,
        config,
    )
    refused = [
        key
        for key in changed
        if checkpoint is not None and (matters(key, config) or matters(key, stored))
    ]
    known = digests_of_run(directory) if refused else {}
    refused = [
        key
        for key in refused
        if not has_moved(key, before.get(key), now.get(key), known, config.moved)
    ]
    own = ("resume", "run_dir", "trust", "moved")
    free = [key for key in changed if key not in (*refused, *own)]
    table = _table(before, now, {**dict.fromkeys(refused, "refused"), **dict.fromkeys(free, "")})
    if refused:
        key = refused[0]
        old, new = before.get(key), now.get(key)
        is_place = isinstance(old, str) and isinstance(new, str) and place_of_name(new)
        moved = shlex.quote(f"moved=[{key}]")
        hint = f"; if only the path has changed, set {moved}" if is_place else ""
        others = f"; all changed settings:{table}" if len(refused + free) > 1 else ""
        raise ConfigError(
            key.removesuffix(f".{TARGET}"),
            f"{place} has {before.get(key)!r}, and this setting affects the results; keep the old "
            "value, or start a new run from its policy with "
            f"{shell_word('base_run', str(directory))}{hint}{others}",
            now.get(key),
        )
    if checkpoint is not None:
        _check_limits(config, checkpoint, changed)
    if free and notes:
        notify(f"changed since {place}:{table}")
    return config


def has_moved(
    key: str, before: object, now: object, known: Mapping[str, str], moved: Sequence[str]
) -> bool:
    """Return whether only the path of the files or runs in a setting has changed.

    Args:
        key: Name of the setting.
        before: Value stored in the run: a string or a list of strings.
        now: Value for the resumed run.
        known: Digests of the files at the start of the run, see `digests_of_run`.
        moved: Setting `moved`: names of settings with a new path.
    """
    old, new = texts_of(before), texts_of(now)
    if not (old and new):
        return False
    if is_within(key, moved):
        return all(map(place_of_name, new))
    digest = content_digest(new)
    return bool(digest) and digest in (known.get(key), content_digest(old))


def _check_limits(config: TrainConfig, checkpoint: CheckpointInfo, changed: list[str]) -> None:
    """Check that changed limits exceed the completed steps and epochs.

    Raises:
        ConfigError: If `total_steps` or `algorithm.n_epochs` is too small.
    """
    limits = {
        "total_steps": (config.total_steps, checkpoint.env_steps, "environment steps"),
        "algorithm.n_epochs": (config.algorithm.n_epochs, checkpoint.epoch, "epochs"),
    }
    for key, (limit, done, unit) in limits.items():
        if key in changed and limit and limit < done:
            raise ConfigError(
                key,
                f"the run has already completed {done:,} {unit} ({checkpoint.path}); increase the "
                "limit, or use resume=<an earlier checkpoint>",
                limit,
            )


def _is_given_again(before: object, now: object) -> bool:
    """Return whether both values are objects without a dotted path; these are not compared."""
    return isinstance(now, InlineObject) and isinstance(before, str) and has_no_name(before)


def _table(before: Mapping[str, Any], now: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    """Format a table with name, both values and note of each setting in `notes`."""
    rows = [
        {
            "setting": key.removesuffix(f".{TARGET}"),
            "before": repr(before.get(key)),
            "now": repr(now.get(key)),
            "": note,
        }
        for key, note in notes.items()
    ]
    return "".join(f"\n  {line}" for line in text_table(rows))


def _without_sections(changed: list[str], *configs: TrainConfig) -> list[str]:
    """Return the changed keys, starting with the classes of sections.

    If the class of a section has changed, the other keys of the section are only returned if the
    class may change on resume but the key may not.
    """
    fixed = {key for key in changed if any(matters(key, config) for config in configs)}
    targets = [key for key in changed if key.endswith(f".{TARGET}")]
    sections = tuple(key.removesuffix(TARGET) for key in targets)
    free = tuple(key.removesuffix(TARGET) for key in targets if key not in fixed)
    own = [key for key in changed if key not in targets]
    return [
        *targets,
        *(k for k in own if not k.startswith(sections) or (k in fixed and k.startswith(free))),
    ]


@contextmanager
def fitting(checkpoint: Checkpoint) -> Iterator[None]:
    """Convert errors about missing or unexpected parts of a state to RunDirectoryError.

    Errors of user-defined code are not converted.

    Raises:
        RunDirectoryError: If the state does not match the run.
    """
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        if passes_other_code(error):
            raise
        problem = f"it has other parts ({error})"
        if isinstance(error, KeyError):
            problem = f"it has no {error}, as of another algorithm"
        raise does_not_fit(checkpoint, problem) from error


OUR_CODE = ("maze_train", "torch", "numpy", "contextlib")
"""Packages whose errors indicate that a state does not match the run."""


def passes_other_code(error: BaseException) -> bool:
    """Return whether the traceback of an exception contains packages other than `OUR_CODE`."""
    names = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    return any(name.partition(".")[0] not in OUR_CODE for name in names)


def does_not_fit(checkpoint: Checkpoint, problem: str) -> RunDirectoryError:
    """Return the error for a checkpoint whose state does not match the run."""
    return RunDirectoryError(
        f"checkpoint {checkpoint.path} does not fit this run: {problem}. Was the checkpoint copied "
        "from another run, or have the environment's spaces changed?"
    )


def by_name(modules: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return all weights, keyed by module and name."""
    return {
        f"{module}/{name}": value
        for module, weights in modules.items()
        for name, value in weights.items()
    }


def resume_hint(run_dir: Path, config: TrainConfig) -> str:
    """Return a message that explains how to resume a run.

    Args:
        run_dir: Directory of the run.
        config: Configuration of the run.
    """
    modules = [] if is_signed(config_text(config)) else importable(modules_to_trust(config))
    given = given_in_python(config)
    if given:
        trust = f", trust={modules!r}" if modules else ""
        return f"to continue: train({arguments_for(given)}, resume={str(run_dir)!r}{trust})"
    trust = f" trust=[{','.join(modules)}]" if modules else ""
    return f"to continue: maze-run {shell_word('resume', str(run_dir))}{trust}"
