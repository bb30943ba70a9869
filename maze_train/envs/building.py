"""Functions that build and close environments, packages that register them, and build errors."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import parent_process
from typing import Any, Protocol

import gymnasium
from gymnasium.error import DependencyNotInstalled, DeprecatedEnv, Error, UnregisteredEnv

from maze_train.core.errors import ConfigError, EnvError, MazeTrainError, MissingExtraError, nearest
from maze_train.core.notices import warn
from maze_train.core.targets import import_extra, import_for_id, refusal
from maze_train.core.text import shell_word
from maze_train.envs.config import EnvConfig
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


@dataclass(frozen=True)
class EnvPackage:
    """Package of environments: its pip name, extra, module, and id prefixes."""

    package: str
    extra: str
    module: str
    prefixes: tuple[str, ...]

    @property
    def installed(self) -> bool:
        """Whether the module is installed."""
        return importlib.util.find_spec(self.module) is not None


OF_OLD_GYM = ("gymnasium.envs", "shimmy", "shimmy.openai_gym_compatibility")
"""Entry points of environments of the old gym package; their arguments name modules to import. If
shimmy is not installed, Gymnasium registers a placeholder."""

HARMLESS = frozenset((*sys.stdlib_module_names, "cuda"))
"""Prefixes of strings such as `http://...` and `cuda:0`, which are not modules of environments."""

ATARI = EnvPackage("ale-py", "atari", "ale_py", ("ALE/",))
ROBOTS = ("AdroitHand", "AntMaze", "Fetch", "FrankaKitchen", "Hand", "PointMaze")
OTHERS = (
    EnvPackage("gymnasium-robotics", "robotics", "gymnasium_robotics", ROBOTS),
    EnvPackage("minigrid", "minigrid", "minigrid", ("MiniGrid-", "BabyAI-")),
)


def register_atari() -> None:
    """Register the `ALE/` ids with Gymnasium.

    Raises:
        MissingExtraError: If ale-py is not installed.
    """
    ale_py = import_extra("ale-py", "atari", "the ALE environments", "ale_py")
    gymnasium.register_envs(ale_py)
    # At the default log level, every game prints a banner.
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)


def register_installed() -> None:
    """Register the ids of the known packages that are installed."""
    if ATARI.installed:
        register_atari()
    for each in OTHERS:
        if each.installed:
            gymnasium.register_envs(
                import_extra(each.package, each.extra, "this environment", each.module)
            )


def module_of_id(env_id: str) -> str:
    """Return the module that Gymnasium imports for an id; "" if no module is imported.

    For ids of the old gym, the module is shimmy. As in Gymnasium, the version of an id is optional.
    """
    module, colon, _ = env_id.partition(":")
    if colon:
        return module or env_id
    registered = len(gymnasium.registry), next(reversed(gymnasium.registry), "")
    return "shimmy" if env_id in _old_gym_ids(registered) else ""


def module_of_argument(text: str) -> str:
    """Return `module_of_id` of an argument; "" if there is no such module."""
    module = module_of_id(text)
    package = module.partition(".")[0]
    if not package.isidentifier() or package in HARMLESS:
        return ""
    is_there = package in sys.modules or importlib.util.find_spec(package) is not None
    return module if is_there or ":" not in text else ""


@cache
def _old_gym_ids(registered: tuple[int, str]) -> set[str]:
    """Return the ids of old gym environments, with and without version; cached per registry."""
    found = set()
    for spec in gymnasium.registry.values():
        for entry in (spec.entry_point, spec.vector_entry_point):
            text = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
            if text.partition(":")[0] in OF_OLD_GYM:
                found |= {spec.id, spec.id.removesuffix(f"-v{spec.version}")}
    return found


def missing_package(env_id: str) -> MissingExtraError | None:
    """Return an error if the id belongs to a known package that is not installed, or None."""
    for each in (ATARI, *OTHERS):
        if env_id.startswith(each.prefixes) and not each.installed:
            return MissingExtraError(each.package, each.extra, "this environment")
    return None


def import_env_module(env_id: str) -> None:
    """Import the module of `module:Id`.

    Raises:
        ConfigError: If the module cannot be imported, or is not trusted.
    """
    import_for_id(env_id, module_of_id(env_id), "env.id")


REMEDIES = (
    ("box2d", "Box2D", 'pip install "maze-train[box2d]"'),
    ("mujoco", "mujoco", 'pip install "maze-train[mujoco]"'),
)
"""Hints for import errors, as tuples: word in the message, module that must be missing, hint."""

MAX_LENGTH = 300
"""Maximum number of characters shown of an error message."""


def registered_failure(env_id: str, config: EnvConfig, error: BaseException) -> MazeTrainError:
    """Return the error for a registered environment that Gymnasium could not create.

    Raises:
        KeyboardInterrupt: If `error` is a KeyboardInterrupt.
    """
    missing = missing_package(env_id) if isinstance(error, UnregisteredEnv) else None
    if missing is not None:
        return missing
    if isinstance(error, (UnregisteredEnv, DeprecatedEnv)):
        close = nearest_ids(env_id)
        hint = f"; nearest ids: {', '.join(close)}" if close else ""
        if parent_process() is not None and ":" not in env_id:
            hint += (
                ". Worker processes do not see registrations of a script: register the id in a "
                f"module such as my_envs.py, and set {shell_word('env', f'my_envs:{env_id}')}"
            )
        return ConfigError("env.id", f"{str(error).rstrip('.')}{hint}", env_id)
    if isinstance(error, (DependencyNotInstalled, ImportError)):
        return missing_dependency(env_id, error)
    if isinstance(error, Error):
        return ConfigError("env.id", str(error), env_id)
    return build_failure(env_id, config, error)


def missing_dependency(env_id: str, error: Exception) -> MazeTrainError:
    """Return the error for an environment whose package could not be imported, with a hint."""
    text = str(error)
    cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    # An import error within an installed package does not mean that the package is missing.
    name = cause.name if isinstance(cause, ImportError) else None
    is_missing = isinstance(cause, ModuleNotFoundError) and str(name).lower() in text.lower()
    if name is not None and not is_missing:
        problem = f"a required package cannot be imported: {type(cause).__name__}: {cause}"
        return ConfigError("env.id", problem, env_id)
    remedies = [
        f"; {advice}"
        for word, module, advice in REMEDIES
        if word in text.lower() and not importlib.util.find_spec(module)
    ]
    return ConfigError("env.id", f"{text}{remedies[0] if remedies else ''}", env_id)


CALLERS = ("maze_train.envs.", "gymnasium.envs.registration")
"""Modules that call the constructors of environments."""


def build_failure(
    name: str, config: EnvConfig, error: BaseException, make: Callable[..., Any] | None = None
) -> MazeTrainError:
    """Return the error for an environment whose constructor raised or rejected its arguments.

    Args:
        name: Name of the environment for the user.
        config: Settings of the environment.
        error: The exception.
        make: The class or function that was called, to list its arguments; None if unknown.

    Raises:
        KeyboardInterrupt: If `error` is a KeyboardInterrupt.
    """
    if isinstance(error, TypeError) and is_of_call(error, config.kwargs):
        text = refusal(make, error, "env.kwargs.{}=<value>") if make else str(error)
        return ConfigError(
            "env.kwargs", f"{name} does not accept these arguments: {text}", config.kwargs
        )
    # The message is shortened, because it may quote the contents of a file.
    text = " ".join(explained(error).split())[:MAX_LENGTH]
    return EnvError(f"building {name} with {config.kwargs} failed: {text}")


def is_of_call(error: TypeError, kwargs: Mapping[str, Any]) -> bool:
    """Whether a TypeError was caused by wrong arguments of the call.

    A TypeError within the environment is excluded: the message must contain one of the arguments,
    or the call itself must have raised the error.
    """
    unexpected = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if unexpected is not None:
        return unexpected[1] in kwargs
    raised = error.__context__ if isinstance(error.__context__, TypeError) else error
    frames = [frame for frame, _ in traceback.walk_tb(raised.__traceback__)]
    module = str(frames[-1].f_globals.get("__name__")) if frames else ""
    return module.startswith(CALLERS) and "argument" in str(error)


def nearest_ids(env_id: str) -> list[str]:
    """Return up to three registered ids similar to `env_id`, best first, in their newest version.

    Versions are ignored, and namespaces have little weight: `CartPole-v7` is similar to
    `CartPole-v1`, and `Pong-v5` to `ALE/Pong-v5`.
    """
    register_installed()
    newest: dict[str, int] = {}
    for registered in gymnasium.registry:
        name, version = split_version(registered)
        newest[name] = max(newest.get(name, -1), version)
    spelled = {name: name for name in newest}
    for name in newest:
        spelled.setdefault(name.rpartition("/")[2], name)
    found = dict.fromkeys(spelled[s] for s in nearest(split_version(env_id)[0], spelled))
    close = [f"{name}-v{newest[name]}" if newest[name] >= 0 else name for name in found]
    same = [name for name in gymnasium.registry if name.endswith(f"/{env_id}")]
    return list(dict.fromkeys([*same, *close]))[:3]


def split_version(env_id: str) -> tuple[str, int]:
    """Return the name and version of an id; -1 for ids without version."""
    match = re.fullmatch(r"(.+)-v(\d+)", env_id)
    return (match[1], int(match[2])) if match else (env_id, -1)
