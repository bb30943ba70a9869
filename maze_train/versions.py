"""Versions that wrote a file."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


PACKAGES = ("maze-train", "torch", "numpy", "gymnasium")


@cache
def versions() -> Mapping[str, str]:
    """Versions of `python`, `maze_train`, `torch`, `numpy` and `gymnasium`; nothing is imported.

    One that is not known (a copy of the sources that is not installed) is `unknown`.
    """
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name.replace("-", "_")] = version(name)
        except PackageNotFoundError:
            found[name.replace("-", "_")] = "unknown"
    return MappingProxyType(found)
