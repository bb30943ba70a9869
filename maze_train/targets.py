"""Objects named in configuration: `{_target_: package.module.Name, key: value, ...}`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from maze_train.errors import ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["build_target", "is_target", "locate"]

TARGET = "_target_"


def is_target(node: Any) -> bool:
    """Whether a configuration node names an object to build."""
    return isinstance(node, dict) and TARGET in node


def locate(path: str, key: str = TARGET) -> Any:
    """The object that a dotted path names.

    `package.module.Name`, `package.module:Name` and attributes of classes are understood.

    Raises:
        ConfigError: If the module can not be imported or has no such attribute.
    """
    parts = path.replace(":", ".").split(".")
    if not all(part.isidentifier() for part in parts) or len(parts) < 2:
        raise ConfigError(key, "expected a dotted path such as my_package.my_module.MyClass", path)
    for length in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:length])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not (module_name + ".").startswith(error.name + "."):
                raise ConfigError(key, f"importing {module_name} failed: {error}", path) from error
            continue
        for attribute in parts[length:]:
            if not hasattr(found, attribute):
                close = nearest(attribute, dir(found), count=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise ConfigError(key, f"{module_name} has no {attribute!r}{hint}", path)
            found = getattr(found, attribute)
        return found
    raise ConfigError(key, f"there is no module {parts[0]!r} on the Python path", path)


def build_target(node: Mapping[str, Any], *args: Any, key: str = "", **kwargs: Any) -> Any:
    """Build the object that a node names: `locate(node[_target_])(*args, **node, **kwargs)`.

    Nested nodes that name an object are built first. Keys of the node win over `kwargs`.

    Args:
        node: A mapping with the key `_target_`.
        *args: Positional arguments put before those of the node.
        key: Dotted name of the node in the configuration, for error messages.
        **kwargs: Arguments that the caller supplies.

    Raises:
        ConfigError: If the target can not be found, is not callable, or refuses its arguments.
    """
    target = locate(str(node[TARGET]), key=f"{key}.{TARGET}" if key else TARGET)
    if not callable(target):
        raise ConfigError(key, "expected a class or function", node[TARGET])
    given = {
        name: build_target(value, key=f"{key}.{name}".lstrip(".")) if is_target(value) else value
        for name, value in node.items()
        if name != TARGET
    }
    try:
        return target(*args, **{**kwargs, **given})
    except ConfigError as error:
        raise error.below(key) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(key, f"calling {node[TARGET]} failed: {error}") from error
