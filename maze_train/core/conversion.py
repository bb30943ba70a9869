"""Settings: dataclasses that can be built from plain values.

The constructor of `Settings` converts each field to its type hint and then checks the value. This
applies to `build_dataclass`, `dataclasses.replace` and direct construction.

Because values may come from YAML or the command line, `1e6`, `10k` and `1.5M` are accepted as
integers and `"1e-3"` as a float. There are no other implicit conversions: `yes` is not a boolean,
1.5 is not an integer, and 5 is not a string.
"""

from __future__ import annotations

import json
import os
import shlex
import types
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import (
    Any,
    ClassVar,
    Literal,
    Protocol,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

from maze_train.core.checks import check_one_of
from maze_train.core.errors import ConfigError, did_you_mean, nearest
from maze_train.core.targets import TARGET, InlineObject, is_target, locate, target_name
from maze_train.core.text import PLAIN

TUPLE = "_tuple_"
"""Key of a mapping `{<key>: [...]}` that represents a tuple, because YAML has no tuples."""

CHANGES = "changes"
IN_RUN = MappingProxyType({CHANGES: "run"})
"""Metadata of fields that may change during a run, and when a run is resumed."""
ON_RESUME = MappingProxyType({CHANGES: "resume"})
"""Metadata of fields and sections that may change only when a run is resumed."""
NEW_RUN = MappingProxyType({CHANGES: ""})
"""Metadata of fields that must not change, within sections marked as `ON_RESUME`. Fields without
metadata in other sections must not change either."""
NO_SETTING = MappingProxyType({"is_setting": False})
"""Metadata of fields that users cannot set and that are not stored."""


@dataclass(kw_only=True)
class Settings:
    """Base class of all settings.

    Subclasses check their fields in `__post_init__`, after calling `super().__post_init__()`.
    """

    _hints: ClassVar[Mapping[str, object]]
    """Type hints of the fields, evaluated once per class."""

    def __post_init__(self) -> None:
        """Convert each field to its type hint.

        Raises:
            ConfigError: If a value cannot be converted to the type.
        """
        for name, hint in self.hints().items():
            setattr(self, name, convert(vars(self)[name], hint, key_of_field(name)))

    @classmethod
    def hints(cls) -> Mapping[str, object]:
        """Return the type hints of the constructor's fields, keyed by name."""
        if "_hints" not in vars(cls):  # A base class has different fields.
            hints = get_type_hints(cls)
            own = (f.name for f in fields(cls) if f.init and f.metadata != NO_SETTING)
            cls._hints = MappingProxyType({name: hints[name] for name in own})
        return cls._hints

    @property
    def fixed_settings(self) -> dict[str, str]:
        """Fields marked as `IN_RUN` that must not change for these settings, with the reasons."""
        return {}

    def value_of(self, name: str) -> Any:
        """Return a setting or property by name."""
        return getattr(self, name)

    @classmethod
    def from_short_form(cls, value: object) -> Self | None:
        """Build settings from a short form, such as a string or a list; None for other values.

        Raises:
            ConfigError: If the short form is invalid.
        """
        return None

    def to_plain(self, hint: object) -> object:
        """Return plain values for YAML; the inverse of `convert`.

        Args:
            hint: Type hint of the field. If the class of the settings differs from this type, the
                class is included as `_target_`.
        """
        cls = type(self)
        node: dict[str, object] = {} if cls is hint else {TARGET: dotted_name(cls)}
        for name, hint_of_field in cls.hints().items():
            node[key_of_field(name)] = _written(vars(self)[name], hint_of_field)
        return node


SettingsT = TypeVar("SettingsT", bound=Settings)


@runtime_checkable
class Scalar(Protocol):
    """NumPy or PyTorch array; a scalar if the shape is empty."""

    shape: Collection[int]

    def item(self) -> object:
        """Return the value as a Python number."""


def unknown_key(key: str, value: object, allowed: Collection[str]) -> ConfigError:
    """Return the error for a key that is not a setting."""
    return ConfigError(key, "unknown", value, partial(_allowed, names=list(allowed)))


def _allowed(key: str, names: Sequence[str]) -> str:
    """Return the closest and all allowed names for the dotted name of an unknown key."""
    section, _, name = key.rpartition(".")
    close = [join(section, found) for found in nearest(name, names, count=1)]
    return f"; {did_you_mean(close, '', ' ')}allowed: {', '.join(names)}"


def field_of_key(cls: type[Settings]) -> dict[str, str]:
    """Map keys in YAML to field names: the same name, or `_target_` for `target`."""
    return {key_of_field(name): name for name in cls.hints()}


def key_of_field(name: str) -> str:
    """Return the key of a field in YAML."""
    return TARGET if name == "target" else name


def join(path: str, key: str) -> str:
    """Join a section and a name to a dotted key."""
    return f"{path}.{key}" if path else str(key)


def when_changeable(settings: Settings, key: str) -> tuple[str, str]:
    """Return when a setting may change, according to the metadata of the field or its section.

    Args:
        settings: The settings.
        key: Dotted name of a setting.

    Returns:
        `run` (see `IN_RUN`), `resume` or empty; and the reason from `fixed_settings`, if any.
    """
    when, reason = "", ""
    node: object = settings
    for part in key.split("."):
        name = field_of_key(type(node)).get(part) if isinstance(node, Settings) else None
        if name is None or not isinstance(node, Settings):
            break
        reason = node.fixed_settings.get(name, "")
        marks = next(f.metadata for f in fields(node) if f.name == name)
        when = "" if reason else marks.get(CHANGES, when)
        node = vars(node)[name]
    return when, reason


def build_dataclass(cls: type[SettingsT], node: object, path: str = "") -> SettingsT:
    """Build settings from a nested mapping of plain values.

    Args:
        cls: The class. If `node` has the key `_target_` and `cls` has no field `target`, `_target_`
            selects a subclass of `cls` to build instead.
        node: Values by key; defaults are used for missing keys.
        path: Dotted key of the node in the configuration, for messages.

    Raises:
        ConfigError: If a key is unknown or missing, or a value has the wrong type or is out of
            range.
    """
    if not isinstance(node, Mapping):
        remedy = partial(written, value=node, keys=list(field_of_key(cls)))
        raise ConfigError(path, f"expected {_describe(cls)}", node, remedy)
    values = dict(node)
    if TARGET in values and TARGET not in field_of_key(cls):
        cls = subclass_named(values.pop(TARGET), cls, join(path, TARGET))
    try:
        given = _given(cls, values)
        for f in fields(cls):
            if f.init and f.name not in given and f.default is f.default_factory is MISSING:
                raise ConfigError(key_of_field(f.name), "a value is required")
        return cls(**given)
    except ConfigError as error:
        raise error.below(path) from None


def replaced(settings: SettingsT, node: Mapping[str, object], path: str) -> SettingsT:
    """Return settings with some fields replaced, see `build_dataclass`."""
    try:
        return replace(settings, **_given(type(settings), node))
    except ConfigError as error:
        raise error.below(path) from None


def _given(cls: type[Settings], node: Mapping[str, object]) -> dict[str, Any]:
    """Return values by field. For fields of type Any, values must be plain and are copied.

    Unlike configuration files, the constructor accepts any object for these fields.
    """
    names, hints = field_of_key(cls), cls.hints()
    given: dict[str, Any] = {}
    for key, value in node.items():
        if key not in names:
            raise unknown_key(str(key), value, names)
        is_open = _holds_any(hints[names[key]])
        given[names[key]] = _plain(value, key) if is_open else value
    return given


def _holds_any(hint: object) -> bool:
    return hint is Any or any(map(_holds_any, get_args(hint)))


def convert(value: object, hint: object, path: str) -> Any:
    """Convert a value to the type of `hint`.

    Raises:
        ConfigError: If the value cannot be converted.
    """
    origin, args = get_origin(hint), get_args(hint)
    value = builtin(value)
    if hint is Any:
        return value
    value = _unboxed(os.fspath(value) if isinstance(value, os.PathLike) else value)
    if origin in (Union, types.UnionType):
        return _convert_union(value, args, path)
    if origin is Literal:
        check_one_of(path, value, args)
        return value
    if origin is list:
        if not isinstance(value, (list, tuple)):
            name = value[TARGET] if is_target(value) else value
            if isinstance(name, InlineObject):
                problem = "expected a list; put the object into brackets: [...]"
                raise ConfigError(path, problem, str(name))
            is_part = isinstance(name, str) and get_origin(args[0]) is dict
            remedy = partial(written, value=name, in_list=True) if is_part else None
            raise ConfigError(path, "expected a list", value, remedy)
        return [convert(entry, args[0], f"{path}[{i}]") for i, entry in enumerate(value)]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(path, "expected a mapping", value, partial(written, value=value))
        return {str(key): convert(entry, args[1], join(path, key)) for key, entry in value.items()}
    if isinstance(hint, type) and issubclass(hint, Settings):
        if isinstance(value, hint):
            return value
        built = _from_short_form(value, hint, path)
        return build_dataclass(hint, value, path) if built is None else built
    return _convert_scalar(value, hint, path)


PLAIN_TYPES = frozenset((type(None), bool, int, float, str, list, tuple, dict))
"""Types of plain Python and YAML values."""


def builtin(value: object) -> object:
    """Convert the mappings and lists of another library to dicts and lists, recursively.

    OmegaConf's `DictConfig` and `ListConfig` are examples; their interpolations are resolved. Other
    values, including dicts and lists, are returned unchanged.
    """
    if type(value) in PLAIN_TYPES:
        return value
    if isinstance(value, MutableMapping):
        return {key: builtin(entry) for key, entry in value.items()}
    if isinstance(value, MutableSequence):
        return [builtin(entry) for entry in value]
    return value


def _unboxed(value: object) -> object:
    """Convert a NumPy or PyTorch scalar to a Python number; return other values unchanged."""
    if type(value) in PLAIN_TYPES:  # The protocol check takes ten times as long.
        return value
    return value.item() if isinstance(value, Scalar) and value.shape == () else value


def subclass_named(target: str, base: type[SettingsT], key: str) -> type[SettingsT]:
    """Return the subclass of `base` at a dotted path.

    Raises:
        ConfigError: If there is no such class.
    """
    found: object = locate(target, key=key)
    if isinstance(found, type) and issubclass(found, base) and is_dataclass(found):
        return found
    raise ConfigError(
        key, f"expected a dataclass derived from {base.__module__}.{base.__name__}", target
    )


def _from_short_form(value: object, cls: type[SettingsT], path: str) -> SettingsT | None:
    try:
        return cls.from_short_form(value)
    except ConfigError as error:
        raise error.below(path) from None


def _convert_union(value: object, arms: tuple[object, ...], path: str) -> object:
    if value is None and type(None) in arms:
        return None
    arms = tuple(arm for arm in arms if arm is not type(None))
    for arm in arms:
        if len(arms) == 1 or isinstance(value, _shapes(arm)):
            return convert(value, arm, path)
    for arm in arms:  # No exact match. The value may be a number such as "1e6".
        if arm in (int, float):
            with suppress(ConfigError):
                return convert(value, arm, path)
    for arm in arms:
        if isinstance(arm, type) and issubclass(arm, Settings):
            built = _from_short_form(value, arm, path)
            if built is not None:
                return built
    raise ConfigError(path, f"expected {' or '.join(map(_describe, arms))}", value)


def _shapes(hint: object) -> tuple[type, ...]:
    """Return the types of values that can be converted to a hint without parsing."""
    origin = get_origin(hint) or hint
    if origin is list:
        return (list, tuple)
    if origin is dict:
        return (Mapping,)
    if origin is Literal:
        return tuple({type(word) for word in get_args(hint)})
    if not isinstance(origin, type):  # Any
        return (object,)
    return (Mapping, origin) if issubclass(origin, Settings) else (origin,)


def _convert_scalar(value: object, hint: object, path: str) -> object:
    if hint not in SCALARS:
        raise TypeError(f"{path}: settings of type {hint} are not supported")
    expected, read = SCALARS[hint]
    converted = read(value)
    if converted is None:
        # Numbers are rejected: the command line parses 2026_11_20 as a number.
        is_number = hint is str and isinstance(value, (int, float)) and not isinstance(value, bool)
        remedy = _quoted_number if is_number else None
        shown = "an integer of more than 300 digits" if _is_huge(value) else value
        raise ConfigError(path, f"expected {expected}", shown, remedy)
    return converted


def _integer(value: object) -> int | None:
    """Return an integer; accepts 10k, 1.5M and 1e6."""
    if isinstance(value, str):
        ending = {"k": "e3", "m": "e6"}.get(value[-1:].lower())
        value = value if ending is None else value[:-1] + ending
        try:
            return int(value)
        except ValueError:
            value = _number(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or _is_huge(value):
        return None
    return int(value) if isinstance(value, int) or value.is_integer() else None


def _is_huge(value: object) -> bool:
    """Return whether a number is an integer that no float can represent."""
    return isinstance(value, int) and value.bit_length() > 1023


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


SCALARS: Mapping[object, tuple[str, Callable[[object], object]]] = MappingProxyType(
    {
        int: ("an integer", _integer),
        float: ("a number", _number),
        bool: ("true or false", lambda value: value if isinstance(value, bool) else None),
        str: ("a string", lambda value: value if isinstance(value, str) else None),
    }
)
"""Name in messages and conversion function for each scalar type; a conversion returns None on
failure."""


def _describe(hint: object) -> str:
    if hint in SCALARS:
        return SCALARS[hint][0]
    if isinstance(hint, type) and issubclass(hint, Settings):
        return f"a mapping with the keys {', '.join(field_of_key(hint))}"
    return "a list" if get_origin(hint) is list else "a mapping"


def _quoted_number(path: str) -> str:
    """Return the hint for a string that YAML parses as a number."""
    word = f"{path}='\"...\"'" if PLAIN.fullmatch(path) else shlex.quote(f'{path}="..."')
    return f"; quote strings that look like numbers: {word}"


def written(path: str, value: object, keys: Iterable[str] = (), in_list: bool = False) -> str:
    """Return the syntax of a mapping at `path` in YAML, shell and Python, for messages.

    A dotted path of a class is written as `_target_`.
    """
    place = path.rpartition("[")[0] if path.endswith("]") else path
    name = target_name(value)
    key, content = (TARGET, name) if name else (next(iter(keys), "key"), "value")
    text, code = f"{{{key}: {content}}}", f"{{{json.dumps(key)}: {json.dumps(content)}}}"
    if in_list or place != path:
        text, code = f"[{text}]", f"[{code}]"
    last = place.rpartition(".")[2]
    word = shlex.quote(f"{place}={text}")
    return f"; in YAML {last}: {text}, for a shell {word}, in Python {code}"


def _plain(value: object, path: str) -> object:
    """Return a deep copy of plain values, so that settings share no objects with their source.

    Raises:
        ConfigError: If a value cannot be stored in a file.
    """
    value = _unboxed(builtin(value))
    if isinstance(value, Mapping):
        if TUPLE in value:
            if len(value) > 1 or not isinstance(value[TUPLE], (list, tuple)):
                raise ConfigError(path, f"expected {{{TUPLE}: [a, b]}} for the tuple (a, b)", value)
            return tuple(_plain(entry, path) for entry in value[TUPLE])
        for key in value:
            if isinstance(key, tuple):
                raise ConfigError(path, "expected strings or numbers as keys", key)
        return {key: _plain(entry, join(path, key)) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        entries = [_plain(entry, f"{path}[{i}]") for i, entry in enumerate(value)]
        return entries if isinstance(value, list) else tuple(entries)
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise ConfigError(
            path,
            "config.yaml supports only numbers, strings, lists, tuples and mappings; create other "
            "objects in a class or function, and select it with _target_",
            value,
        )
    return value


def _written(value: object, hint: object) -> object:
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


def config_to_dict(config: Settings) -> dict[str, Any]:
    """Return settings as plain values for YAML.

    Use `load_config` to rebuild a `TrainConfig`, and `build_dataclass` for other classes.
    """
    dumped = config.to_plain(type(config))
    assert isinstance(dumped, dict)
    return dumped


def dotted_name(cls: Callable[..., object]) -> str:
    """Return the dotted path of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"
