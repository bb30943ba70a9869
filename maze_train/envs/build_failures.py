"""Messages about environments that can not be built."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import gymnasium
from gymnasium.error import DependencyNotInstalled, DeprecatedEnv, Error, UnregisteredEnv

from maze_train.envs.faults import explained
from maze_train.envs.registered import missing_package, register_installed
from maze_train.errors import ConfigError, EnvError, MazeTrainError, nearest

if TYPE_CHECKING:
    from maze_train.envs.config import EnvConfig


REMEDIES = (
    ("gymnasium-robotics", "use version 4 or newer of this environment"),
    ("box2d", 'pip install "maze-train[box2d]"'),
    ("mujoco", 'pip install "maze-train[mujoco]"'),
)
"""Remedies for an import error, by a word of its text."""

MAX_LENGTH = 300
"""Characters of the message of an environment that are shown."""


def registered_failure(env_id: str, config: EnvConfig, error: BaseException) -> MazeTrainError:
    """The error for a registered environment that gymnasium did not make.

    Raises:
        KeyboardInterrupt: The error itself, if it is one.
    """
    missing = missing_package(env_id) if isinstance(error, UnregisteredEnv) else None
    if missing is not None:
        return missing
    if isinstance(error, (UnregisteredEnv, DeprecatedEnv)):
        close = nearest_ids(env_id)
        hint = f"; nearest ids: {', '.join(close)}" if close else ""
        return ConfigError("env.id", f"{error}{hint}", env_id)
    if isinstance(error, (DependencyNotInstalled, ImportError)):
        return missing_dependency(env_id, error)
    if isinstance(error, Error):
        return ConfigError("env.id", str(error), env_id)
    return build_failure(env_id, config, error)


def missing_dependency(env_id: str, error: Exception) -> MazeTrainError:
    """The error for an environment whose package could not be imported, with the remedy."""
    text = str(error)
    if isinstance(error, ModuleNotFoundError) and ":" in env_id:
        return ConfigError("env.id", text, env_id)
    cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    lowered = text.lower()
    # An error inside a package is none of a missing one, whatever text it was given.
    name = cause.name if isinstance(cause, ImportError) else None
    if name is not None and not (
        isinstance(cause, ModuleNotFoundError) and name.lower() in lowered
    ):
        problem = f"a package that it needs does not work: {type(cause).__name__}: {cause}"
        return ConfigError("env.id", problem, env_id)
    remedy = next((advice for word, advice in REMEDIES if word in lowered), "")
    return ConfigError("env.id", f"{text}{'; ' if remedy else ''}{remedy}", env_id)


def build_failure(name: str, config: EnvConfig, error: BaseException) -> MazeTrainError:
    """The error for an environment whose constructor raised, or refused its arguments.

    Raises:
        KeyboardInterrupt: The error itself, if it is one.
    """
    if isinstance(error, TypeError) and "argument" in str(error):
        return ConfigError("env.kwargs", f"{name} does not take these: {error}", config.kwargs)
    # In one line: what reads a file may quote it.
    text = " ".join(explained(error).split())[:MAX_LENGTH]
    return EnvError(f"building {name} with {config.kwargs} failed: {text}")


def nearest_ids(env_id: str, count: int = 3) -> list[str]:
    """The registered ids closest to `env_id`, best first, each in its newest version.

    A wrong version counts for nothing and a missing namespace for little: `CartPole-v7` is near
    `CartPole-v1`, and `Pong-v5` near `ALE/Pong-v5`.
    """
    register_installed()
    newest: dict[str, int] = {}
    for registered in gymnasium.registry:
        name, version = split_version(registered)
        newest[name] = max(newest.get(name, -1), version)
    spelled = {name: name for name in newest}
    for name in newest:
        spelled.setdefault(name.rpartition("/")[2], name)
    found = dict.fromkeys(spelled[s] for s in nearest(split_version(env_id)[0], spelled, count))
    return [f"{name}-v{newest[name]}" if newest[name] >= 0 else name for name in found]


def split_version(env_id: str) -> tuple[str, int]:
    """Name and version of an id; the version is -1 when it has none."""
    match = re.fullmatch(r"(.+)-v(\d+)", env_id)
    return (match[1], int(match[2])) if match else (env_id, -1)
