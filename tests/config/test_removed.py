"""Settings of earlier versions: files of 0.3.0 load, removed settings are ignored or refused."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from maze_train import ConfigError, load_config, load_rollout_config
from maze_train.config import removed
from maze_train.config.compose import load_settings
from maze_train.config.options import list_options
from maze_train.config.removed import ANY, Removed
from maze_train.config.stored import parsed_settings
from maze_train.config.train_config import TrainConfig
from maze_train.run.resuming import resumed_config

FILES = Path(__file__).parent / "configs_0_3_0"
PPO: dict[str, Any] = {"env": "CartPole-v1", "algorithm": "ppo"}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that some settings were removed."""
    settings = {
        **removed.REMOVED,
        "evaluation.gone": Removed(False, "use evaluation.interval"),
        "runner.gone": Removed(ANY, ""),
        "model.gone": Removed(3, "use model.rnn"),
    }
    monkeypatch.setattr(removed, "REMOVED", MappingProxyType(settings))


@pytest.fixture
def run_dir(tmp_path: Path, table: None) -> Path:
    """Return a run of version 0.3.0 whose file has a removed setting."""
    text = (FILES / "td3.yaml").read_text().replace("evaluation:\n", "evaluation:\n  gone: true\n")
    (tmp_path / "config.yaml").write_text(text)
    return tmp_path


def test_there_is_a_file_of_each_algorithm() -> None:
    """Every algorithm of version 0.3.0 has a configuration file."""
    assert {path.stem for path in FILES.iterdir()} == {*list_options("algorithm")} - {"sacfd"}


@pytest.mark.parametrize("path", sorted(FILES.iterdir()), ids=lambda path: path.stem)
def test_a_configuration_of_version_0_3_0_loads(path: Path) -> None:
    """All removed settings of the file are in the table, and at their defaults."""
    stored = parsed_settings(path.read_text(), path)
    assert load_settings(TrainConfig, stored.values).algorithm.name == path.stem
    assert not any(stored.removed.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"evaluation.gone": False},
        {"runner.gone": "any value"},
        {"runner": {"name": "local", "gone": 1}},
        {"policies": {"a": {"agents": ["a"], "model": {"gone": 3}}}, "model": {"gone": 3}},
    ],
)
@pytest.mark.usefixtures("table")
def test_removed_settings_are_ignored_at_their_default(changes: dict[str, Any]) -> None:
    """A removed setting has no effect, in a section and in the section of a policy."""
    policies = {"policies": {"a": {"agents": ["a"], "model": {}}}} if "policies" in changes else {}
    local = {"runner": "local"} if "runner" in changes else {}
    assert load_config({**PPO, **changes}) == load_config({**PPO, **policies, **local})


@pytest.mark.parametrize("key", ["evaluation.gone", "model.gone", "policies.a.model.gone"])
@pytest.mark.usefixtures("table")
def test_other_values_of_removed_settings_raise(key: str) -> None:
    """The error names the setting and what to use instead."""
    policies = {"policies": {"a": {"agents": ["a"], "model": {}}}}
    with pytest.raises(ConfigError, match=rf"^{key} = 5: removed; use (evaluation|model)\.\w+$"):
        load_config({**PPO, **policies, key: 5})


@pytest.mark.usefixtures("table")
def test_rollouts_ignore_removed_settings_of_runners() -> None:
    """The table applies to all commands."""
    given = {"env": "CartPole-v1", "policy": "random"}
    assert load_rollout_config({**given, "runner.gone": 1}) == load_rollout_config(given)


def test_a_resumed_run_raises_for_a_removed_setting_unless_it_is_reset(run_dir: Path) -> None:
    """The stored value of a removed setting must be the default, or be changed to the default."""
    with pytest.raises(ConfigError, match=r"^evaluation\.gone = True: removed; "):
        resumed_config(str(run_dir), {})
    assert resumed_config(str(run_dir), {"evaluation.gone": False}).seed == 1


def test_loading_a_policy_ignores_removed_settings(run_dir: Path) -> None:
    """Only starting and resuming a run depend on removed settings."""
    stored = parsed_settings((run_dir / "config.yaml").read_text(), run_dir)
    assert "gone" not in stored.values["evaluation"]
    assert load_settings(TrainConfig, stored.values).algorithm.name == "td3"
