"""Public names and tables of events, as far as they are found in the folders of algorithms."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import textwrap
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import maze_train.algorithms
from maze_train.events import EventInterface

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


TABLE_HEAD = "| Column | Over an epoch | Meaning |\n| --- | --- | --- |"
WIDTH = 100
PUBLIC_MODULES = ("build", "config", "events", "learner", "trainer")
"""Modules of an algorithm whose classes are public."""


def stub_path() -> Path:
    """The file that lists the public names: `maze_train/__init__.pyi`."""
    return Path(str(files("maze_train"))) / "__init__.pyi"


def render_stub() -> str:
    """The list of public names: those of algorithms are found, the others stay as they are."""
    first, _, *lines = stub_path().read_text(encoding="utf-8").splitlines()
    found = {
        f"from {cls.__module__} import {cls.__name__} as {cls.__name__}" for cls in public_classes()
    }
    modules = {line.split()[1] for line in found}
    kept = {line for line in lines if line.startswith("from ") and line.split()[1] not in modules}
    names = sorted(found | kept, key=lambda line: (line.split()[1], line.split()[3]))
    return "\n".join([first, "", "__version__: str", "", *names]) + "\n"


def render_events() -> str:
    """The events of every algorithm as Markdown tables, without inherited ones."""
    parts = []
    for group in public_classes("events"):
        inherited = {event.tag for base in group.__bases__ for event in base.events()}
        rows = [
            f"| `{event.tag}` | {event.reduce} | {event.doc.replace('|', chr(92) + '|')} |"
            for event in group.events()
            if event.tag not in inherited
        ]
        also = [base.__name__ for base in group.__bases__ if base is not EventInterface]
        text = " ".join([f"`{group.__name__}`:", *str(inspect.getdoc(group)).split()])
        text += "".join(f" Besides those of `{name}`:" for name in also)
        parts.append("\n".join([*textwrap.wrap(text, WIDTH), "", TABLE_HEAD, *rows]))
    return "\n\n".join(parts) + "\n"


def public_classes(*names: str) -> list[Any]:
    """The public classes in modules of algorithms that have one of these names."""
    return [
        value
        for module in _modules(names or PUBLIC_MODULES)
        for name, value in sorted(vars(module).items())
        if isinstance(value, type) and value.__module__ == module.__name__ and name[0] != "_"
    ]


def _modules(names: tuple[str, ...]) -> Iterator[ModuleType]:
    for folder in pkgutil.iter_modules(maze_train.algorithms.__path__):
        package = importlib.import_module(f"maze_train.algorithms.{folder.name}")
        for entry in pkgutil.iter_modules(package.__path__):
            if entry.name in names:
                yield importlib.import_module(f"{package.__name__}.{entry.name}")
