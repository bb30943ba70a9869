"""Configuration in the directory of a run, which may come from a stranger.

Reading it takes bounded time and memory and calls nothing. What it names is imported only where
this user wrote it (see `signature`), or it is a class of this package, PyTorch or gymnasium of the
kind that belongs there, or the user named or trusts it.
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
"""Parts of a policy that acts."""

PARTS_OF_ENV = ("env", "env.wrappers")
"""Parts of an environment that is not for training."""

OFFERED = ("maze_train", "torch.nn", "torch.optim", "gymnasium.wrappers", "minigrid.wrappers")
"""Packages whose classes need no trust."""

UNSAFE = ("gymnasium.wrappers.array_conversion", "gymnasium.wrappers.rendering")
"""Modules of these that import what their arguments say, or write where these say."""

REGISTRY = "pettingzoo:"
"""Beginning of ids that lead to nothing but the environments of a known package."""


ENV_ID = re.compile(r"env\.(id$|kwargs[.\[])")
"""Settings that are ids of environments, or arguments that may be some."""


# -- reading ---------------------------------------------------------------------------------------


def read_settings(directory: Path) -> StoredSettings:
    """Read the configuration of a run or of a saved policy, without `trust`.

    Raises:
        RunDirectoryError: If it is missing or damaged, or holds what this package does not write.
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
    """The settings that a text holds, of the file of a run."""
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
    """Name the reason why values cannot be those of a written configuration; empty: they can."""
    if not isinstance(node, dict):
        return f"got {type(node).__name__}"
    sections = get_type_hints(TrainConfig)
    for key, value in node.items():
        if not isinstance(key, str) or "." in key:
            return f"{key!r} is no name of a setting"
        # A text, or a mapping with a name, would be read as that of an option: of another file.
        if section_of(sections.get(key)) is not None and not isinstance(value, dict):
            return f"{key} is no mapping"
        if key in CHOICES and "name" in value:
            return f"{key}.name is not written"
    return ""


# -- what it may name ------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredSettings:
    """The configuration in the file of a run, as plain values."""

    path: Path
    """The file."""

    values: dict[str, Any]

    is_own: bool = False
    """Whether this user wrote it: then all that it names is trusted."""

    def check(
        self,
        settings: Mapping[str, Any],
        trust: Sequence[str] | None,
        own: Any,
        uses: Collection[str],
    ) -> None:
        """Refuse settings that name what neither is offered for its place nor has the user's trust.

        Nothing else is imported, and nothing called.

        Args:
            settings: Those of the file, changed by those of the user.
            trust: Modules that may be used.
            own: Settings of the user: what they name may be used.
            uses: Parts that are going to be built, of `PARTS`.

        Raises:
            ConfigError: If they do; it lists all that they name so. Also if they reach the network
                or other directories, see `reach`.
        """
        modules: list[str] = convert(trust or [], list[str], "trust")
        named = {path for _, path, _ in _targets_in(own)}
        refused, words = [], set()
        for key, target, module in () if self.is_own else _targets_in(settings):
            part = _part_of(key)
            # No name leads to what was made in Python, as `<lambda>`: it is missed where it is
            # built.
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
            "It is not signed by you, as what you make on this machine is. If you know this code "
            f"and who made the run, allow its modules: trust=[{','.join(listed)}] (in Python "
            f"trust={listed!r})"
        )
        raise ConfigError(
            "trust",
            f"{self.path} names what neither this package nor torch.nn, torch.optim or "
            f"gymnasium offers for its place; none of it was called:{''.join(refused)}"
            + (f"\n{remedy}" if words else ""),
        )

    def _check_reach(self, settings: Mapping[str, Any], own: Any, uses: Collection[str]) -> None:
        """Refuse settings that are used and reach elsewhere: those of a whole run, or of its env.

        Raises:
            ConfigError: If there are any.
        """
        is_whole = PARTS.keys() <= set(uses)
        used = settings if is_whole else {k: settings.get(k) for k in ("env",) if k in uses}
        if not self.is_own:
            check_reach(used, own, str(self.path))


def settings_of_run(
    path: Path, config: TrainConfig, uses: Collection[str] = (), text: str | None = None
) -> TrainConfig:
    """The configuration of a run, for one that continues it or begins with its policy.

    Args:
        path: Its `config.yaml`, or the file that `text` comes from.
        config: Configuration of the user, who trusts what it names.
        uses: Parts that are taken from there and built, of `PARTS`.
        text: Content of the file; None: it is read.

    Raises:
        ConfigError: If it names what is neither offered nor trusted.
        RunDirectoryError: If it is missing or damaged.
    """
    stored = read_settings(path.parent) if text is None else parsed_settings(text, path)
    stored.check(stored.values, config.trust, config, uses)
    return load_config(stored.values)


def modules_to_trust(config: TrainConfig) -> list[str]:
    """The modules that one has to trust to continue a run of this configuration."""
    roots = {
        (module or path.replace(":", ".")).partition(".")[0]
        for _, path, module in _targets_in(config)
        if not is_within(path, OFFERED) and not isinstance(path, Given)
    }
    return sorted(roots)


def given_in_python(config: TrainConfig) -> list[str]:
    """The keys of all targets that are objects of Python."""
    return [key for key, path, _ in _targets_in(config) if isinstance(path, Given)]


def check_given(settings: Mapping[str, Any]) -> None:
    """Refuse settings that name objects of Python which are not there.

    Raises:
        ConfigError: It lists them all.
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
    """Everything that settings name to be imported, at any depth.

    Yields:
        The key, the name, and the module that an id of an environment has imported; that of other
        names is a part of them, and empty here.
    """
    if isinstance(node, Settings):
        node = config_to_dict(node)
    if isinstance(node, Mapping):
        target = node.get(TARGET)
        if target is not None:
            yield join(key, TARGET), target if isinstance(target, str) else str(target), ""
        for name, value in node.items():
            # An id with dots must not look like several keys: the last ones would name another
            # part.
            yield from _targets_in(value, join(key, str(name).replace(".", "/")))
    elif isinstance(node, list | tuple):
        for i, value in enumerate(node):
            yield from _targets_in(value, f"{key}[{i}]")
    elif isinstance(node, str) and ENV_ID.match(key) and not key.endswith(f".{TARGET}"):
        from maze_train.envs import registered  # late: gymnasium takes its time

        is_id, text = key == "env.id", node.removeprefix(REGISTRY)
        module = registered.module_of_id(text) if is_id else registered.module_of_argument(node)
        if module:
            yield key, text, module


def _part_of(key: str) -> str | None:
    """The part to which a key belongs; None: it is one of the settings."""
    key = place_of(key)
    found = [part for part in PARTS if key.startswith((f"{part}.", f"{part}["))]
    return max(found, key=len, default=None)


def _refusal(
    path: str, id_module: str, kind: str | None, trust: Sequence[str]
) -> tuple[str, str] | None:
    """Say why something is not used: a note, and the module that would have to be trusted.

    None: it may be used, or is not there, which is reported where it is built.
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
            if isinstance(found, ModuleType):  # such as one that this module imports for itself
                return f" ({name} is its own module)", ""
    except ConfigError:
        return None
    except ImportError as error:  # of a name that is imported when it is first used
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
    """Whether something is a class of a part, or of settings, that needs no trust."""
    if not isinstance(found, type) or not is_within(home, OFFERED) or is_within(home, UNSAFE):
        return False
    return is_dataclass(found) if kind is None else issubclass(found, locate(kind))
