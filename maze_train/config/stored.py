"""Reading of the configuration of a run, which may be untrusted.

Parsing takes bounded time and memory and executes no code. A name in the configuration is imported
only if this user signed the file (see `signature`), if it is a class of this package, PyTorch or
gymnasium of the expected type, or if the user named or trusts it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import yaml

from maze_train.config.loading import CHOICES, PARTS, load_config, place_of, section_of
from maze_train.config.reach import check_reach
from maze_train.config.signature import is_signed
from maze_train.config.train_config import TrainConfig
from maze_train.config.writing import MAX_BYTES, config_to_dict, plain_values
from maze_train.core.conversion import Settings, convert, is_within, join
from maze_train.core.errors import ConfigError, RunDirectoryError
from maze_train.core.files import read_regular
from maze_train.core.names import CONFIG
from maze_train.core.targets import (
    SCRIPT,
    TARGET,
    Given,
    has_no_name,
    imported,
    locate,
    made_in_python,
    script_name,
)

PARTS_OF_POLICY = (
    *(part for part in PARTS if part.startswith("model.")),
    "algorithm.policy_wrapper",
    "policies.source",
)
"""Components needed to act with a policy."""

PARTS_OF_ENV = ("env", "env.wrappers")
"""Components of an environment outside of training."""

OFFERED = ("maze_train", "torch.nn", "torch.optim", "gymnasium.wrappers", "minigrid.wrappers")
"""Packages whose classes need no trust."""

UNSAFE = ("gymnasium.wrappers.array_conversion", "gymnasium.wrappers.rendering")
"""Exceptions from `OFFERED`: modules that import or write to what their arguments name."""

REGISTRY = "pettingzoo:"
"""Prefix of ids that can only select environments of a known package."""


ENV_ID = re.compile(r"env\.(id$|kwargs[.\[])")
"""Settings that are environment ids, or arguments that may contain one."""


# -- reading ---------------------------------------------------------------------------------------


def read_settings(directory: Path) -> StoredSettings:
    """Read the configuration of a run or of a saved policy, without its `trust` setting.

    Raises:
        RunDirectoryError: If the file is missing, damaged, or was not written by this package.
    """
    path = directory / CONFIG
    try:
        text = read_regular(path, MAX_BYTES).decode()
    except FileNotFoundError as error:
        raise RunDirectoryError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{path} is damaged: {error}") from error
    return parsed_settings(text, path)


def parsed_settings(text: str, path: Path) -> StoredSettings:
    """Parse the text of a configuration file; `path` is used in messages."""
    try:
        node = plain_values(text)
    except (ValueError, ArithmeticError, yaml.YAMLError) as error:
        raise RunDirectoryError(f"{path} is damaged: {error}") from error
    problem = _problem_of(node)
    if problem:
        raise RunDirectoryError(
            f"{path} is damaged: expected the configuration of a run; {problem}"
        )
    values = {key: value for key, value in node.items() if key not in ("trust", "moved")}
    return StoredSettings(path, values, is_signed(text))


def _problem_of(node: Any) -> str:
    """Return why the values cannot come from a written configuration; empty if they can."""
    if not isinstance(node, dict):
        return f"got {type(node).__name__}"
    sections = get_type_hints(TrainConfig)
    for key, value in node.items():
        if not isinstance(key, str) or "." in key:
            return f"{key!r} is not the name of a setting"
        # A string, or a mapping with `name`, would load an option from another file.
        if section_of(sections.get(key)) is not None and not isinstance(value, dict):
            return f"{key} is not a mapping"
        if key in CHOICES and "name" in value:
            return f"{key}.name is not allowed"
    return ""


# -- what it may name ------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredSettings:
    """Configuration read from the file of a run, as plain values."""

    path: Path
    """The file."""

    values: dict[str, Any]

    is_own: bool = False
    """Whether this user signed the file; if so, everything that it names is trusted."""

    def check(
        self,
        settings: Mapping[str, Any],
        trust: Sequence[str] | None,
        own: Any,
        uses: Collection[str],
    ) -> None:
        """Raise an error if the settings name untrusted code, or access other places.

        Only trusted modules are imported, and nothing is called.

        Args:
            settings: Settings of the file, overridden by the user's settings.
            trust: Modules that the user trusts.
            own: The user's settings; everything that they name is allowed.
            uses: Components that will be built, keys of `PARTS`.

        Raises:
            ConfigError: If a setting names untrusted code (all of them are listed), or accesses the
                network or other directories (see `reach`).
        """
        modules: list[str] = convert(trust or [], list[str], "trust")
        named = {path for _, path, _ in _targets_in(own)}
        refused, words = [], set()
        for key, target, module in () if self.is_own else _targets_in(settings):
            part = _part_of(key)
            # Objects created in Python, such as a lambda, have no importable name. They cause an
            # error when the component is built.
            if target in named or "<" in target or not (part is None or part in uses):
                continue
            reason = _refusal(target, module, PARTS.get(part or ""), modules)
            if reason is not None:
                note, word = reason
                refused.append(f"\n  {key} = {target}{note}")
                words.update([word] if word else [])
        if not refused:
            self._check_reach(settings, own, uses)
            return
        listed = sorted({*words, *modules})
        remedy = (
            "The file was made by another user or on another machine (it is not signed by you). If "
            "you know this code and who made the run, allow its modules: "
            f"trust=[{','.join(listed)}] (in Python trust={listed!r})"
        )
        raise ConfigError(
            "trust",
            f"{self.path} names code that is not provided by this package, torch.nn, torch.optim "
            f"or gymnasium for this purpose; nothing was called:{''.join(refused)}"
            + (f"\n{remedy}" if words else ""),
        )

    def _check_reach(self, settings: Mapping[str, Any], own: Any, uses: Collection[str]) -> None:
        """Check the settings that are used (all, or only `env`) for access to other places.

        Raises:
            ConfigError: If a setting accesses the network or other directories.
        """
        is_whole = PARTS.keys() <= set(uses)
        used = settings if is_whole else {k: settings.get(k) for k in ("env",) if k in uses}
        if not self.is_own:
            check_reach(used, own, str(self.path))


def settings_of_run(
    path: Path, config: TrainConfig, uses: Collection[str] = (), text: str | None = None
) -> TrainConfig:
    """Load the configuration of a run, in order to resume it or to start from its policy.

    Args:
        path: The `config.yaml` of the run, or the file that `text` comes from.
        config: The user's configuration; everything that it names is trusted.
        uses: Components that are taken from the run and built, keys of `PARTS`.
        text: Content of the file; None to read it.

    Raises:
        ConfigError: If the configuration names untrusted code.
        RunDirectoryError: If the file is missing or damaged.
    """
    stored = read_settings(path.parent) if text is None else parsed_settings(text, path)
    stored.check(stored.values, config.trust, config, uses)
    return load_config(stored.values)


def modules_to_trust(config: TrainConfig) -> list[str]:
    """Return the modules that another user must trust to resume a run of this configuration."""
    roots = {
        (module or path.replace(":", ".")).partition(".")[0]
        for _, path, module in _targets_in(config)
        if not is_within(path, OFFERED) and not isinstance(path, Given)
    }
    return sorted(roots)


def given_in_python(config: TrainConfig) -> list[str]:
    """Return the keys of all targets that were given as Python objects."""
    return [key for key, path, _ in _targets_in(config) if isinstance(path, Given)]


def check_given(settings: Mapping[str, Any]) -> None:
    """Check that all Python objects that the settings refer to are available.

    Raises:
        ConfigError: If some are missing; lists all of them.
    """
    missing = {}
    for key, path, _ in _targets_in(settings):
        if has_no_name(path):
            try:
                locate(path)
            except ConfigError:
                missing[key] = path
    if missing:
        raise made_in_python(list(missing), *missing.values())


def _targets_in(node: Any, key: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield all importable names in the settings, at any depth.

    Yields:
        Key, name, and the module that an environment id imports (empty for other names).
    """
    if isinstance(node, Settings):
        node = config_to_dict(node)
    if isinstance(node, Mapping):
        target = node.get(TARGET)
        if target is not None:
            yield join(key, TARGET), target if isinstance(target, str) else str(target), ""
        for name, value in node.items():
            # Replace dots, so that an id with dots cannot be mistaken for nested keys.
            yield from _targets_in(value, join(key, str(name).replace(".", "/")))
    elif isinstance(node, list | tuple):
        for i, value in enumerate(node):
            yield from _targets_in(value, f"{key}[{i}]")
    elif isinstance(node, str) and ENV_ID.match(key) and not key.endswith(f".{TARGET}"):
        from maze_train.envs import registered  # late, because gymnasium is slow to import

        is_id, text = key == "env.id", node.removeprefix(REGISTRY)
        module = registered.module_of_id(text) if is_id else registered.module_of_argument(node)
        if module:
            yield key, text, module


def _part_of(key: str) -> str | None:
    """Return the component that a key belongs to, or None for a plain setting."""
    key = place_of(key)
    found = [part for part in PARTS if key.startswith((f"{part}.", f"{part}["))]
    return max(found, key=len, default=None)


def _refusal(
    path: str, id_module: str, kind: str | None, trust: Sequence[str]
) -> tuple[str, str] | None:
    """Return why a name is not allowed: a note, and the module to trust (may be empty).

    None if the name is allowed, or does not exist (reported when the component is built).
    """
    if id_module:
        return None if is_within(id_module, trust) else ("", id_module.partition(".")[0])
    path = path.replace(":", ".")
    is_trusted = is_within(path, trust)
    if not is_trusted and not is_within(path, OFFERED):
        return "", path.partition(".")[0]
    try:
        module, names = imported(path)
        found: Any = module
        for name in names:
            found = getattr(found, name, None)
            if found is None:
                return None
            if isinstance(found, ModuleType):  # e.g. a module imported by the offered one
                return f" ({name} is a separate module)", ""
    except ConfigError:
        return None
    except ImportError as error:  # from a lazily imported name
        return f" ({error})", ""
    is_maker = isinstance(found, type) or inspect.isroutine(found)
    home = str(getattr(found, "__module__", None) or "builtins") if is_maker else module.__name__
    home = script_name() if home == SCRIPT else home
    if _is_offered(found, home, kind) or (is_trusted and is_within(home, [*trust, *OFFERED])):
        return None
    if is_trusted:
        return f" (defined in {home})", home.partition(".")[0]
    return f" (expected a class of {kind or 'settings'})", module.__name__


def _is_offered(found: Any, home: str, kind: str | None) -> bool:
    """Return whether an object is a component or settings class that needs no trust."""
    if not isinstance(found, type) or not is_within(home, OFFERED) or is_within(home, UNSAFE):
        return False
    return is_dataclass(found) if kind is None else issubclass(found, locate(kind))
