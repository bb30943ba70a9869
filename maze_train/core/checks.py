"""Checks of settings (for `__post_init__`), and of tensor shapes."""

from __future__ import annotations

import errno
import glob
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from maze_train.core.errors import ConfigError, ShapeError, one_of
from maze_train.core.names import LATEST, OUTPUTS

if TYPE_CHECKING:
    from torch import Tensor


LONGEST_BELOW = 150
"""Maximum length of paths below a directory created by maze_train, in characters."""

LONGEST_NAME = 255
"""Maximum length of the name of a file or directory in bytes, on most file systems."""

UNKNOWN = re.compile(r"^~[^/]*|\$(\w+|\{[^}]*\})", re.ASCII)
"""Matches an undefined `~user` or variable in an expanded path."""

NAMES_A_RUN = ("run", "resume", "base_run")
"""Settings in which `latest` refers to the most recently started run."""

MAX_THREADS = 1024
"""Maximum number of threads or processes in a setting; the OS rejects much larger values."""


def expanded(name: str | os.PathLike[str]) -> str:
    """Expand `~`, `~user`, `$NAME` and `${NAME}` in a path, like a shell.

    Undefined users and variables are left unchanged.
    """
    return os.path.expandvars(os.path.expanduser(name))


def absolute_path(key: str, name: str) -> str:
    """Return the absolute path for a file or directory setting; see `expanded`.

    An absolute path remains valid if an environment changes the working directory. Hub repositories
    (`hf://...`) and Minari datasets (`minari:...`) are returned unchanged. In settings of a run,
    `latest` and `latest@<version>` refer to the most recently started run in `outputs/`.

    Raises:
        ConfigError: If the name is empty, contains an undefined variable or user, or is not a valid
            path.
    """
    if not name.strip():
        raise ConfigError(key, "expected a path, or null", name)
    if name.startswith(("hf://", "minari:")):  # See `core.hub` and `data.datasets`.
        return name
    if key in NAMES_A_RUN and name.partition("@")[0] == LATEST:
        name = name.replace(LATEST, _latest_run(key, name), 1)
    path = Path(expanded(name)).absolute()
    unknown = UNKNOWN.search(expanded(name))
    try:
        if unknown and not os.path.lexists(path):
            problem = f"{unknown[0]} is undefined: set the variable, or write the full path"
            raise ConfigError(key, problem, name)
        str(path).encode()  # Raises if the path is not valid UTF-8.
        path.lstat()
        path.joinpath(*["x" * (LONGEST_BELOW // 2)] * 2).lstat()
    except ValueError as error:
        raise ConfigError(key, f"not a valid path: {error}", name) from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            problem = f"the path of {len(str(path))} characters is too long: use a shorter path"
            raise ConfigError(key, problem, name) from error
    return str(path)


def _latest_run(key: str, name: str) -> str:
    link = os.path.join(OUTPUTS, LATEST)
    if not os.path.isdir(link):
        problem = f"{link} does not exist: no run has started in {OUTPUTS}/ of this directory"
        raise ConfigError(key, problem, name)
    return os.path.realpath(link)


def matching_folders(key: str, pattern: str) -> dict[str, str]:
    """Return the folders that match a glob pattern, in numeric order.

    Returns:
        Paths, keyed by name. The name is the path relative to the common parent folder. Links to
        folders already found are omitted.

    Raises:
        ConfigError: If no folder matches.
    """
    paths = sorted(map(os.path.abspath, glob.glob(expanded(pattern))), key=_is_link)
    found = {os.path.realpath(path): path for path in paths if os.path.isdir(path)}.values()
    if not found:
        raise ConfigError(key, "no directory matches this pattern", pattern)
    common = os.path.commonpath([os.path.dirname(path) for path in found])
    names = {os.path.relpath(path, common): path for path in found}
    return {name: names[name] for name in sorted(names, key=lambda name: (len(name), name))}


def _is_link(path: str) -> tuple[bool, str]:
    """Sort key: links before folders, so that a folder replaces links to it."""
    return os.path.realpath(path) == path, path


def check_below(key: str, name: str) -> None:
    """Raise if a file name is absolute or contains `..`, or cannot be the name of a file."""
    if not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ConfigError(key, "expected a path below the run directory, without ..", name)
    longest = max(len(part.encode(errors="surrogatepass")) for part in Path(name).parts)
    if "\0" in name or name.encode(errors="ignore").decode() != name or longest > LONGEST_NAME:
        problem = f"expected valid characters, at most {LONGEST_NAME} bytes between slashes"
        raise ConfigError(key, problem, name)


def _check_finite(key: str, value: float) -> None:
    if not math.isfinite(value):
        raise ConfigError(key, "expected a finite number", value)


def check_positive(key: str, value: float) -> None:
    """Raise if a value is not finite and > 0."""
    _check_finite(key, value)
    if value <= 0:
        raise ConfigError(key, "expected a number > 0", value)


def check_at_least(key: str, value: float, minimum: float) -> None:
    """Raise if a value is not finite and >= `minimum`."""
    _check_finite(key, value)
    if value < minimum:
        raise ConfigError(key, f"expected a number >= {minimum:g}", value)


def check_between(key: str, value: float, low: float, high: float) -> None:
    """Raise if a value is outside the closed interval [low, high]."""
    _check_finite(key, value)
    if not low <= value <= high:
        raise ConfigError(key, f"expected a number in [{low:g}, {high:g}]", value)


def check_one_of(key: str, value: object, allowed: Iterable[str]) -> None:
    """Raise if a value is not in `allowed`; the message suggests the closest name."""
    names = list(allowed)
    if value not in names:
        raise ConfigError(key, one_of(str(value), names), value)


def check_fields(settings: object, minimum: float, *keys: str, maximum: float = math.inf) -> None:
    """Raise if a field of a dataclass is not a finite number in [minimum, maximum]."""
    for key in keys:
        value = vars(settings)[key]
        if maximum < math.inf:
            check_between(key, value, minimum, maximum)
        else:
            check_at_least(key, value, minimum)


def check_same_shape(**tensors: Tensor) -> None:
    """Raise if tensors differ in shape, because broadcasting would hide the error.

    A column [N, 1] against a row [N] broadcasts silently to [N, N], which still has a finite mean.

    Args:
        **tensors: At least one tensor. The first tensor has the expected shape. Argument names
            are used in the message.

    Raises:
        ShapeError: If the shape of a tensor differs from the shape of the first tensor. The message
            contains the names and shapes of both tensors.
    """
    (first_name, first), *others = tensors.items()
    expected = first.shape
    for name, tensor in others:
        if tensor.shape != expected:
            raise ShapeError(
                f"{name} has shape {list(tensor.shape)}, "
                f"expected {list(expected)} like {first_name}"
            )
