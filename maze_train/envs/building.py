"""Builds the environments of a vector environment, and closes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium

from maze_train.envs.faults import explained
from maze_train.errors import ConfigError, EnvError, MissingExtraError
from maze_train.workers.pool import check_spaces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gymnasium.vector import VectorEnv

__all__ = ["build_envs", "close_all"]


def build_envs(
    factories: Sequence[Callable[[], Any]], first: int = 0
) -> list[gymnasium.Env[Any, Any]]:
    """Call the factories, and check that the environments have equal spaces.

    Args:
        factories: Functions that return one environment each.
        first: Index of the first one in its vector environment.

    Raises:
        ConfigError: If a factory refuses its settings.
        EnvError: If a factory raises, returns no environment, or one whose spaces differ
            from the first's.
        MissingExtraError: If a package that an environment needs is not installed.
    """
    envs: list[gymnasium.Env[Any, Any]] = []
    index = first
    try:
        for index, factory in enumerate(factories, start=first):
            env = factory()
            if not isinstance(env, gymnasium.Env):
                raise TypeError(f"the factory returned {env!r}, expected a gymnasium.Env")
            if any(env is other for other in envs):
                raise TypeError(
                    "the factory returned the same environment twice; let it build a new one"
                )
            envs.append(env)
            check_spaces(index, spaces_of(env), spaces_of(envs[0]), first)
    except (ConfigError, MissingExtraError):
        close_all(envs)
        raise
    except BaseException as error:
        close_all(envs)
        raise EnvError(f"environment {index} could not be built: {explained(error)}") from error
    return envs


def spaces_of(env: gymnasium.Env[Any, Any]) -> tuple[Any, Any]:
    """Observation and action space."""
    return env.observation_space, env.action_space


def close_all(envs: Iterable[gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any]]) -> None:
    """Close environments; the first exception is raised after all were closed."""
    first_error: BaseException | None = None
    for env in envs:
        try:
            env.close()
        except BaseException as error:
            first_error = first_error or error
    if first_error is not None:
        raise EnvError(f"closing an environment failed: {explained(first_error)}") from first_error
