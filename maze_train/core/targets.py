"""Objects selected by `{_target_: package.module.Name, ...}`, and optional packages.

This module imports all code that settings refer to. Names from a file that this user did not sign
are instances of `Stored`; for these, `locate` and `import_for_id` import only trusted code.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

from maze_train.core.errors import (
    ConfigError,
    MazeTrainError,
    MissingExtraError,
    did_you_mean,
    nearest,
)
from maze_train.core.text import importable

TARGET = "_target_"
SCRIPT = "__main__"

OFFERED = ("maze_train", "torch.nn", "torch.optim", "gymnasium.wrappers", "minigrid.wrappers")
"""Packages with classes that are always trusted."""

UNSAFE = ("gymnasium.wrappers.array_conversion", "gymnasium.wrappers.rendering")
"""Exceptions to `OFFERED`: modules with classes that import names or write to paths given as
arguments."""


def is_within(key: str, sections: Iterable[str]) -> bool:
    """Return whether a dotted name equals or is below one of `sections`."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


class InlineObject(str):
    """Name of an object passed in Python, with a reference to the object.

    `config.yaml` stores the name. `locate` returns the object, even if the object cannot be
    imported (lambdas). For objects of the main script, the name contains the importable module of
    the script.

    Args:
        value: The object.
        name: Name of the object; None: module and name of a class or function, or `<class>` of an
            instance.
    """

    value: object
    module: str
    """Module of the object or of its class; `__main__` for objects of the main script."""

    def __new__(cls, value: object, name: str | None = None) -> InlineObject:
        """Create the name of an object."""
        module = getattr(value, "__module__", type(value).__module__)
        own = getattr(value, "__qualname__", f"<{type(value).__qualname__}>")
        named = script_name() if module == SCRIPT else module
        self = super().__new__(cls, f"{named}.{own}" if name is None else name)
        self.value, self.module = value, str(module)
        return self

    def __getnewargs__(self) -> tuple[object, str]:  # type: ignore[override]  # of __new__
        return self.value, str(self)

    def __deepcopy__(self, memo: object) -> InlineObject:
        return self  # The configuration must not copy the object.

    def is_instance(self, kind: type | None = None) -> bool:
        """Return whether the object is an instance instead of a class or function."""
        if isinstance(self.value, type):
            return False
        return not callable(self.value) or (kind is not None and isinstance(self.value, kind))


@dataclass(frozen=True)
class Trust:
    """Trusted modules and names for a file that this user did not sign."""

    file: str
    """Name of the file, for messages."""

    modules: tuple[str, ...] = ()
    """Modules that the user trusts."""

    names: frozenset[str] = frozenset()
    """Names that are trusted because they also occur in the user's settings."""


class Stored(str):
    """Dotted name or environment id in a file that this user did not sign.

    The object is imported only if the name is trusted.

    Args:
        name: Dotted path of a class or function, or an environment id.
        trust: Trusted modules and names.
        key: Dotted key of the name in the file.
        kind: Dotted path of the required base class, for components; empty for settings.
        module: Module to import for an environment id; empty for other names.
    """

    trust: Trust
    key: str
    kind: str
    module: str

    def __new__(cls, name: str, trust: Trust, key: str, kind: str = "", module: str = "") -> Stored:
        """Create the name."""
        self = super().__new__(cls, name)
        self.trust, self.key, self.kind, self.module = trust, key, kind, module
        return self

    def __getnewargs__(self) -> tuple[str, Trust, str, str, str]:  # type: ignore[override]  # of __new__
        return str(self), self.trust, self.key, self.kind, self.module

    def __deepcopy__(self, memo: object) -> Stored:
        return self

    def refusal(self) -> tuple[str, str] | None:
        """Return the reason why an import is not allowed: a note, and the module to trust (or "").

        Returns None if the import is allowed, or if the name does not exist (reported by `locate`).
        """
        if self in self.trust.names:
            return None
        if self.module:
            is_trusted = is_within(self.module, self.trust.modules)
            return None if is_trusted else ("", self.module.partition(".")[0])
        if "<" in self:  # Name of a Python object such as a lambda.
            return None
        return _refusal(self.replace(":", "."), self.kind, self.trust.modules)


class UntrustedError(ConfigError):
    """Error for names that must not be imported. The key is the full dotted key."""

    def below(self, prefix: str) -> UntrustedError:
        """Return the error unchanged, because the key is complete."""
        return self


def check_trusted(node: object, is_used: Callable[[str], bool] = lambda key: True) -> None:
    """Raise an error if nested values contain names that must not be imported.

    Only trusted modules are imported, and nothing is called.

    Args:
        node: A name, or nested settings.
        is_used: Returns whether the name with a key will be imported.

    Raises:
        ConfigError: If there are untrusted names. The message lists the names, and the setting that
            allows their import.
    """
    refused = [
        (name, reason)
        for name in _stored_in(node)
        if is_used(name.key) and (reason := name.refusal()) is not None
    ]
    if not refused:
        return
    trust = refused[0][0].trust
    words = {word for _, (_, word) in refused if word}
    listed = sorted({*importable(words), *trust.modules})
    rows = "".join(f"\n  {name.key} = {name}{note}" for name, (note, _) in refused)
    remedy = (
        "\nThe file was created by another user or on another machine (it is not signed by you). "
        "If you trust the code and the author of the run, allow its modules: "
        f"trust=[{','.join(listed)}] (in Python trust={listed!r})"
    )
    raise UntrustedError(
        "trust",
        f"{trust.file} refers to code that is not provided by maze_train, torch.nn, torch.optim "
        f"or gymnasium for this purpose; no code was run:{rows}"
        f"{remedy if importable(words) else ''}",
    )


def _stored_in(node: object) -> Iterator[Stored]:
    """Yield the instances of `Stored` in nested values."""
    if isinstance(node, Stored):
        yield node
    elif isinstance(node, Mapping):
        for value in node.values():
            yield from _stored_in(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _stored_in(value)


def _refusal(path: str, kind: str, trust: Sequence[str]) -> tuple[str, str] | None:
    """Return the reason why an import is not allowed; see `Stored.refusal`."""
    is_trusted = is_within(path, trust)
    if not is_trusted and not is_within(path, OFFERED):
        return "", path.partition(".")[0]
    try:
        module, names = _imported(path)
        found: object = module
        for name in names:
            found = getattr(found, name, None)
            if found is None:
                return None
            if isinstance(found, ModuleType):  # For example, a module imported by the module.
                return f" ({name} is a separate module)", ""
    except ConfigError:
        return None
    except ImportError as error:  # Raised by a lazily imported name.
        return f" ({error})", ""
    is_maker = isinstance(found, type) or inspect.isroutine(found)
    home = str(getattr(found, "__module__", None) or "builtins") if is_maker else module.__name__
    home = script_name() if home == SCRIPT else home
    if _is_offered(found, home, kind) or (is_trusted and is_within(home, [*trust, *OFFERED])):
        return None
    if is_trusted:
        return f" (defined in {home})", home.partition(".")[0]
    return f" (expected a class of {kind or 'settings'})", module.__name__


def _is_offered(found: object, home: str, kind: str) -> bool:
    """Return whether an object is a component or settings class that is always trusted."""
    if not isinstance(found, type) or not is_within(home, OFFERED) or is_within(home, UNSAFE):
        return False
    return issubclass(found, locate(kind)) if kind else is_dataclass(found)


def has_no_name(path: str) -> bool:
    """Return whether a name refers to a Python object that other processes cannot import."""
    return "<" in path or path.startswith(f"{SCRIPT}.")


def script_name() -> str:
    """Return the importable module name of the main script; `__main__` if there is none."""
    main = sys.modules[SCRIPT]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:  # Set by `python -m`.
        return str(spec.name)
    stem = Path(file or "").stem
    found = importlib.util.find_spec(stem) if stem.isidentifier() and stem != SCRIPT else None
    origin = os.path.realpath((found and found.origin) or "")
    return stem if file and origin == os.path.realpath(file) else SCRIPT


def is_target(node: object) -> TypeGuard[dict[str, Any]]:
    """Return whether a configuration node has the key `_target_`."""
    return isinstance(node, dict) and TARGET in node


def check_targets(key: str, nodes: Sequence[object]) -> None:
    """Raise ConfigError if an entry of a list of components lacks `_target_`."""
    for i, node in enumerate(nodes):
        if not is_target(node):
            raise ConfigError(f"{key}[{i}]", f"expected the key {TARGET}", node)


def target_name(value: object) -> str:
    """Return the dotted path of a class or function in a string; empty for other strings.

    Environment ids such as `my_module:MyEnv-v0` are not dotted paths.
    """
    is_name = isinstance(value, str) and re.fullmatch(r"[A-Za-z_]\w*([.:][A-Za-z_]\w*)+", value)
    return str(value).replace(":", ".") if is_name else ""


def locate(path: str, key: str = TARGET) -> Any:
    """Return the object at a dotted path.

    Supports `package.module.Name`, `package.module:Name` and attributes of classes.

    Raises:
        ConfigError: If the module cannot be imported or does not have the attribute, the object was
            passed in Python and is not available in this process, or the path is from a file that
            this user did not sign and is not trusted.
    """
    if isinstance(path, InlineObject):
        return path.value
    check_trusted(path)
    path = str(path)
    try:
        return _found(path, key)
    except ConfigError:
        if not has_no_name(path):
            raise
        raise made_in_python([key], path) from None


def made_in_python(keys: Sequence[str], *paths: str) -> ConfigError:
    """Return the error for Python objects that must be passed again."""
    given = arguments_for(keys)
    remedy = f"pass it again, as in train({given}, resume=...)"
    if given == "env=...":
        remedy += f" or run_rollout(run=..., {given})"
    elif len(keys) == 1 and keys[0].startswith("model."):
        remedy += f" or load_policy(run_dir, {given})"
    problem = f"was passed in Python and cannot be imported: {remedy}"
    return ConfigError(", ".join(keys), problem, ", ".join(paths))


def arguments_for(keys: Iterable[str]) -> str:
    """Return the arguments of `train` for objects with the given keys, for messages."""
    names = dict.fromkeys(key.removesuffix(f".{TARGET}").partition("[")[0] for key in keys)
    return ", ".join(f"{n}=..." if n.isidentifier() else f"**{{{n!r}: ...}}" for n in names)


def _found(path: str, key: str) -> object:
    found: object
    found, names = _imported(path, key)
    where = getattr(found, "__name__", "")
    for name in names:
        if not hasattr(found, name):
            known = [
                *dir(found),
                *getattr(found, "HOMES", ()),
            ]  # `dir(maze_train)` lists only some names.
            hint = did_you_mean(nearest(name, known, count=1))
            raise ConfigError(key, f"{where} has no {name!r}{hint}", path)
        found = getattr(found, name)
    return found


def _imported(path: str, key: str = TARGET) -> tuple[ModuleType, list[str]]:
    """Import the longest module prefix of a dotted path; return the module and the other names.

    Raises:
        ConfigError: If the module does not exist or cannot be imported.
    """
    parts = path.replace(":", ".").split(".")
    if not all(part.isidentifier() for part in parts) or len(parts) < 2:
        raise ConfigError(key, "expected a dotted path such as my_package.my_module.MyClass", path)
    script = script_name().split(".")
    if parts[: len(script)] == script:  # An import would run the script a second time.
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
    raise ConfigError(key, f"no module {parts[0]!r} on the Python path", path)


def import_for_id(env_id: str, module: str, key: str) -> None:
    """Import the module of an environment id `module:Id`.

    Raises:
        ConfigError: If the module cannot be imported, or is not trusted.
    """
    check_trusted(env_id)
    if ":" not in env_id:
        return
    try:
        importlib.import_module(module)
    except Exception as error:
        raise ConfigError(key, import_failure(module, error), env_id) from None


NO_DISPLAY = re.compile(r"[Dd]isplay(?!_)|DISPLAY|X11|GLX|EGL|libGL|OpenGL|video device")
"""Matches error messages of packages that require a display."""

HEADLESS = {"pyglet": "PYGLET_HEADLESS=1", "pygame": "SDL_VIDEODRIVER=dummy"}
HEADLESS |= dict.fromkeys(("mujoco", "dm_control", "robosuite", "OpenGL", "glfw"), "MUJOCO_GL=egl")
"""Environment variables that enable headless use of a package, by module."""


def headless_hint(error: BaseException) -> str:
    """Return the hint for an error caused by a missing display; empty for other errors."""
    if not NO_DISPLAY.search(f"{type(error).__name__}: {error}"):
        return ""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [type(error).__module__, *(str(f.f_globals.get("__name__")) for f in frames)]
    packages = {name.partition(".")[0] for name in names}
    found = [value for package, value in HEADLESS.items() if package in packages]
    advice = " or ".join(dict.fromkeys(found or HEADLESS.values()))
    return f"; on a machine without a display set {advice} in the environment of the command"


def import_failure(module: str, error: Exception) -> str:
    """Return the message for a failed import: the exception, its location, and a hint."""
    text = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    if not isinstance(error, ModuleNotFoundError):
        text += f" ({place.filename}, line {place.lineno})"
    return f"importing {module} failed: {text}{headless_hint(error)}"


def member_of(given: object, name: str) -> Any:
    """Return an optional attribute of any object, or None.

    Only for user-defined policies, modules and transforms, which may be of any class.
    """
    return getattr(given, name, None)


def maker_of(path: str, key: str, kind: type | None = None, *others: type) -> Callable[..., Any]:
    """Return the class or function at a dotted path, for a component of a given kind.

    Args:
        path: The dotted path.
        key: Dotted name of the setting, for error messages.
        kind: Required base class; None: any class. Functions are accepted as well, except functions
            of the standard library.
        *others: Alternative base classes.

    Raises:
        ConfigError: If the object is not found, or is not of the required kind.
    """
    found = locate(path, key)
    if isinstance(path, InlineObject) and path.is_instance(kind):
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
    maker: Callable[..., Any] = found
    return maker


def refusal(maker: Callable[..., Any], error: Exception, form: str = "{}: <value>") -> str:
    """Return the message for a failed call, with the missing or allowed arguments.

    Args:
        maker: The class or function that was called.
        error: The error.
        form: Format string for an argument name.
    """
    if "missing" in str(error) and "required" in str(error):
        missing = re.findall(r"'(\w+)'", str(error))
        return f"{error}; add {', '.join(map(form.format, missing))}" if missing else str(error)
    if "unexpected keyword" not in str(error):
        return str(error)
    try:
        names = ", ".join(inspect.signature(maker).parameters)
    except (TypeError, ValueError):  # For classes that are not written in Python.
        return str(error)
    return f"{error}; it accepts {names or 'none'}"


def _public_name(cls: type) -> str:
    """Return the shortest dotted path of a class."""
    parts = cls.__module__.split(".")
    for length in range(1, len(parts) + 1):
        module = ".".join(parts[:length])
        if getattr(sys.modules.get(module), cls.__name__, None) is cls:
            return f"{module}.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def function_of(node: Mapping[str, Any], key: str) -> Callable[..., Any]:
    """Return the function of a node, with the arguments of the node bound.

    Args:
        node: A mapping with the key `_target_`.
        key: Dotted name of the node in the configuration, for error messages.

    Raises:
        ConfigError: If the function is not found, or the target is not a function.
    """
    function = maker_of(node[TARGET], f"{key}.{TARGET}")
    return partial(function, **{name: value for name, value in node.items() if name != TARGET})


def build_target(
    node: Mapping[str, Any],
    *args: object,
    key: str = "",
    kind: type | None = None,
    **kwargs: object,
) -> Any:
    """Build the object of a node: `locate(node[_target_])(*args, **node, **kwargs)`.

    Nested nodes with `_target_` are built first. All targets are located and checked before the
    first call. Keys of the node override `kwargs`.

    Args:
        node: A mapping with the key `_target_`.
        *args: Positional arguments, before the arguments of the node.
        key: Dotted name of the node in the configuration, for error messages.
        kind: Required class of the object, see `maker_of`; None: any class.
        **kwargs: Additional arguments supplied by the caller.

    Raises:
        ConfigError: If a target is not found, is not of the required kind, or does not accept its
            arguments.
    """
    _check_targets(node, key, kind)
    return _built(node, args, kwargs, key, kind)


def build_targets(nodes: Sequence[Mapping[str, Any]], key: str, kind: type) -> list[Any]:
    """Build the objects of a list of nodes, see `build_target`."""
    return [build_target(node, key=f"{key}[{i}]", kind=kind) for i, node in enumerate(nodes)]


def _check_targets(node: Mapping[str, Any], key: str, kind: type | None) -> None:
    """Locate and check all targets of a node, before the first call."""
    maker_of(node[TARGET], f"{key}.{TARGET}".lstrip("."), kind)
    for name, value in node.items():
        if is_target(value):
            _check_targets(value, f"{key}.{name}".lstrip("."), None)


def _built(
    node: Mapping[str, Any],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    key: str,
    kind: type | None,
) -> Any:
    """Build the object of a node with checked targets."""
    given = {name: value for name, value in node.items() if name != TARGET}
    target = node[TARGET]
    if given and isinstance(target, InlineObject) and target.is_instance(kind):
        problem = "is an instance and takes no arguments: remove them, or pass the class instead"
        raise ConfigError(key, problem, node)
    for name, value in given.items():
        if is_target(value):
            given[name] = _built(value, (), {}, f"{key}.{name}".lstrip("."), None)
    try:
        built = maker_of(target, key, kind)(*args, **{**kwargs, **given})
    except ConfigError as error:
        raise error.below(key) from error
    except (TypeError, ValueError) as error:
        is_function = isinstance(target, InlineObject) and not isinstance(target.value, type)
        if is_function and kind is not None and "missing" in str(error):
            problem = (
                f"expected a {_public_name(kind)}, its class, or a function that returns one from "
                f"the given arguments: {error}"
            )
            raise ConfigError(key, problem, str(target)) from error
        problem = f"calling {node[TARGET]} failed: {refusal(maker_of(target, key, kind), error)}"
        raise ConfigError(key, problem) from error
    except (AttributeError, LookupError) as error:
        # A class of maze_train received a string or a mapping instead of an object.
        if not str(getattr(locate(target), "__module__", "")).startswith("maze_train."):
            raise
        problem = f"{node[TARGET]} does not accept these arguments: {type(error).__name__}: {error}"
        raise ConfigError(key, problem) from error
    if kind is not None and not isinstance(built, kind):
        raise ConfigError(key, f"expected a {_public_name(kind)}", type(built).__name__)
    return built


def import_extra(package: str, extra: str, purpose: str, module: str | None = None) -> ModuleType:
    """Import a module of an optional dependency.

    Args:
        package: Name of the package on PyPI.
        extra: Name of the extra that installs the package.
        purpose: Feature that requires the package.
        module: Name of the module; None if identical to the package name.

    Raises:
        MissingExtraError: If the package is not installed, is too old, or cannot be imported.
    """
    module = module or package
    try:
        found = importlib.import_module(module)
    except Exception as error:
        # An import error within an installed package does not mean that the package is missing.
        is_missing = isinstance(error, ModuleNotFoundError) and (
            f"{module}.".startswith(f"{error.name}.")
        )
        problem = None if is_missing else f"{type(error).__name__}: {error}"
        raise MissingExtraError(package, extra, purpose, problem) from error
    if (problem := _too_old(package)) is not None:
        raise MissingExtraError(package, extra, purpose, problem)
    return found


@cache
def _too_old(package: str) -> str | None:
    """Return the problem if an optional dependency is older than this package requires."""
    requirement = re.compile(rf"{re.escape(package)}(?:\[[^]]*\])?>=([\d.]+)")
    try:
        needs, have = metadata.requires("maze-train") or (), metadata.version(package)
    except metadata.PackageNotFoundError:  # A folder in the search path.
        return None
    for needed in filter(None, map(requirement.match, needs)):
        oldest, given = ([int(n) for n in re.findall(r"\d+", v)[:3]] for v in (needed[1], have))
        if given < oldest:
            return f'version {have} is too old: pip install --upgrade "{package}>={needed[1]}"'
    return None
