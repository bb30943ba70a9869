"""Conversion of plain values to a `RolloutConfig`; its environment may be that of a run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from maze_train.checks import absolute_path
from maze_train.config.loading import build_config, values_by_field
from maze_train.config.parts import named
from maze_train.config.rollout_config import CHOOSE_ENV, RolloutConfig
from maze_train.config.stored import (
    PARTS_OF_ENV,
    PARTS_OF_POLICY,
    check_trust,
    read_settings,
)
from maze_train.config.writing import CHECKPOINTS, CONFIG_FILE
from maze_train.errors import ConfigError, RunDirectoryError, did_you_mean
from maze_train.hub import at_commit, is_on_hub, local_directory
from maze_train.targets import TARGET, is_target
from maze_train.training.config import PolicyConfig

BEST = "best"
WEIGHTS_FILE = "policy.pt"
ENV_NAMES = ("id", TARGET)
OWN_OF_ENV = (*ENV_NAMES, "kwargs", "max_episode_steps")
"""Settings that belong to one environment; the others hold for any that takes its place."""


def load_rollout_config(node: Mapping[str, Any]) -> RolloutConfig:
    """The configuration of a rollout from plain nested values.

    With `run`, settings of `env` are put over those of the run. Another environment (`id`,
    `_target_`) comes with its own `kwargs` and `max_episode_steps`; wrappers and preprocessing stay
    those of the run.

    Args:
        node: Values by the names of the fields of `RolloutConfig`, in the forms that `load_config`
            takes: `{"run": "outputs/a", "runner": "local", "env.kwargs.size": 5}`. `seeds` may be
            any iterable of integers, such as a range or an array.

    Raises:
        ConfigError: If a key is unknown, a value has a wrong type or is out of range, values
            contradict each other, there is no saved policy in the directory of the run, or that
            names what is not trusted, see `check_trust`.
        RunDirectoryError: If the configuration of the run is damaged.
    """
    values = values_by_field(RolloutConfig, node)
    if "seeds" in values:
        values["seeds"] = plain_seeds(values["seeds"])
    if isinstance(values.get("policies"), Mapping):
        values["policies"] = sources_of(values["policies"])
    run, env = values.get("run"), values.get("env")
    if isinstance(run, (str, os.PathLike)) and values.get("policy") is None and str(run).strip():
        directory = policy_directory(run)
        if is_on_hub(run):
            values["run"] = at_commit(str(run), directory)  # the same one when it is read again
        stored = read_settings(directory)
        if "env" not in stored:
            problem = "expected settings of the environment"
            raise RunDirectoryError(f"{directory / CONFIG_FILE} is damaged: {problem}")
        if env is None or isinstance(env, Mapping):
            values["env"] = joined_env(stored["env"], env or {})
            if not any(values["env"].get(name) for name in ENV_NAMES):
                raise ConfigError("env", CHOOSE_ENV)
            settings = {**stored, "env": values["env"]}
            own = {"env": env}
            uses = (*PARTS_OF_POLICY, *PARTS_OF_ENV)
            check_trust(settings, directory / CONFIG_FILE, values.get("trust"), own, uses)
    return build_config(RolloutConfig, values)


def sources_of(policies: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of several policies, each of which may be given by its source alone.

    A policy that names no agents is that of the agent whose name is its id.
    """
    found: dict[str, Any] = {}
    for key, own in policies.items():
        is_source = not isinstance(own, Mapping | PolicyConfig) or is_target(own)
        node = {"source": own} if is_source else own
        if isinstance(node, Mapping):
            node = named({"agents": [key], **node}, f"policies.{key}")
        found[key] = node
    return found


def policy_directory(run: str | os.PathLike[str]) -> Path:
    """Find the directory with the configuration of a policy: the best one of a run, or another.

    Raises:
        ConfigError: If there is none.
    """
    directory = local_directory(absolute_path("run", str(run)))
    path, at, _ = str(directory).rpartition("@")
    needed = [CONFIG_FILE, WEIGHTS_FILE]
    if (directory / BEST).is_dir():
        directory = directory / BEST
    elif at and Path(path).is_dir() and not directory.exists():
        directory, needed = Path(path), [CONFIG_FILE]  # versions are looked up with the weights
    elif directory.parent.name == CHECKPOINTS:
        directory, needed = directory.parent.parent, [CONFIG_FILE]
    missing = [name for name in needed if not (directory / name).is_file()]
    if missing:
        raise ConfigError(
            "run",
            f"there is no saved policy: expected the directory of a run with {BEST}/, or one of "
            f"its policies/epoch_<n>, with {missing[0]}{policy_nearby(directory)}",
            str(run),
        )
    return directory


def policy_nearby(directory: Path) -> str:
    """Say that there is no directory, or suggest the best policy of a run above it; else empty."""
    for parent in directory.parents[:2]:
        if (parent / BEST / WEIGHTS_FILE).is_file():
            return did_you_mean([parent / BEST])
    return "" if directory.exists() else "; there is no such directory"


def plain_seeds(seeds: Any) -> Any:
    """Seeds as a list; anything that is none stays, such as an array that is a single number."""
    is_text = isinstance(seeds, str | bytes | Mapping)
    if is_text or not isinstance(seeds, Iterable) or getattr(seeds, "ndim", 1) == 0:
        return seeds
    return list(seeds)


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
