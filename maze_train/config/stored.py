"""Stored configurations of runs: text, signature, and reading, which may be of an untrusted file.

Parsing takes bounded time and memory and executes no code. A name in the configuration is only
imported if this user signed the file, if the name is a class of this package, PyTorch or gymnasium
with the expected type, or if the user's settings contain or trust the name. The signature is a
comment in the last line: HMAC-SHA256 (RFC 2104) over all preceding bytes. A stored configuration is
complete and never composed again.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from maze_train.config.compose import PARTS, load_settings, place_of, section_of
from maze_train.config.removed import without_removed
from maze_train.config.train_config import TrainConfig
from maze_train.config.trust import check_reach, names_in, with_names
from maze_train.core.conversion import config_to_dict, convert
from maze_train.core.errors import ConfigError, RunDirectoryError
from maze_train.core.files import atomic_write, read_regular, writable
from maze_train.core.folders import OPENS_BELOW
from maze_train.core.names import CONFIG
from maze_train.core.plain_yaml import LOADER, dump_yaml
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


# -- writing ---------------------------------------------------------------------------------------


MAX_BYTES, MAX_DEPTH, MAX_NUMBER = 250_000, 50, 1_000
"""Limits: file size in bytes, nesting depth, and digits of a number."""


def config_text(config: TrainConfig) -> str:
    """Return the configuration of a run as YAML, signed by this user.

    `run_dir`, `resume`, `trust` and `moved` are omitted, so that the file can be used for new runs.
    """
    config = replace(config, run_dir=None, resume=None, trust=[], moved=[])
    return signed(dump_yaml(config_to_dict(config)))


def check_text(text: str) -> None:
    """Check that a configuration file will be readable.

    Raises:
        ConfigError: If the text would not be valid, for example because the text is too large.
    """
    try:
        plain_values(text)
    except ValueError as error:
        raise ConfigError(CONFIG, f"would not be a valid file: {error}") from error


def write_config(run_dir: Path, text: str) -> None:
    """Write the configuration of a run.

    Raises:
        ConfigError: If the file cannot be written.
    """
    with writable("run_dir", run_dir), atomic_write(run_dir / CONFIG) as file:
        file.write(text.encode())


def plain_values(text: str) -> Any:
    """Parse a YAML text; only the features used by `config_text` are allowed.

    All YAML events are checked before any value is constructed.

    Raises:
        ValueError: If the text contains aliases, tags or duplicate keys, or exceeds a limit.
        yaml.YAMLError: If the text is not valid YAML, or has multiple documents.
    """
    if len(text) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES:,} bytes")
    depth = 0
    events: Iterator[Any] = yaml.parse(text, LOADER)
    for event in events:
        depth -= isinstance(event, yaml.CollectionEndEvent)
        is_node, is_start = (
            isinstance(event, kind) for kind in (yaml.NodeEvent, yaml.CollectionStartEvent)
        )
        if not is_node:
            continue
        depth += is_start
        where = f"in line {event.start_mark.line + 1}"
        if not (is_start or isinstance(event, yaml.ScalarEvent)) or event.tag is not None:
            raise ValueError(f"an alias or a tag {where} is not allowed")
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels {where}")
        given = "" if is_start or not event.implicit[0] else event.value
        if len(given) > MAX_NUMBER and given[0] in "+-.0123456789":
            raise ValueError(f"a number of {len(given):,} digits {where}")
    return yaml.load(text, _StrictLoader)


class _StrictLoader(LOADER):  # type: ignore[misc]  # a class that is a value
    """Loader that rejects duplicate and merged keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        """Construct a mapping; raise ValueError for duplicate keys."""
        keys: set[object] = set()
        for entry, _ in node.value:
            key = self.construct_object(entry, deep=True)
            is_scalar = not isinstance(key, (dict, list))
            if not is_scalar or key in keys:
                problem = f"duplicate key {key!r}" if is_scalar else "a key that is a collection"
                raise ValueError(f"{problem} in line {entry.start_mark.line + 1}")
            keys.add(key)
        mapping: dict[object, object] = super().construct_mapping(node, deep)
        return mapping


# -- signature -------------------------------------------------------------------------------------


SIGNATURE = "# signature of the user who made this: "
KEY, KEY_NBYTES = "key", 32


def config_home() -> Path:
    """Return the configuration folder of this package in the user's home directory."""
    home = os.environ.get("XDG_CONFIG_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path(os.path.expanduser("~/.config"))
    return base / "maze_train"


def signed(text: str) -> str:
    """Append the signature of this user; without a key, the text is returned unsigned."""
    try:
        return text + _signature(text, _key(make=True))
    except OSError:
        return text


def is_signed(text: str) -> bool:
    """Return whether the text carries a valid signature of this user."""
    settings, line, _ = text.rpartition(SIGNATURE)
    if not line:
        return False
    try:
        expected = settings + _signature(settings, _key())
    except OSError:
        return False
    return hmac.compare_digest(text.encode(), expected.encode())


def _signature(text: str, key: bytes) -> str:
    return f"{SIGNATURE}{hmac.new(key, text.encode(), hashlib.sha256).hexdigest()}\n"


def _key(make: bool = False) -> bytes:
    """Read the secret key of this user. Symbolic links are not followed.

    Args:
        make: Whether to create a missing key.

    Raises:
        OSError: If the key is missing, cannot be created, or is not a private file of this user.
    """
    home = config_home()
    if make:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not OPENS_BELOW:  # Windows: the home directory is private.
        return _key_by_path(home / KEY, make)
    folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if make:
            _make_key(folder)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(KEY, flags, dir_fd=folder), "rb") as file:
            found = os.fstat(file.fileno())
            is_private = found.st_uid == os.geteuid() and not found.st_mode & 0o077
            key = file.read(KEY_NBYTES + 1) if stat.S_ISREG(found.st_mode) else b""
    finally:
        os.close(folder)
    if not is_private or len(key) != KEY_NBYTES:
        raise OSError(f"{home / KEY} is not a key of this user")
    return key


def _key_by_path(path: Path, make: bool) -> bytes:
    """Read the key, without checks of its owner; see `_key`."""
    if make and not path.exists():
        with suppress(FileExistsError), path.open("xb") as file:
            file.write(secrets.token_bytes(KEY_NBYTES))
    key = path.read_bytes()
    if len(key) != KEY_NBYTES:
        raise OSError(f"{path} is not a key")
    return key


def _make_key(folder: int) -> None:
    """Create the key in an open folder; an existing key is kept."""
    with suppress(FileNotFoundError):
        os.stat(KEY, dir_fd=folder, follow_symlinks=False)
        return
    temporary = f".{KEY}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(temporary, flags, 0o600, dir_fd=folder), "wb") as file:
        file.write(secrets.token_bytes(KEY_NBYTES))
        file.flush()
        os.fsync(file.fileno())
    try:
        with suppress(FileExistsError):  # Another process created the key first.
            os.link(temporary, KEY, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.unlink(temporary, dir_fd=folder)
