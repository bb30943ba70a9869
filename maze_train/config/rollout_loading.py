"""From plain nested values to a validated `RolloutConfig`: its environment may be that of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from maze_train.config.loading import build_dataclass, values_by_field, with_targets
from maze_train.config.resuming import CONFIG_FILE
from maze_train.config.rollout_config import RolloutConfig
from maze_train.errors import ConfigError, RunDirectoryError
from maze_train.targets import TARGET

__all__ = ["is_rollout", "load_rollout_config", "policy_directory"]

BEST = "best"
WEIGHTS_FILE = "policy.pt"
ENV_NAMES = ("id", TARGET)
OWN_OF_ENV = (*ENV_NAMES, "kwargs", "max_episode_steps")
"""Settings that belong to one environment; the others hold for any that takes its place."""


def is_rollout(name: str | None, values: Mapping[str, Any]) -> bool:
    """Whether a composed configuration is that of a rollout, else it is one of training.

    Args:
        name: Name of the primary config.
        values: What was composed; a primary config of the user may extend ours.
    """
    return name == "rollout" or {"run", "policy", "n_episodes"} <= values.keys()


def load_rollout_config(node: Mapping[str, Any]) -> RolloutConfig:
    """The configuration of a rollout from plain nested values.

    With `run`, settings of `env` are put over those of the run. Another environment (`id`,
    `_target_`) comes with its own `kwargs` and `max_episode_steps`; wrappers and preprocessing stay
    those of the run.

    Args:
        node: Values by the names of the fields of `RolloutConfig`, in the forms that `load_config`
            takes: `{"run": "outputs/a", "runner": "local", "env.kwargs.size": 5}`.

    Raises:
        ConfigError: If a key is unknown, a value has a wrong type or is out of range, values
            contradict each other, or there is no saved policy in the directory of the run.
        RunDirectoryError: If the configuration of the run is damaged.
    """
    values = values_by_field(RolloutConfig, node)
    run, env = values.get("run"), values.get("env")
    if isinstance(run, (str, os.PathLike)) and values.get("policy") is None and str(run).strip():
        stored = stored_env(policy_directory(run))
        if env is None or isinstance(env, Mapping):
            values["env"] = joined_env(stored, env or {})
    return build_dataclass(RolloutConfig, with_targets(RolloutConfig, values))


def policy_directory(run: str | os.PathLike[str]) -> Path:
    """Where the policy of a run lies: its best one, or the saved one that was named.

    Raises:
        ConfigError: If there is none.
    """
    directory = Path(run)
    if (directory / BEST).is_dir():
        directory = directory / BEST
    missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (directory / name).is_file()]
    if missing:
        raise ConfigError(
            "run",
            f"there is no saved policy: expected the directory of a run with {BEST}/, or one of "
            f"its policies/epoch_<n>, with {missing[0]}",
            str(run),
        )
    return directory


def stored_env(directory: Path) -> dict[str, Any]:
    """Settings of the environment in the configuration beside a saved policy.

    Raises:
        RunDirectoryError: If it is damaged.
    """
    path = directory / CONFIG_FILE
    try:
        env = yaml.safe_load(path.read_text(encoding="utf-8"))["env"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise RunDirectoryError(f"{path} is damaged: {error}") from error
    if not isinstance(env, dict):
        raise RunDirectoryError(f"{path} is damaged: expected settings of the environment")
    return env


def joined_env(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the environment of a run, changed by those that are given."""
    named = {key: given.get(key) for key in ENV_NAMES}
    is_other = any(named.values()) and named != {key: stored.get(key) for key in ENV_NAMES}
    kept = {key: value for key, value in stored.items() if not (is_other and key in OWN_OF_ENV)}
    if not is_other and isinstance(given.get("kwargs"), Mapping):
        given = {**given, "kwargs": {**(stored.get("kwargs") or {}), **given["kwargs"]}}
    if not any(named.values()):
        given = {key: value for key, value in given.items() if key not in ENV_NAMES}
    return {**kept, **given}
