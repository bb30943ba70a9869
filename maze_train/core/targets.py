"""Objects named in configuration, `{_target_: package.module.Name, ...}`, and optional packages."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from maze_train.core.errors import (
    ConfigError,
    MazeTrainError,
    MissingExtraError,
    did_you_mean,
    nearest,
)

TARGET = "_target_"
SCRIPT = "__main__"


class Given(str):
    """Name of an object that was given in Python; a text, as `config.yaml` holds it.

    In the place of a dotted path it leads to the object itself, also where no path does, as to a
    lambda. What the script that runs defines has the name by which others can import it.

    Args:
        value: The object.
        name: Its name; None: module and name of the object, or `<its class>`.
    """

    value: Any

    def __new__(cls, value: Any, name: str | None = None) -> Given:
        """The name of an object."""
        module = getattr(value, "__module__", type(value).__module__)
        own = getattr(value, "__qualname__", f"<{type(value).__qualname__}>")
        module = script_name() if module == SCRIPT else module
        self = super().__new__(cls, f"{module}.{own}" if name is None else name)
        self.value = value
        return self

    def __getnewargs__(self) -> tuple[Any, str]:  # type: ignore[override]  # those of __new__
        return self.value, str(self)

    def __deepcopy__(self, memo: object) -> Given:
        return self  # the configuration names the object, and owns no copy of it

    def is_made(self, kind: type | None = None) -> bool:
        """Whether the object is the part itself; otherwise it is called to make one."""
        if isinstance(self.value, type):
            return False
        return not callable(self.value) or (kind is not None and isinstance(self.value, kind))


def has_no_name(path: str) -> bool:
    """Whether a text stands for an object of Python that it does not lead to elsewhere."""
    return "<" in path or path.startswith(f"{SCRIPT}.")


def script_name() -> str:
    """Name by which other processes can import the script that runs; otherwise `__main__`."""
    main = sys.modules[SCRIPT]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:  # of python -m
        return str(spec.name)
    stem = Path(file or "").stem
    found = importlib.util.find_spec(stem) if stem.isidentifier() and stem != SCRIPT else None
    origin = os.path.realpath((found and found.origin) or "")
    return stem if file and origin == os.path.realpath(file) else SCRIPT


def is_target(node: Any) -> bool:
    """Whether a configuration node names an object to build."""
    return isinstance(node, dict) and TARGET in node


def check_targets(key: str, nodes: Sequence[Any]) -> None:
    """Refuse an entry of a list of parts that names none."""
    for i, node in enumerate(nodes):
        if not is_target(node):
            raise ConfigError(f"{key}[{i}]", f"expected the key {TARGET}", node)


def target_name(value: Any) -> str:
    """The dotted path in a text that may name a class or function, or an empty text.

    `my_module:MyEnv-v0`, an id that gymnasium imports a module for, is none.
    """
    is_name = isinstance(value, str) and re.fullmatch(r"[A-Za-z_]\w*([.:][A-Za-z_]\w*)+", value)
    return str(value).replace(":", ".") if is_name else ""


def locate(path: str, key: str = TARGET) -> Any:
    """The object that a dotted path names.

    `package.module.Name`, `package.module:Name` and attributes of classes are understood.

    Raises:
        ConfigError: If the module cannot be imported or has no such attribute, or the object was
            given in Python and is not there.
    """
    if isinstance(path, Given):
        return path.value
    path = str(path)
    try:
        return _found(path, key)
    except ConfigError:
        if not has_no_name(path):
            raise
        raise made_in_python([key], path) from None


def made_in_python(keys: Sequence[str], *paths: str) -> ConfigError:
    """The error for objects of Python that have to be given again, by the keys of their targets."""
    given = arguments_for(keys)
    remedy = f"pass it again, as in train({given}, resume=...)"
    if given == "env=...":
        remedy += f" or run_rollout(run=..., {given})"
    elif len(keys) == 1 and keys[0].startswith("model."):
        remedy += f" or load_policy(run_dir, {given})"
    problem = f"made in Python, where no name leads to it: {remedy}"
    return ConfigError(", ".join(keys), problem, ", ".join(paths))


def arguments_for(keys: Iterable[str]) -> str:
    """Arguments of `train` that give objects, by the keys of their targets."""
    names = dict.fromkeys(key.removesuffix(f".{TARGET}").partition("[")[0] for key in keys)
    return ", ".join(f"{n}=..." if n.isidentifier() else f"**{{{n!r}: ...}}" for n in names)


def _found(path: str, key: str) -> Any:
    found, names = imported(path, key)
    where = getattr(found, "__name__", "")
    for name in names:
        if not hasattr(found, name):
            known = [*dir(found), *getattr(found, "HOMES", ())]  # dir(maze_train) shows a few
            hint = did_you_mean(nearest(name, known, count=1))
            raise ConfigError(key, f"{where} has no {name!r}{hint}", path)
        found = getattr(found, name)
    return found


def imported(path: str, key: str = TARGET) -> tuple[ModuleType, list[str]]:
    """Import the longest module that a dotted path begins with; return it and the other names.

    Raises:
        ConfigError: If there is no such module, or it cannot be imported.
    """
    parts = path.replace(":", ".").split(".")
    if not all(part.isidentifier() for part in parts) or len(parts) < 2:
        raise ConfigError(key, "expected a dotted path such as my_package.my_module.MyClass", path)
    script = script_name().split(".")
    if parts[: len(script)] == script:  # to import it would run it a second time
        return sys.modules[SCRIPT], parts[len(script) :]
    for length in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:length])
        try:
            return importlib.import_module(module_name), parts[length:]
        except MazeTrainError:
            raise
        except Exception as error:
            name = error.name if isinstance(error, ModuleNotFoundError) else None
            if name is None or not (module_name + ".").startswith(name + "."):
                raise ConfigError(key, import_failure(module_name, error), path) from None
    raise ConfigError(key, f"there is no module {parts[0]!r} on the Python path", path)


NO_DISPLAY = re.compile(r"[Dd]isplay(?!_)|DISPLAY|X11|GLX|EGL|libGL|OpenGL|video device")
"""Words of errors of packages that need a display."""

HEADLESS = {"pyglet": "PYGLET_HEADLESS=1", "pygame": "SDL_VIDEODRIVER=dummy"}
HEADLESS |= dict.fromkeys(("mujoco", "dm_control", "robosuite", "OpenGL", "glfw"), "MUJOCO_GL=egl")
"""Variables that let a package work without a display, by its module."""


def headless_hint(error: BaseException) -> str:
    """The remedy for an error of a package that misses a display; empty for other errors."""
    if not NO_DISPLAY.search(f"{type(error).__name__}: {error}"):
        return ""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [type(error).__module__, *(str(f.f_globals.get("__name__")) for f in frames)]
    packages = {name.partition(".")[0] for name in names}
    found = [value for package, value in HEADLESS.items() if package in packages]
    advice = " or ".join(dict.fromkeys(found or HEADLESS.values()))
    return f"; on a machine without a display set {advice} in the environment of the command"


def import_failure(module: str, error: Exception) -> str:
    """The text about a module that cannot be imported: what was raised where, and the remedy."""
    text = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    if not isinstance(error, ModuleNotFoundError):
        text += f" ({place.filename}, line {place.lineno})"
    return f"importing {module} failed: {text}{headless_hint(error)}"


def member_of(given: Any, name: str) -> Any:
    """Return an optional attribute of a user-defined object; None if it has no such attribute.

    User-defined policies, modules and transforms may be of any class. Classes of this package
    implement contracts instead.
    """
    return getattr(given, name, None)


def maker_of(path: str, key: str, kind: type | None = None, *others: type) -> Callable[..., Any]:
    """The class or function that a dotted path names, for a part of some kind.

    Args:
        path: The dotted path.
        key: Dotted name of the setting, for error messages.
        kind: Base that a class must have; None: anything. A function may return such an object,
            but those of Python's standard library do not, and are refused.
        *others: Further bases, one of which it may have instead.

    Raises:
        ConfigError: If it cannot be found, or makes no such part.
    """
    found = locate(path, key)
    if isinstance(path, Given) and path.is_made(kind):
        return lambda *args, **kwargs: found
    home = str(getattr(found, "__module__", "")).partition(".")[0]
    if isinstance(found, type):
        makes_it = kind is None or issubclass(found, (kind, *others))
    else:
        makes_it = callable(found) and not (
            inspect.isroutine(found) and home in sys.stdlib_module_names
        )
    if not makes_it:
        wanted = "a class or function"
        if kind is not None:
            wanted = f"a subclass of {_public_name(kind)}, or a function that returns one"
        raise ConfigError(key, f"expected {wanted}", path)
    return found  # type: ignore[no-any-return]  # callable


def refusal(maker: Callable[..., Any], error: Exception, form: str = "{}: <value>") -> str:
    """Return the text of an error of a call, with the arguments that are missing or allowed.

    Args:
        maker: What was called.
        error: The error.
        form: How an argument of a given name is written.
    """
    if "missing" in str(error) and "required" in str(error):
        missing = re.findall(r"'(\w+)'", str(error))
        return f"{error}; add {', '.join(map(form.format, missing))}" if missing else str(error)
    if "unexpected keyword" not in str(error):
        return str(error)
    try:
        names = ", ".join(inspect.signature(maker).parameters)
    except (TypeError, ValueError):  # of a class that is not written in Python
        return str(error)
    return f"{error}; it takes {names or 'none'}"


def _public_name(cls: type) -> str:
    """The shortest dotted path of a class."""
    parts = cls.__module__.split(".")
    for length in range(1, len(parts) + 1):
        module = ".".join(parts[:length])
        if getattr(sys.modules.get(module), cls.__name__, None) is cls:
            return f"{module}.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def function_of(node: Mapping[str, Any], key: str) -> Callable[..., Any]:
    """Return the function that a node names, with the arguments that the node has.

    Args:
        node: A mapping with the key `_target_`.
        key: Dotted name of the node in the configuration, for error messages.

    Raises:
        ConfigError: If it cannot be found, or is not a function.
    """
    function = maker_of(node[TARGET], f"{key}.{TARGET}")
    return partial(function, **{name: value for name, value in node.items() if name != TARGET})


def build_target(
    node: Mapping[str, Any], *args: Any, key: str = "", kind: type | None = None, **kwargs: Any
) -> Any:
    """Build the object that a node names: `locate(node[_target_])(*args, **node, **kwargs)`.

    Nested nodes that name an object are built first, after all of them were found and checked. Keys
    of the node win over `kwargs`.

    Args:
        node: A mapping with the key `_target_`.
        *args: Positional arguments put before those of the node.
        key: Dotted name of the node in the configuration, for error messages.
        kind: The class of the object, see `maker_of`; None: any.
        **kwargs: Arguments that the caller supplies.

    Raises:
        ConfigError: If a target cannot be found, makes no such part, or refuses its arguments.
    """
    _check_targets(node, key, kind)
    return _built(node, args, kwargs, key, kind)


def build_targets(nodes: Sequence[Mapping[str, Any]], key: str, kind: type) -> list[Any]:
    """Build the objects that a list of nodes names, see `build_target`."""
    return [build_target(node, key=f"{key}[{i}]", kind=kind) for i, node in enumerate(nodes)]


def _check_targets(node: Mapping[str, Any], key: str, kind: type | None) -> None:
    """Find all targets of a node, before anything is called."""
    maker_of(node[TARGET], f"{key}.{TARGET}".lstrip("."), kind)
    for name, value in node.items():
        if is_target(value):
            _check_targets(value, f"{key}.{name}".lstrip("."), None)


def _built(
    node: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    key: str,
    kind: type | None,
) -> Any:
    """Build the object that a node names, whose targets were checked."""
    given = {name: value for name, value in node.items() if name != TARGET}
    target = node[TARGET]
    if given and isinstance(target, Given) and target.is_made(kind):
        problem = "is made already, and takes no settings: leave them out, or give its class"
        raise ConfigError(key, problem, node)
    for name, value in given.items():
        if is_target(value):
            given[name] = _built(value, (), {}, f"{key}.{name}".lstrip("."), None)
    try:
        built = maker_of(target, key, kind)(*args, **{**kwargs, **given})
    except ConfigError as error:
        raise error.below(key) from error
    except (TypeError, ValueError) as error:
        problem = f"calling {node[TARGET]} failed: {refusal(maker_of(target, key, kind), error)}"
        raise ConfigError(key, problem) from error
    except (AttributeError, LookupError) as error:
        # A class of this package that got a text or a mapping in the place of an object.
        if not str(getattr(locate(target), "__module__", "")).startswith("maze_train."):
            raise
        problem = f"{node[TARGET]} does not take these arguments: {type(error).__name__}: {error}"
        raise ConfigError(key, problem) from error
    if kind is not None and not isinstance(built, kind):
        raise ConfigError(key, f"expected a {_public_name(kind)}", type(built).__name__)
    return built


def import_extra(package: str, extra: str, purpose: str, module: str | None = None) -> Any:
    """Import a module of an optional dependency.

    Args:
        package: Name of the package, as pip knows it.
        extra: Name of the extra that installs it.
        purpose: Feature that needs it.
        module: Name of the module; None: that of the package.

    Raises:
        MissingExtraError: If the package is not installed, or cannot be imported.
    """
    module = module or package
    try:
        return importlib.import_module(module)
    except Exception as error:
        # One that is raised inside of the package does not say that the package is missing.
        is_missing = isinstance(error, ModuleNotFoundError) and (
            f"{module}.".startswith(f"{error.name}.")
        )
        problem = None if is_missing else f"{type(error).__name__}: {error}"
        raise MissingExtraError(package, extra, purpose, problem) from error
