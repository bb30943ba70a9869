"""Settings: dataclasses that are built from plain values, in Python or from a file.

The constructor of `Settings` converts each field to its type hint and then checks it. All paths go
through this conversion: `build_dataclass`, `dataclasses.replace` and direct construction.

Values come from YAML, the command line or Python, so `1e6`, `10k` and `1.5M` are accepted as
integers and `"1e-3"` as a float. There are no other implicit conversions: `yes` is not a boolean,
1.5 is not an integer, and 5 is not a string.
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from maze_train.core.checks import check_one_of
from maze_train.core.errors import ConfigError, did_you_mean, nearest
from maze_train.core.targets import TARGET, locate, target_name

TUPLE = "_tuple_"
"""Key of a mapping `{<key>: [...]}` that represents a tuple, which YAML lacks."""

ENDINGS = {"k": "e3", "m": "e6"}
"""Suffixes of integers such as 10k and 1.5M, in lower case."""

CHANGES = "changes"
IN_RUN = MappingProxyType({CHANGES: "run"})
"""Metadata of fields that may change while a run trains, and when it is resumed."""
ON_RESUME = MappingProxyType({CHANGES: "resume"})
"""Metadata of fields and sections that may only change when a run is resumed."""
NEW_RUN = MappingProxyType({CHANGES: ""})
"""Metadata of fields in such sections that may not change. The default of all other fields."""

SHORT_FORMS = {str: "from_text", list: "from_list", tuple: "from_list"}
"""Names of class methods that build settings from a short form, by the type of that form."""


@dataclass(kw_only=True)
class Settings:
    """Base class of all settings.

    Subclasses check their fields in `__post_init__`, after calling the method of this class.
    """

    def __post_init__(self) -> None:
        """Convert each field to its type hint.

        Raises:
            ConfigError: If a value cannot be converted to the type.
        """
        cls: type = type(self)
        for name, hint in _hints(cls).items():
            setattr(self, name, convert(getattr(self, name), hint, key_of_field(name)))

    @property
    def fixed_settings(self) -> dict[str, str]:
        """Reasons by field why fields marked as `IN_RUN` may not change with these settings."""
        return {}

    def to_plain(self, hint: Any) -> Any:
        """Return plain values for YAML from which `convert` rebuilds the settings.

        Args:
            hint: Type hint of the field; the class is included as `_target_` if it is not the hint.
        """
        cls: type = type(self)
        node = {} if cls is hint else {TARGET: dotted_name(cls)}
        for name, hint_of_field in _hints(cls).items():
            node[key_of_field(name)] = _written(getattr(self, name), hint_of_field)
        return node


SettingsT = TypeVar("SettingsT", bound=Settings)


class UnknownKeyError(ConfigError):
    """Error for a key that is not a setting.

    Args:
        section: Dotted name of the section that contains the key.
        name: The key.
        value: Value of the key.
        allowed: The valid keys of this section.
        meant: Dotted names of settings to suggest; None for the closest key.
    """

    def __init__(
        self,
        section: str,
        name: str,
        value: Any,
        allowed: Iterable[str],
        meant: Iterable[str] | None = None,
    ) -> None:
        self.section, self.name, self.allowed, self.meant = section, name, list(allowed), meant
        if meant is None:
            meant = [join(section, close) for close in nearest(name, self.allowed, count=1)]
        hint = did_you_mean(meant, "", " ")
        problem = f"unknown; {hint}allowed: {', '.join(self.allowed)}"
        super().__init__(join(section, name), problem, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.section, self.name, self.value, self.allowed, self.meant)

    def below(self, prefix: str) -> UnknownKeyError:
        """Return the error with `prefix` in front of its key."""
        section = join(prefix, self.section) if self.section else prefix
        return type(self)(section, self.name, self.value, self.allowed, self.meant)


def field_of_key(cls: type) -> dict[str, str]:
    """Map keys in YAML to field names: the same name, or `_target_` for `target`."""
    return {key_of_field(f.name): f.name for f in fields(cls) if f.init}


def key_of_field(name: str) -> str:
    """Return the key of a field in YAML."""
    return TARGET if name == "target" else name


def join(path: str, key: str) -> str:
    """Join a section and a name to a dotted key."""
    return f"{path}.{key}" if path else str(key)


def when_changeable(settings: Settings, key: str) -> tuple[str, str]:
    """Return when a setting may change, from the metadata of its field or of its section.

    Args:
        settings: The settings.
        key: Dotted name of one of them.

    Returns:
        `run` (see `IN_RUN`), `resume` or empty; and the reason if `fixed_settings` has one.
    """
    when, reason = "", ""
    node: Any = settings
    for part in key.split("."):
        name = field_of_key(type(node)).get(part) if isinstance(node, Settings) else None
        if name is None:
            break
        reason = node.fixed_settings.get(name, "")
        marks = next(f.metadata for f in fields(node) if f.name == name)
        when = "" if reason else marks.get(CHANGES, when)
        node = getattr(node, name)
    return when, reason


def build_dataclass(cls: type[SettingsT], node: Mapping[str, Any], path: str = "") -> SettingsT:
    """Build settings from a nested mapping of plain values.

    Args:
        cls: The class. If `node` has the key `_target_` and `cls` has no field `target`, the class
            given by `_target_`, a subclass of `cls`, is built instead.
        node: Values by key; missing values use the defaults.
        path: Dotted key of the node in the whole configuration, for messages.

    Raises:
        ConfigError: If a key is unknown or missing, or a value has the wrong type or is out of
            range.
    """
    if not isinstance(node, Mapping):
        keys = list(field_of_key(cls))
        problem = f"expected {_describe(cls)}"
        raise ConfigError(path, problem, node, partial(written, value=node, keys=keys))
    values = dict(node)
    if TARGET in values and TARGET not in field_of_key(cls):
        cls = subclass_named(values.pop(TARGET), cls, join(path, TARGET))
    try:
        given = _given(cls, values)
        for f in fields(cls):
            if f.init and f.name not in given and f.default is f.default_factory is MISSING:
                raise ConfigError(key_of_field(f.name), "needs a value")
        return cls(**given)
    except ConfigError as error:
        raise error.below(path) from None


def replaced(settings: SettingsT, node: Mapping[str, Any], path: str) -> SettingsT:
    """Return settings with some fields replaced, see `build_dataclass`."""
    try:
        return replace(settings, **_given(type(settings), node))
    except ConfigError as error:
        raise error.below(path) from None


@cache
def _hints(cls: type) -> dict[str, Any]:
    """Return the type hints of the constructor's fields by name."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls) if f.init}


def _given(cls: type, node: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by field. Values of fields of type Any are copied and must be plain.

    The constructor itself accepts any object for such fields; a configuration file cannot.
    """
    names, hints = field_of_key(cls), _hints(cls)
    given: dict[str, Any] = {}
    for key, value in node.items():
        if key not in names:
            raise UnknownKeyError("", str(key), value, names)
        is_open = _holds_any(hints[names[key]])
        given[names[key]] = _plain(value, key) if is_open else value
    return given


def _holds_any(hint: Any) -> bool:
    return hint is Any or any(map(_holds_any, get_args(hint)))


def convert(value: Any, hint: Any, path: str) -> Any:
    """Convert a value to the type of `hint`.

    Raises:
        ConfigError: If the value cannot be converted.
    """
    origin = get_origin(hint)
    if hint is Any:
        return value
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    value = _unboxed(value)
    if origin in (Union, types.UnionType):
        return _convert_union(value, get_args(hint), path)
    if origin is Literal:
        check_one_of(path, value, get_args(hint))
        return value
    if origin is list:
        return _convert_list(value, get_args(hint)[0], path)
    if origin is dict:
        return _convert_dict(value, get_args(hint)[1], path)
    if isinstance(hint, type) and issubclass(hint, Settings):
        return _convert_settings(value, hint, path)
    return _convert_scalar(value, hint, path)


def _unboxed(value: Any) -> Any:
    """Convert a NumPy scalar to a Python number; return other values unchanged."""
    is_scalar = hasattr(value, "dtype") and getattr(value, "shape", None) == ()
    return value.item() if is_scalar else value


def subclass_named(target: Any, base: type[SettingsT], key: str) -> type[SettingsT]:
    """Return the subclass of `base` at a dotted path.

    Raises:
        ConfigError: If there is no such class.
    """
    found: Any = locate(target, key=key)
    if isinstance(found, type) and issubclass(found, base) and is_dataclass(found):
        return found
    raise ConfigError(
        key, f"expected a dataclass derived from {base.__module__}.{base.__name__}", target
    )


def _convert_settings(value: Any, cls: type[Settings], path: str) -> Settings:
    if isinstance(value, cls):
        return value
    for kind, name in SHORT_FORMS.items():
        if isinstance(value, kind) and hasattr(cls, name):
            try:
                built: Settings = getattr(cls, name)(value)
            except ConfigError as error:
                raise error.below(path) from None
            return built
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
    for arm in arms:  # no exact match; the value may be a number spelled "1e6"
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
    """Return the types of values that can be converted to a hint."""
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
        remedy = partial(written, value=value, in_list=True) if is_part else None
        raise ConfigError(path, "expected a list", value, remedy)
    return [convert(entry, item, f"{path}[{i}]") for i, entry in enumerate(value)]


def _convert_dict(value: Any, item: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(path, "expected a mapping", value, partial(written, value=value))
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
        # Rejected: the command line reads 2026_11_20 as a number, which loses its spelling.
        is_number = hint is str and isinstance(value, (int, float)) and not isinstance(value, bool)
        raise ConfigError(
            path, f"expected {_describe(hint)}", value, quoted_number if is_number else None
        )
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


def quoted_number(path: str) -> str:
    """Return the hint for a text that YAML reads as a number."""
    return f"; quote what looks like a number: {path}='\"...\"'"


def written(path: str, value: Any, keys: Iterable[str] = (), in_list: bool = False) -> str:
    """Return the spelling of a mapping at `path` in YAML, shell and Python, for messages.

    A text that names a class is written as `_target_`.
    """
    place = path.rpartition("[")[0] if path.endswith("]") else path
    name = target_name(value)
    key, content = (TARGET, name) if name else (next(iter(keys), "key"), "value")
    text, code = f"{{{key}: {content}}}", f'{{"{key}": "{content}"}}'
    if in_list or place != path:
        text, code = f"[{text}]", f"[{code}]"
    last = place.rpartition(".")[2]
    return f"; in YAML {last}: {text}, for a shell '{place}={text}', in Python {code}"


def _plain(value: Any, path: str) -> Any:
    """Deep-copy plain values, so that settings share no objects with their source.

    Raises:
        ConfigError: If a value cannot be stored in a file.
    """
    value = _unboxed(value)
    if isinstance(value, Mapping):
        if TUPLE in value:
            if len(value) > 1 or not isinstance(value[TUPLE], (list, tuple)):
                raise ConfigError(path, f"expected {{{TUPLE}: [a, b]}} for the tuple (a, b)", value)
            return tuple(_plain(value[TUPLE], path))
        return {_key(key, path): _plain(entry, join(path, key)) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        entries = [_plain(entry, f"{path}[{i}]") for i, entry in enumerate(value)]
        return entries if isinstance(value, list) else tuple(entries)
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise ConfigError(
            path,
            "config.yaml can only store numbers, strings, lists, tuples and mappings; create other "
            "objects in a class or function, and name it as _target_",
            value,
        )
    return value


def _written(value: Any, hint: Any) -> Any:
    """Convert a field of type `hint` to plain values."""
    if isinstance(value, Settings):
        return value.to_plain(hint)
    origin, item = get_origin(hint), (get_args(hint) or (Any,))[-1]
    if isinstance(value, Mapping):
        return {key: _written(x, item if origin is dict else Any) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        entries = [_written(entry, item if origin is list else Any) for entry in value]
        return {TUPLE: entries} if isinstance(value, tuple) and hint is Any else entries
    return value


def dotted_name(cls: Any) -> str:
    """Return the dotted path of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _key(key: Any, path: str) -> Any:
    """Check that a key of a mapping is a string or a number, and return it."""
    key = convert(key, Any, path)
    if isinstance(key, tuple):
        raise ConfigError(path, "expected strings or numbers as keys", key)
    return key
