"""Tests of the command that a configuration is for."""

from __future__ import annotations

import pytest
import yaml

from maze_train.config.commands import KEYS, TRAIN, command_of
from maze_train.config.options import shipped_root


@pytest.mark.parametrize("command", [*KEYS, TRAIN])
def test_a_command_is_known_by_its_name_or_its_keys(command: str) -> None:
    """A primary config of the user that extends ours has its own name."""
    text = (shipped_root() / f"{command}.yaml").read_text()
    shipped = {key: value for key, value in yaml.safe_load(text).items() if key != "defaults"}
    assert command_of(command, {}) == command
    assert command_of("mine", {**shipped, "more": 1}) == command
