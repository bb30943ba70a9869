"""Functions that build and close several environments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import gymnasium

from maze_train.core.errors import ConfigError, EnvError, MissingExtraError
from maze_train.core.notices import warn
from maze_train.envs.faults import explained, separate_processes
from maze_train.envs.types import Env
from maze_train.workers.pool import check_spaces

ONE_PER_PROCESS = "; if only one instance per process is supported, " + separate_processes(
    "<runner.concurrency>"
)
"""Possible reason why a second environment could not be built."""


class NumberedFactory(ABC):
    """Factory whose environments depend on their index, such as the names of files they write."""

    @abstractmethod
    def numbered(self, index: int) -> Callable[[], Env]:
        """Return the factory of the environment with an index."""


def build_envs(factories: Sequence[Callable[[], Any]], first: int = 0) -> list[Env]:
    """Call the factories, and check that the environments have the same spaces.

    Args:
        factories: Functions that return one environment each.
        first: Index of the first environment in messages.

    Raises:
        ConfigError: If a factory rejects its settings.
        EnvError: If a factory raises, does not return an environment, or the spaces differ.
        MissingExtraError: If a required package is not installed.
    """
    envs: list[Env] = []
    index = first
    with closed_on_error(envs):
        try:
            for index, factory in enumerate(factories, start=first):
                if isinstance(factory, NumberedFactory):
                    factory = factory.numbered(index)
                env = factory()
                if not isinstance(env, gymnasium.Env):
                    raise TypeError(f"the factory returned {env!r}, expected a gymnasium.Env")
                if any(env is other for other in envs):
                    raise TypeError(
                        "the factory returned the same environment twice; it must create a new one"
                    )
                envs.append(env)
                check_spaces(index, spaces_of(env), spaces_of(envs[0]), first)
        except (ConfigError, MissingExtraError):
            raise
        except BaseException as error:
            problem = f"environment {index} could not be built: {explained(error)}"
            if envs and len(envs) == index - first and not isinstance(error, TypeError):
                problem += ONE_PER_PROCESS
            raise EnvError(problem) from error
    return envs


def spaces_of(env: Env) -> tuple[Any, Any]:
    """Return the observation and action space."""
    return env.observation_space, env.action_space


class ConvertibleEnv(ABC):
    """Base class of environments that can be converted to the Gymnasium interface."""

    @abstractmethod
    def converted(self) -> Env:
        """Return this environment as a Gymnasium environment."""

    def close(self) -> None:  # noqa: B027 (optional)
        """Release resources such as windows."""


class Closeable(Protocol):
    """An environment or vector environment."""

    def close(self) -> object:
        """Release all resources."""
        ...


@contextmanager
def closed_on_error(envs: Iterable[Closeable]) -> Iterator[None]:
    """Close environments if the block raises; errors during closing are suppressed."""
    try:
        yield
    except BaseException:
        with suppress(EnvError):
            close_all(envs)
        raise


def close_quietly(env: Closeable) -> None:
    """Close an environment that is no longer needed; report an error as a warning."""
    try:
        env.close()
    except EnvError as error:
        warn(str(error))


def close_all(envs: Iterable[Closeable]) -> None:
    """Close all environments, then raise the first exception."""
    first_error: BaseException | None = None
    for env in envs:
        try:
            env.close()
        except BaseException as error:
            first_error = first_error or error
    if first_error is not None:
        raise EnvError(f"closing an environment failed: {explained(first_error)}") from first_error
