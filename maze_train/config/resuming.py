"""Resuming a run: finding its directory and checking which settings have changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maze_train.config.loading import PARTS, named_option, nested_values
from maze_train.config.results import (
    content_digest,
    digests_of_run,
    leaves,
    matters,
    place_of_name,
    texts_of,
)
from maze_train.config.stored import check_given, read_settings, settings_of_run
from maze_train.config.train_config import AUTO, RunnerConfig, TrainConfig
from maze_train.core.checks import absolute_path
from maze_train.core.conversion import config_to_dict
from maze_train.core.errors import ConfigError, RunDirectoryError
from maze_train.core.names import CONFIG
from maze_train.core.notices import notify
from maze_train.core.run_directory import RunDirectory
from maze_train.core.targets import TARGET, Given, has_no_name, is_within
from maze_train.core.text import aligned
from maze_train.training.config import RANDOM_OPPONENT

if TYPE_CHECKING:
    from maze_train.training.checkpoint_files import CheckpointInfo


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
        problem = f"resume continues in {directory}: leave run_dir out"
        raise ConfigError("run_dir", problem, config.run_dir)
    return directory


def _run_dir_of(resume: str) -> Path:
    run = RunDirectory.to_resume(absolute_path("resume", resume))
    if not run.is_run:
        problem = f"no run found: expected a directory with {CONFIG}, or auto with run_dir"
        raise ConfigError("resume", problem, resume)
    return run.path


def stored_settings(resume: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored settings of a run with changes, for `load_config`.

    Args:
        resume: Directory of a run, or of one of its checkpoints.
        changes: Settings as for `load_config`. If the runner is given by name, such as
            `runner="local"`, the settings common to all runners (for example `concurrency`) keep
            their stored values.

    Raises:
        ConfigError: If the directory contains no run, `changes` selects an experiment, the run
            names untrusted code (see `StoredSettings`), or Python objects are missing.
        RunDirectoryError: If the stored configuration is damaged.
    """
    if "experiment" in changes:
        problem = "a resumed run keeps its stored settings: leave this out"
        raise ConfigError("experiment", problem, changes["experiment"])
    directory = _run_dir_of(resume)
    own = nested_values(TrainConfig, changes)
    stored = read_settings(directory, own.get("trust"), {**own, "resume": resume})
    if not isinstance(stored.values.get("runner"), dict):
        raise RunDirectoryError(f"{stored.path} is damaged: it names no runner")
    changes = {**changes, "resume": resume}
    runner = changes.get("runner")
    if isinstance(runner, str):
        shared = {field.name for field in fields(RunnerConfig)}
        kept = {key: value for key, value in stored.values["runner"].items() if key in shared}
        changes["runner"] = named_option("runner", runner) | kept
    values = nested_values(TrainConfig, {**stored.values, **changes})
    check_given(values)
    stored.check(values, PARTS)
    return values


def continued(
    config: TrainConfig, directory: Path, checkpoint: CheckpointInfo | None = None
) -> TrainConfig:
    """Compare a configuration with the run that it resumes, and take over the seed of the run.

    Changed settings are listed with both values: as an error if one of them affects the results,
    otherwise as a note.

    Args:
        config: The configuration.
        directory: Directory of the run.
        checkpoint: Checkpoint to resume from; the settings stored in it are compared. None: the run
            starts again, so the settings in `config.yaml` are compared and all may change.

    Returns:
        The configuration with the seed of the run, and its random opponents if it had any.

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
    if not (evaluation.opponents or evaluation.metric) and before == RANDOM_OPPONENT:
        config = replace(config, evaluation=replace(evaluation, opponents=before))
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
        hint = f"; moved=[{key}] if it only has a new path" if is_place else ""
        others = f"; all that differ:{table}" if len(refused + free) > 1 else ""
        raise ConfigError(
            key.removesuffix(f".{TARGET}"),
            f"{place} has {before.get(key)!r}, and this setting changes the results: keep the old "
            f"value, or start a new run from its policy with base_run={directory}{hint}{others}",
            now.get(key),
        )
    if checkpoint is not None:
        _check_limits(config, checkpoint, changed)
    if free:
        notify(f"changed since {place}:{table}")
    return config


def has_moved(
    key: str, before: object, now: object, known: Mapping[str, str], moved: Sequence[str]
) -> bool:
    """Return whether a setting names the same files or runs as before, at a different path.

    Args:
        key: Name of the setting.
        before: Value stored in the run: a string or a list of strings.
        now: Value for the resumed run.
        known: Digests of the files when the run started, see `digests_of_run`.
        moved: Settings that the user has declared as moved.
    """
    old, new = texts_of(before), texts_of(now)
    if not (old and new):
        return False
    if is_within(key, moved):
        return all(map(place_of_name, new))
    digest = content_digest(new)
    return bool(digest) and digest in (known.get(key), content_digest(old))


def _check_limits(config: TrainConfig, checkpoint: CheckpointInfo, changed: list[str]) -> None:
    """Check that changed limits are not below what the run has already completed.

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
                f"the run has already completed {done:,} {unit} ({checkpoint.path}): expected "
                "more, or "
                "resume=<an earlier checkpoint>",
                limit,
            )


def _is_given_again(before: object, now: object) -> bool:
    """Return whether a Python object replaces an unnamed one; these cannot be compared."""
    return isinstance(now, Given) and isinstance(before, str) and has_no_name(before)


def _table(before: Mapping[str, Any], now: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    """Format one line per setting in `notes`: its name, both values, and the note."""
    rows = [("setting", "before", "now", "")]
    for key, note in notes.items():
        rows.append(
            (key.removesuffix(f".{TARGET}"), repr(before.get(key)), repr(now.get(key)), note)
        )
    return "".join(f"\n  {line}" for line in aligned(rows, left=range(4)))


def _without_sections(changed: list[str], *configs: TrainConfig) -> list[str]:
    """Return the changed keys, classes of sections first.

    If the class of a section has changed, its other keys are omitted unless the class may change
    but they must not.
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
