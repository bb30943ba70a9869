"""The public names listed in `maze_train/__init__.pyi`."""

from __future__ import annotations

import importlib

import pytest

import maze_train
from docs.generate import stub_path


def test_public_names_can_be_imported():
    """Each public name is imported from the listed module, and is listed once."""
    lines = [line.split() for line in stub_path().read_text().splitlines() if "import" in line]
    names = [line[3] for line in lines]
    assert len(names) > 150
    assert len(names) == len(set(names))
    assert dir(maze_train) == sorted(maze_train.__all__)
    assert set(maze_train.__all__) - {"__version__"} < set(names)
    assert len(maze_train.__all__) <= 55
    for _, module, _, name, _, alias in lines:
        assert alias == name
        assert getattr(maze_train, name) is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="no attribute 'PPP'"):
        maze_train.PPP  # noqa: B018  # reading the attribute is the test
