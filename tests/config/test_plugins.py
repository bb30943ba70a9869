"""Registered environments are options of `env` without YAML files."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

import gymnasium
import pytest
from hydra.core.config_store import ConfigStore

from maze_train import ConfigError, EnvFactory, MissingExtraError
from maze_train.config.plugins import GymnasiumSource, extended_hydra, is_registered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODULE = """
import gymnasium
gymnasium.register("toys/Toy-v3", entry_point="toy_registry:Toy")
"""

ROBOTS = """
import gymnasium
gymnasium.register("FetchToy-v0", entry_point="goal_envs:PointToGoal")
"""


@pytest.fixture
def source() -> GymnasiumSource:
    """The source as Hydra builds it from a search path."""
    return GymnasiumSource(provider="test", path="gymnasium://")


@pytest.fixture
def toy_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that registers `toys/Toy-v3` when it is imported."""
    (tmp_path / "toy_registry.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "toy_registry"
    sys.modules.pop("toy_registry", None)
    gymnasium.registry.pop("toys/Toy-v3", None)


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("env/CartPole-v1", True),
        ("env/CartPole-v1.yaml", True),
        ("env/CartPole-v77", False),
        ("env/phys2d/CartPole-v1", True),
        ("algorithm/CartPole-v1", False),
        ("CartPole-v1", False),
        ("env", False),
        ("", False),
    ],
)
def test_registered_ids_are_options(source: GymnasiumSource, path: str, known: bool) -> None:
    """Only ids that gymnasium knows, and only below `env`."""
    assert source.is_config(path) is known


def test_a_module_before_the_id_is_imported(toy_module: str) -> None:
    """`module:Id` registers its environments by being imported."""
    assert not is_registered("toys/Toy-v3")
    assert is_registered(f"{toy_module}:toys/Toy-v3")


def test_a_missing_module_is_a_configuration_error() -> None:
    """The message names the module."""
    with pytest.raises(ConfigError, match="importing no_such_module failed"):
        is_registered("no_such_module:Toy-v0")


@pytest.mark.skipif(importlib.util.find_spec("ale_py") is None, reason="ale-py is not installed")
def test_atari_games_are_registered() -> None:
    """`ALE/` ids need no import by the user."""
    assert is_registered("ALE/Pong-v5")


@pytest.mark.skipif(
    importlib.util.find_spec("gymnasium_robotics") is not None, reason="it is installed"
)
def test_robots_are_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their ids need no import by the user; a message names the package that is missing."""
    factory = EnvFactory.from_any("FetchToy-v0")
    with pytest.raises(MissingExtraError, match=r"needs the package 'gymnasium-robotics'"):
        factory()
    (tmp_path / "gymnasium_robotics.py").write_text(ROBOTS)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert is_registered("FetchToy-v0")
        del gymnasium.registry["FetchToy-v0"], sys.modules["gymnasium_robotics"]
        assert factory().spec is not None
    finally:
        sys.modules.pop("gymnasium_robotics", None)
        gymnasium.registry.pop("FetchToy-v0", None)


def test_the_settings_of_hydra_are_put_back() -> None:
    """Other applications in the same process keep Hydra's defaults."""
    before = ConfigStore.instance().repo["hydra"]["config.yaml"]
    with extended_hydra():
        assert ConfigStore.instance().repo["hydra"]["config.yaml"] is not before
    assert ConfigStore.instance().repo["hydra"]["config.yaml"] is before
