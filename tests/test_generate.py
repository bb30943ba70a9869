"""Files generated from configuration classes are complete and current."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from typing import TYPE_CHECKING, get_type_hints

import yaml

from docs.generate import generated_files, main, render_table
from maze_train.algorithms.ppo.config import PPOAlgorithmConfig
from maze_train.config.commands import CompareConfig, ExportConfig, PushConfig
from maze_train.config.compose import load_config, load_settings
from maze_train.config.rollout_config import RolloutConfig, load_rollout_config
from maze_train.config.search_config import SearchConfig, load_search_config
from maze_train.config.train_config import TrainConfig
from maze_train.core.conversion import build_dataclass
from maze_train.core.targets import locate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest


def test_generated_files_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    """The generated files are up to date; `make conf` updates them."""
    assert main(["--check"]) == 0, capsys.readouterr().err


def generated_yaml() -> Iterator[tuple[Path, str]]:
    """Yield the generated configuration files."""
    yield from (item for item in generated_files().items() if item[0].suffix == ".yaml")


def test_generated_yaml_has_the_defaults() -> None:
    """Loading a generated file gives an object with default settings."""
    sections = get_type_hints(TrainConfig)
    for path, text in generated_yaml():
        content = yaml.safe_load(text)
        defaults = content.pop("defaults", None)
        if path.stem == "compare":
            assert defaults == ["_self_"]
            assert load_settings(CompareConfig, {**content, "runs": ["a"]}) == CompareConfig(
                runs=["a"]
            )
        elif path.stem == "export":
            assert defaults == ["_self_"]
            assert load_settings(ExportConfig, {**content, "run": "a"}) == ExportConfig(run="a")
        elif path.stem == "push":
            given = {"run": "a", "repo_id": "me/a"}
            assert load_settings(PushConfig, {**content, **given}) == PushConfig(**given)
        elif path.stem == "search":
            assert defaults == ["train", {"search": None}, "_self_"]
            ranges = {"search": {"seed": [1]}}
            assert load_search_config({**content, **ranges}) == (SearchConfig(**ranges), {})
        elif path.stem == "train":
            assert defaults[-2:] == ["_self_", {"experiment": None}]
            choices = {key for choice in defaults[:-2] for key in choice}
            assert {*choices, *content} == {*TrainConfig.hints()}
            chosen = {"algorithm": "ppo", "env": "CartPole-v1"}
            assert load_config({**content, **chosen}) == load_config(chosen)
        elif path.stem == "check":
            assert defaults == [{"env": "default"}, "_self_"]
        elif defaults is not None:
            assert defaults == [{"env": None}, {"runner": "dev"}, "_self_"]
            assert set(content) == {f.name for f in fields(RolloutConfig)} - {"env", "runner"}
            random = {"policy": "random", "env": "CartPole-v1"}
            assert load_rollout_config({**content, **random}) == load_rollout_config(random)
        elif path.stem != "sacfd":  # has a required setting
            target = content.pop("_target_", None)
            cls = sections[path.parent.name] if target is None else locate(target)
            assert build_dataclass(cls, content) == cls()


def test_every_setting_has_a_description() -> None:
    """Every field of a documented class has a description."""
    for path, text in generated_yaml():
        lines = [line.strip() for line in text.splitlines()]
        bare = [
            line
            for before, line in pairwise(lines)
            if not line.startswith(("#", "-")) and line and not before.startswith("#")
        ]
        assert all(line.startswith(("_target_:", "defaults:")) for line in bare), (path, bare)


def test_settings_table_has_a_row_per_setting() -> None:
    """The table has type, default and text; `|` inside cells is escaped."""
    table = render_table(PPOAlgorithmConfig)
    assert table.count("\n") == 2 + len(fields(PPOAlgorithmConfig))
    assert "| `lr` | `float \\| Schedule` | `linear_0.001` | Learning rate" in table
    assert "`global_norm \\| norm \\| value`" in table
