"""Turns plain values into what the type hints of a configuration dataclass ask for.

Values come from YAML, the command line or Python, so `1e6`, `10k` and `1.5M` are integers and
`"1e-3"` a number; beyond that nothing is guessed: `yes` is no boolean, 1.5 no integer, 5 no string.
The constructors of settings do the same by `convert_fields`, so that it makes no difference who
calls them.
"""

from __future__ import annotations

import os
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from maze_train.core.checks import check_one_of
from maze_train.core.errors import ConfigError, did_you_mean, nearest
from maze_train.core.targets import TARGET, locate, target_name

ConfigT = TypeVar("ConfigT")

TUPLE = "_tuple_"
"""The only key of a mapping that stands for a tuple, which YAML does not have."""

ENDINGS = {"k": "e3", "m": "e6"}
"""Endings of integers such as 10k and 1.5M, in lower case."""

SHORT_FORMS = {str: "from_text", list: "from_list", tuple: "from_list"}
"""Methods by which a dataclass is made from a short form, by the type of this."""


class UnknownKeyError(ConfigError):
    """A key that names no setting; `allowed` are the keys allowed in its place."""

    allowed: Iterable[str] = ()

    @classmethod
    def of(
        cls, key: str, value: Any, allowed: Iterable[str], meant: Iterable[str]
    ) -> UnknownKeyError:
        """The error with the settings that may have been meant."""
        hint = did_you_mean(meant, "", " ")
        error = cls(key, f"unknown; {hint}allowed: {', '.join(allowed)}", value)
        error.allowed = allowed
        return error


def field_of_key(cls: type) -> dict[str, str]:
    """The fields of a dataclass by their key in YAML: the name, or `_target_` for `target`."""
    return {key_of_field(f.name): f.name for f in fields(cls) if f.init}


def key_of_field(name: str) -> str:
    """The key of a field in YAML."""
    return TARGET if name == "target" else name


def join(path: str, key: str) -> str:
    """A dotted key."""
    return f"{path}.{key}" if path else str(key)


def is_within(key: str, sections: Iterable[str]) -> bool:
    """Whether a dotted name is one of some, or lies in one: `a.b` and `a.b.c` are within `a.b`."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def build_dataclass(cls: type[ConfigT], node: Mapping[str, Any], path: str = "") -> ConfigT:
    """Build a configuration dataclass from a plain nested mapping.

    Args:
        cls: The dataclass. If `node` has the key `_target_` and `cls` no field `target` (for which
            this key then stands), the class that it names is built instead; it must be a subclass
            of `cls`.
        node: Values by field name; missing ones take their defaults.
        path: Dotted key of the node in the whole configuration, for messages.

    Raises:
        ConfigError: If a key is unknown or missing, or a value has a wrong type or is out of range.
    """
    if not isinstance(node, Mapping):
        raise ConfigError(path, f"expected a mapping{written(path, node)}", node)
    values = dict(node)
    if TARGET in values and TARGET not in field_of_key(cls):
        cls = subclass_named(values.pop(TARGET), cls, join(path, TARGET))
    given = _fields(cls, values, path)
    try:
        return cls(**given)
    except ConfigError as error:
        raise error.below(path) from None
    except TypeError as error:  # a field without default was left out
        raise ConfigError(path, str(error).replace(f"{cls.__name__}.__init__() ", "")) from error


def replaced(settings: ConfigT, node: Mapping[str, Any], path: str) -> ConfigT:
    """A configuration dataclass with some fields replaced, see `build_dataclass`."""
    given = _fields(type(settings), node, path)
    try:
        return replace(settings, **given)  # type: ignore[type-var]  # a dataclass
    except ConfigError as error:
        raise error.below(path) from None


def convert_fields(settings: Any) -> None:
    """Give the fields of a configuration dataclass the types of their hints.

    A value that has its type stays the same object: one made in Python may hold what no file can.

    Raises:
        ConfigError: If a value is of another type.
    """
    for name, hint in _hints(settings.__class__).items():
        value = getattr(settings, name)
        if not _has_type(value, hint):
            setattr(settings, name, convert(value, hint, key_of_field(name)))


@cache
def _hints(cls: type) -> dict[str, Any]:
    """The type hints of the fields of a dataclass that its constructor takes, by name."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls) if f.init}


def _has_type(value: Any, hint: Any) -> bool:
    """Whether a value needs no conversion to what a hint asks for."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_has_type(value, arm) for arm in args)
    if origin is Literal:
        return value in args
    if origin is list:
        return isinstance(value, list) and all(_has_type(entry, args[0]) for entry in value)
    if origin is dict:
        return isinstance(value, dict) and all(_has_type(x, args[1]) for x in value.values())
    if isinstance(hint, type) and is_dataclass(hint):
        return isinstance(value, hint)
    return hint is Any or type(value) is hint


def _fields(cls: type, node: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The values of fields, converted to their types."""
    names, hints = field_of_key(cls), _hints(cls)
    given: dict[str, Any] = {}
    for key, value in node.items():
        if key not in names:
            meant = [join(path, close) for close in nearest(str(key), names, count=1)]
            raise UnknownKeyError.of(join(path, key), value, names, meant)
        given[names[key]] = convert(value, hints[names[key]], join(path, key))
    return given


def convert(value: Any, hint: Any, path: str) -> Any:
    """The value in the type that `hint` asks for.

    Raises:
        ConfigError: If it is not of that type.
    """
    origin = get_origin(hint)
    if hasattr(value, "dtype") and getattr(value, "shape", None) == ():
        value = value.item()  # a number of numpy, as notebooks are full of
    if hint is Any:
        return _plain(value, path)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if origin in (Union, types.UnionType):
        return _convert_union(value, get_args(hint), path)
    if origin is Literal:
        check_one_of(path, value, get_args(hint))
        return value
    if origin is list:
        return _convert_list(value, get_args(hint)[0], path)
    if origin is dict:
        return _convert_dict(value, get_args(hint)[1], path)
    if isinstance(hint, type) and is_dataclass(hint):
        return value if isinstance(value, hint) else _convert_dataclass(value, hint, path)
    return _convert_scalar(value, hint, path)


def subclass_named(target: Any, base: type[ConfigT], key: str) -> type[ConfigT]:
    """Return the dataclass that a dotted path names.

    Raises:
        ConfigError: If there is no such dataclass, or it does not derive from `base`.
    """
    found: Any = locate(target, key=key)
    if isinstance(found, type) and issubclass(found, base) and is_dataclass(found):
        return cast("type[ConfigT]", found)
    raise ConfigError(
        key, f"expected a dataclass that derives from {base.__module__}.{base.__name__}", target
    )


def _convert_dataclass(value: Any, cls: type[Any], path: str) -> Any:
    for kind, name in SHORT_FORMS.items():
        if isinstance(value, kind) and hasattr(cls, name):
            try:
                return getattr(cls, name)(value)
            except ConfigError as error:
                raise error.below(path) from None
    if not isinstance(value, Mapping):
        how = written(path, value, field_of_key(cls))
        raise ConfigError(path, f"expected {_describe(cls)}{how}", value)
    return build_dataclass(cls, value, path)


def _convert_union(value: Any, arms: tuple[Any, ...], path: str) -> Any:
    if value is None and type(None) in arms:
        return None
    arms = tuple(arm for arm in arms if arm is not type(None))
    if len(arms) == 1:
        return convert(value, arms[0], path)
    for arm in arms:
        if isinstance(value, _shapes(arm)):
            return convert(value, arm, path)
    for arm in arms:  # no arm has the type of the value: a number may still be spelled "1e6"
        if arm in (int, float):
            try:
                return _convert_scalar(value, arm, path)
            except ConfigError:
                continue
    for arm in arms:
        if isinstance(value, str) and hasattr(arm, "from_text"):
            return convert(value, arm, path)
    raise ConfigError(path, f"expected {' or '.join(map(_describe, arms))}", value)


def _shapes(hint: Any) -> tuple[Any, ...]:
    """The types of the values from which a hint is made."""
    if hint is Any:
        return (object,)
    origin = get_origin(hint) or hint
    if origin is list:
        return (list, tuple)
    if is_dataclass(origin):
        short = [
            kind for kind, name in SHORT_FORMS.items() if kind is not str and hasattr(origin, name)
        ]
        return (Mapping, origin, *short)
    if origin is dict:
        return (Mapping,)
    if origin is Literal:
        return tuple({type(word) for word in get_args(hint)})
    return (origin,)


def _convert_list(value: Any, item: Any, path: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        is_part = isinstance(value, str) and get_origin(item) is dict
        how = written(f"{path}[0]", value) if is_part else ""
        raise ConfigError(path, f"expected a list{how}", value)
    return [convert(entry, item, f"{path}[{i}]") for i, entry in enumerate(value)]


def _convert_dict(value: Any, item: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(path, f"expected a mapping{written(path, value)}", value)
    return {str(key): convert(entry, item, join(path, key)) for key, entry in value.items()}


def _convert_scalar(value: Any, hint: Any, path: str) -> Any:
    converted: Any = None
    if hint is int:
        converted = _integer(value)
    elif hint is float:
        converted = _number(value)
    elif hint in (bool, str):
        converted = value if isinstance(value, hint) else None
    else:
        raise TypeError(f"{path}: settings of type {hint} are not supported")
    if converted is None:
        # The command line reads 2026_11_20 as a number: refused, because its spelling is lost.
        is_number = hint is str and isinstance(value, (int, float)) and not isinstance(value, bool)
        remedy = f"; quote what looks like a number: {path}='\"...\"'" if is_number else ""
        raise ConfigError(path, f"expected {_describe(hint)}{remedy}", value)
    return converted


def _integer(value: Any) -> int | None:
    if isinstance(value, str):
        ending = value[-1:].lower()
        value = value[:-1] + ENDINGS[ending] if ending in ENDINGS else value
        try:
            return int(value)
        except ValueError:
            value = _number(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, float) and not value.is_integer():
        return None
    return int(value)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _describe(hint: Any) -> str:
    words = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "a string",
    }
    if hint in words:
        return words[hint]
    if is_dataclass(hint):
        return f"a mapping with the keys {', '.join(field_of_key(hint))}"  # type: ignore[arg-type]
    return "a list" if get_origin(hint) is list else "a mapping"


def written(path: str, value: Any, keys: Iterable[str] = ()) -> str:
    """How a mapping is written at a place; a text that names a class becomes its target."""
    place = re.sub(r"\[\d+\]$", "", path)
    name = target_name(value)
    key, content = (TARGET, name) if name else (next(iter(keys), "key"), "value")
    text, code = f"{{{key}: {content}}}", f'{{"{key}": "{content}"}}'
    if place != path:
        text, code = f"[{text}]", f"[{code}]"
    last = place.rpartition(".")[2]
    return f"; in YAML {last}: {text}, for a shell '{place}={text}', in Python {code}"


def _plain(value: Any, path: str) -> Any:
    """A copy of dicts, lists and tuples: the configuration shares nothing with its source."""
    if isinstance(value, Mapping):
        if TUPLE in value:
            if len(value) > 1 or not isinstance(value[TUPLE], (list, tuple)):
                raise ConfigError(path, f"expected {{{TUPLE}: [a, b]}} for the tuple (a, b)", value)
            return tuple(convert(value[TUPLE], Any, path))
        return {
            _key(key, path): convert(entry, Any, join(path, key)) for key, entry in value.items()
        }
    if isinstance(value, (list, tuple)):
        entries = [convert(entry, Any, f"{path}[{i}]") for i, entry in enumerate(value)]
        return entries if isinstance(value, list) else tuple(entries)
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise ConfigError(
            path,
            "config.yaml holds numbers, texts, lists, tuples and mappings only; give other objects "
            "to a class or function of your own, and name that",
            value,
        )
    return value


def _key(key: Any, path: str) -> Any:
    """A key of a mapping as it is: a text, or a number."""
    key = convert(key, Any, path)
    if isinstance(key, tuple):
        raise ConfigError(path, "expected texts or numbers as keys", key)
    return key
