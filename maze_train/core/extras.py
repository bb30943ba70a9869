"""Imports packages that come with extras of `maze-train`."""

from __future__ import annotations

import importlib
from typing import Any

from maze_train.core.errors import MissingExtraError


def import_extra(package: str, extra: str, purpose: str, module: str | None = None) -> Any:
    """Import a module of an optional dependency.

    Args:
        package: Name of the package, as pip knows it.
        extra: Name of the extra that installs it.
        purpose: Feature that needs it.
        module: Name of the module; None: that of the package.

    Raises:
        MissingExtraError: If the package is not installed, or can not be imported.
    """
    module = module or package
    try:
        return importlib.import_module(module)
    except Exception as error:
        # One that is raised inside of the package does not say that the package is missing.
        is_missing = isinstance(error, ModuleNotFoundError) and (
            f"{module}.".startswith(f"{error.name}.")
        )
        problem = None if is_missing else f"{type(error).__name__}: {error}"
        raise MissingExtraError(package, extra, purpose, problem) from error
