"""Continuing a run: where it is, and which of its settings may differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from maze_train.config.conversion import TUPLE
from maze_train.config.loading import config_to_dict, load_config, named_option
from maze_train.config.train_config import RunnerConfig
from maze_train.errors import ConfigError, RunDirectoryError
from maze_train.targets import TARGET

if TYPE_CHECKING:
    from maze_train.config.train_config import TrainConfig

__all__ = [
    "AUTO",
    "CHECKPOINTS",
    "CONFIG_FILE",
    "checkpoint_name",
    "continued",
    "run_to_resume",
    "stored_settings",
]

AUTO = "auto"
CONFIG_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"

FREE = (
    "algorithm.device",
    "algorithm.n_epochs",
    "algorithm.on_damaged",
    "algorithm.on_non_finite",
    "algorithm.patience",
    "algorithm.replay_buffer_storage",
    "algorithm.storage",
    "checkpoint",
    "evaluation.dump_interval",
    "resume",
    "run_dir",
    "runner",
    "total_steps",
    "tracking",
)
"""Settings, and sections of settings, that may differ: where a run takes place, how long, and what
it writes."""

FIXED = ("runner.concurrency", "runner.fast_dev_run")
"""Settings within these that may not."""


def run_to_resume(config: TrainConfig) -> Path | None:
    """Directory of the run that a configuration continues; None: it starts a new one.

    Raises:
        ConfigError: If there is no run in the directory that `resume` names.
    """
    if config.resume is None:
        return None
    if config.resume == AUTO:
        assert config.run_dir is not None
        directory = Path(config.run_dir)
        return directory if (directory / CONFIG_FILE).exists() else None
    directory = _run_dir_of(config.resume)
    if config.run_dir is not None and Path(config.run_dir) != directory:
        problem = f"resume continues in {directory}: leave run_dir out"
        raise ConfigError("run_dir", problem, config.run_dir)
    return directory


def checkpoint_name(resume: str | None) -> str | None:
    """Name of the checkpoint if `resume` names one; None: the newest."""
    path = Path(resume or "")
    is_run = (path / CONFIG_FILE).is_file()
    return path.name if path.parent.name == CHECKPOINTS and not is_run else None


def _run_dir_of(resume: str) -> Path:
    directory = Path(resume)
    if checkpoint_name(resume) is not None:
        directory = directory.parent.parent
    if not (directory / CONFIG_FILE).is_file():
        problem = f"there is no run: expected a directory with {CONFIG_FILE}, or auto with run_dir"
        raise ConfigError("resume", problem, resume)
    return directory


def stored_settings(resume: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run with some changes, for `load_config`.

    Args:
        resume: Directory of a run, or of one of its checkpoints.
        changes: Settings as `load_config` takes them. A runner by name, such as `runner="local"`,
            keeps what all runners have, such as the number of environments.

    Raises:
        ConfigError: If there is no run in the directory, or the changes are those of an experiment.
        RunDirectoryError: If its configuration is damaged.
    """
    if "experiment" in changes:
        problem = "a run that is continued has its own settings: leave this out"
        raise ConfigError("experiment", problem, changes["experiment"])
    stored = _read(_run_dir_of(resume))
    changes = {**changes, "resume": resume}
    runner = changes.get("runner")
    if isinstance(runner, str):
        shared = {field.name for field in fields(RunnerConfig)}
        kept = {key: value for key, value in stored["runner"].items() if key in shared}
        changes["runner"] = named_option("runner", runner) | kept
    return {**stored, **changes}


def continued(config: TrainConfig, directory: Path) -> TrainConfig:
    """The configuration with the seed of the run in `directory`, which it continues.

    Raises:
        ConfigError: If a setting differs that influences the numbers of the run.
        RunDirectoryError: If the configuration of the run is damaged.
    """
    stored = load_config(_read(directory))
    if config.seed is None:
        config = replace(config, seed=stored.seed)
    before, now = _leaves(config_to_dict(stored)), _leaves(config_to_dict(config))
    changed = [
        key
        for key in sorted({*before, *now})
        if _matters(key, config) and before.get(key) != now.get(key)
    ]
    if changed:
        # A section of another class has other keys, which say nothing.
        classes = [key.removesuffix(TARGET) for key in changed if key.endswith(f".{TARGET}")]
        key = next((key for key in changed if key.endswith(f".{TARGET}")), changed[0])
        others = [other for other in changed if not other.startswith((key, *classes))]
        also = f" (also changed: {', '.join(others)})" if others else ""
        raise ConfigError(
            key.removesuffix(f".{TARGET}"),
            f"the run in {directory} has {before.get(key)!r}, and this setting changes its numbers"
            f"{also}: leave it as it was, or start a new run",
            now.get(key),
        )
    return config


def _read(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    try:
        node = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RunDirectoryError(f"{path} is damaged: {error}") from error
    if not isinstance(node, dict) or not isinstance(node.get("runner"), dict):
        raise RunDirectoryError(f"{path} is damaged: expected the configuration of a run")
    return node


def _matters(key: str, config: TrainConfig) -> bool:
    if key in FIXED:
        return True
    if key == "evaluation.concurrency":
        return not config.evaluation.deterministic  # random numbers are drawn for all at once
    return not any(key == free or key.startswith(f"{free}.") for free in FREE)


def _leaves(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The settings by dotted name; lists are settings, and tuples are told as such."""
    found: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping) and TUPLE in value:
            value = value[TUPLE]  # once stored as a list
        if isinstance(value, Mapping):
            found.update(_leaves(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found
