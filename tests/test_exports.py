"""The lazy public names and their types."""

from __future__ import annotations

from pathlib import Path

import maze_train


def stub_text() -> str:
    """What `maze_train/__init__.pyi` must hold: an explicit re-export of every public name."""
    lines = [
        f"# Repeats `_EXPORTS` of __init__.py for type checkers; {Path(__file__).name} compares."
    ]
    lines += ["", "__version__: str", ""]
    for module, names in sorted(maze_train._EXPORTS.items()):
        lines += [f"from {module} import {name} as {name}" for name in sorted(names)]
    return "\n".join(lines) + "\n"


def test_stub_is_current():
    """Type checkers see the same public names as users."""
    stub = Path(maze_train.__file__).with_name("__init__.pyi")
    assert stub.read_text() == stub_text()


def test_every_name_can_be_imported():
    """Each public name exists in the module that it is said to live in."""
    assert all(getattr(maze_train, name) is not None for name in maze_train.__all__)
