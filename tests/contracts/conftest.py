"""Uninterrupted runs with which the contracts compare others."""

from __future__ import annotations

import pytest
from run_cases import start


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """Return a function that runs a case once, uninterrupted, and returns its directory."""
    directories = {}

    def run_of(case):
        if case not in directories:
            directories[case] = tmp_path_factory.mktemp("whole") / "run"
            start(case, directories[case])
        return directories[case]

    return run_of
