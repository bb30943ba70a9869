"""Read the configuration of a run, which may be untrusted.

Parsing takes bounded time and memory and executes no code. A name in the configuration is only
imported if this user signed the file (see `signature`), if the name is a class of this package,
PyTorch or gymnasium with the expected type, or if the user's settings contain or trust the name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from maze_train.config.compose import PARTS, load_settings, place_of, section_of
from maze_train.config.named_code import names_in, with_names
from maze_train.config.reach import check_reach
from maze_train.config.removed import without_removed
from maze_train.config.signature import is_signed
from maze_train.config.train_config import TrainConfig
from maze_train.config.writing import MAX_BYTES, plain_values
from maze_train.core.conversion import convert
from maze_train.core.errors import ConfigError, RunDirectoryError
from maze_train.core.files import read_regular
from maze_train.core.names import CONFIG
from maze_train.core.targets import Stored, Trust, check_trusted

PARTS_OF_POLICY = (
    *(part for part in PARTS if part.startswith("model.")),
    "algorithm.policy_wrapper",
    "policies.source",
)
"""Components needed to act with a policy."""

PARTS_OF_ENV = ("env", "env.wrappers")
"""Components of an environment outside training."""


def read_settings(
    directory: Path, trust: Sequence[str] | None = None, own: object = None
) -> StoredSettings:
    """Read the configuration of a run or of a saved policy, without its `trust` setting.

    Args:
        directory: The directory.
        trust: Modules that the user trusts.
        own: The user's settings; all names in these settings are allowed.

    Raises:
        ConfigError: If `trust` is not a list of names.
        RunDirectoryError: If the file is missing, damaged, or was not written by this package.
    """
    path = directory / CONFIG
    try:
        text = read_regular(path, MAX_BYTES).decode()
    except FileNotFoundError as error:
        raise RunDirectoryError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{path} is damaged: {error}") from error
    return parsed_settings(text, path, trust, own)


def parsed_settings(
    text: str, path: Path, trust: Sequence[str] | None = None, own: object = None
) -> StoredSettings:
    """Parse the text of a configuration file, see `read_settings`; `path` is used in messages."""
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
    values, removed = without_removed(values)
    if is_signed(text):
        return StoredSettings(path, values, own, is_own=True, text=text, removed=removed)
    modules: list[str] = convert(trust or [], list[str], "trust")
    allowed = Trust(str(path), tuple(modules), frozenset(name for _, name, _ in names_in(own)))

    def stored(key: str, name: str, module: str) -> Stored:
        return Stored(name, allowed, key, PARTS.get(_part_of(key) or "", ""), module)

    return StoredSettings(path, with_names(values, stored), own, text=text, removed=removed)


def _problem_of(node: object) -> str:
    """Return a description of invalid values in a stored configuration; empty if all are valid."""
    if not isinstance(node, dict):
        return f"got {type(node).__name__}"
    for key, value in node.items():
        if not isinstance(key, str) or "." in key:
            return f"{key!r} is not the name of a setting"
        if section_of(TrainConfig.hints().get(key)) is not None and not isinstance(value, dict):
            return f"{key} is not a mapping"
    return ""


@dataclass(frozen=True)
class StoredSettings:
    """Configuration read from the file of a run, as plain values."""

    path: Path
    """Path of the file."""

    values: dict[str, Any]
    """The settings. In a file that this user did not sign, names are instances of `Stored`."""
    own: object = None
    """The user's settings."""

    is_own: bool = False
    """Whether this user signed the file. If so, all names in the file are trusted."""

    text: str = ""
    """Content of the file."""

    removed: Mapping[str, ConfigError | None] = field(default_factory=dict)
    """Settings of earlier versions in the file, see `without_removed`."""

    def check(self, settings: Mapping[str, Any], uses: Collection[str]) -> None:
        """Check that the settings require no untrusted code and access no other directories.

        Names that are not checked by this method raise an error when they are imported.

        Args:
            settings: Settings of the file, overridden by the user's settings.
            uses: Components that will be built, keys of `PARTS`.

        Raises:
            ConfigError: If settings require untrusted code or access the network or other
                directories (see `reach`). The message lists all of these settings.
        """
        check_trusted(settings, lambda key: (part := _part_of(key)) is None or part in uses)
        if self.is_own:
            return
        is_whole = PARTS.keys() <= set(uses)
        used = settings if is_whole else {k: settings.get(k) for k in ("env",) if k in uses}
        check_reach(used, self.own, str(self.path))


def settings_of_run(
    path: Path, config: TrainConfig, uses: Collection[str] = (), text: str | None = None
) -> TrainConfig:
    """Load the configuration of a run, to resume the run or to start from its policy.

    Args:
        path: The `config.yaml` of the run, or the file that `text` comes from.
        config: The user's configuration; all names in this configuration are trusted.
        uses: Components of the run that will be built, keys of `PARTS`.
        text: Content of the file; None: read from `path`.

    Raises:
        ConfigError: If the configuration requires untrusted code.
        RunDirectoryError: If the file is missing or damaged.
    """
    if text is None:
        stored = read_settings(path.parent, config.trust, config)
    else:
        stored = parsed_settings(text, path, config.trust, config)
    stored.check(stored.values, uses)
    return load_settings(TrainConfig, stored.values)


def _part_of(key: str) -> str | None:
    """Return the component of a key, or None for a plain setting."""
    key = place_of(key)
    found = [part for part in PARTS if key.startswith((f"{part}.", f"{part}["))]
    return max(found, key=len, default=None)
