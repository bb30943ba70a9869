"""Setup and cleanup of all runs in these tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from own_envs import SpacesEnv

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def empty_directory(
    no_file_is_left: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Change to an empty directory; check that all environments are closed and no file is left."""
    monkeypatch.chdir(tmp_path)
    SpacesEnv.open_envs = 0
    yield
    assert SpacesEnv.open_envs == 0
