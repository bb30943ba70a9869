"""Checks of settings, for the `__post_init__` of configuration dataclasses, and of shapes."""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maze_train.core.errors import ConfigError, ShapeError, one_of

if TYPE_CHECKING:
    from torch import Tensor


LONGEST_BELOW = 150
"""Characters that the longest path within a directory of ours takes."""

UNKNOWN = re.compile(r"^~[^/]*|\$(\w+|\{[^}]*\})", re.ASCII)
"""A user or a variable in a path that was expanded: the system knows none of this name."""

MOST_THREADS = 1024
"""Threads of one process, or processes, that may be asked for: a system refuses many more."""


def expanded(name: str | os.PathLike[str]) -> str:
    """Return a path with `~`, `~user`, `$NAME` and `${NAME}` expanded, as a shell does.

    What is unknown stays as it is.
    """
    return os.path.expandvars(os.path.expanduser(name))


def absolute_path(key: str, name: str) -> str:
    """Return the absolute path of a file or directory that a setting names, see `expanded`.

    An environment may change the working directory. The name of a repository of the hub stays as it
    is, and that of a Minari dataset.

    Raises:
        ConfigError: If no name is given, a variable or a user in it is unknown, or the system can
            have nothing there.
    """
    if not name.strip():
        raise ConfigError(key, "expected the name of a directory, or null", name)
    if name.startswith(("hf://", "minari:")):  # see `core.hub` and `data.datasets`
        return name
    path = Path(expanded(name)).absolute()
    unknown = UNKNOWN.search(expanded(name))
    try:
        if unknown and not os.path.lexists(path):
            problem = f"{unknown[0]} is unknown: set the variable, or write the path in full"
            raise ConfigError(key, problem, name)
        path.lstat()
        path.joinpath(*["x" * (LONGEST_BELOW // 2)] * 2).lstat()
    except ValueError as error:
        raise ConfigError(key, f"cannot be a path: {error}", name) from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            problem = f"this path of {len(str(path))} characters is too long: choose a shorter one"
            raise ConfigError(key, problem, name) from error
    return str(path)


def check_below(key: str, name: str) -> None:
    """Refuse a name that leads out of the directory in which a file is written."""
    if not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ConfigError(key, "expected a path below the run directory, without ..", name)


def _check_finite(key: str, value: float) -> None:
    if not math.isfinite(value):
        raise ConfigError(key, "expected a finite number", value)


def check_positive(key: str, value: float) -> None:
    """Refuse a value that is not a finite number above 0."""
    _check_finite(key, value)
    if value <= 0:
        raise ConfigError(key, "expected a number > 0", value)


def check_at_least(key: str, value: float, minimum: float) -> None:
    """Refuse a value that is not a finite number of at least `minimum`."""
    _check_finite(key, value)
    if value < minimum:
        raise ConfigError(key, f"expected a number >= {minimum:g}", value)


def check_between(key: str, value: float, low: float, high: float) -> None:
    """Refuse a value outside the closed interval [low, high]."""
    _check_finite(key, value)
    if not low <= value <= high:
        raise ConfigError(key, f"expected a number in [{low:g}, {high:g}]", value)


def check_one_of(key: str, value: Any, allowed: Iterable[str]) -> None:
    """Refuse a value that is not among `allowed`, naming the closest one."""
    names = list(allowed)
    if value not in names:
        raise ConfigError(key, one_of(str(value), names), value)


def check_fields(settings: object, minimum: float, *keys: str, maximum: float = math.inf) -> None:
    """Refuse fields of a dataclass that are not finite numbers in [minimum, maximum]."""
    for key in keys:
        value = getattr(settings, key)
        if maximum < math.inf:
            check_between(key, value, minimum, maximum)
        else:
            check_at_least(key, value, minimum)


def check_same_shape(**tensors: Tensor) -> None:
    """Refuse tensors that differ in shape, because broadcasting would hide the mistake.

    A column [N, 1] against a row [N] broadcasts silently to [N, N] and still has a finite mean.

    Args:
        **tensors: At least one tensor; the names appear in the message, and the first sets the
            expected shape.

    Raises:
        ShapeError: If a tensor has another shape than the first; the message names both tensors
            and both shapes.
    """
    (first_name, first), *others = tensors.items()
    expected = first.shape
    for name, tensor in others:
        if tensor.shape != expected:
            raise ShapeError(
                f"{name} has shape {list(tensor.shape)}, "
                f"expected {list(expected)} like {first_name}"
            )
