"""Programs of users with the configuration files, and ids of environments."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import gymnasium
import pytest
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore

from maze_train import ConfigError, EnvFactory, MissingExtraError
from maze_train.envs.factory import check_registered
from maze_train.hydra_sweeps import extended_hydra

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULE = """
import gymnasium
gymnasium.register("toys/Toy-v3", entry_point="toy_registry:Toy")
"""

ROBOTS = """
import gymnasium
gymnasium.register("FetchToy-v0", entry_point="goal_envs:PointToGoal")
"""


APP = """
import sys
import hydra
@hydra.main(config_path="my_conf", config_name="app", version_base="1.3")
def main(cfg):
    loaded = [name for name in ("torch", "gymnasium") if name in sys.modules]
    print(cfg.env.id, cfg.algorithm._target_.split(".")[2], *loaded)
main()
"""
APP_CONFIG = """
defaults: [train, {OVERRIDES}, _self_]
hydra: {searchpath: ["pkg://maze_train.conf"], output_subdir: null, run: {dir: .}}
"""


@pytest.fixture
def toy_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Create a module that registers `toys/Toy-v3` on import; yield its name."""
    (tmp_path / "toy_registry.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "toy_registry"
    sys.modules.pop("toy_registry", None)
    gymnasium.registry.pop("toys/Toy-v3", None)


def test_any_program_composes_presets() -> None:
    """Programs other than `maze-run` use our options."""
    with initialize_config_module("maze_train.conf", version_base="1.3"):
        assert compose("train", ["env.id=MountainCar-v0"]).env.id == "MountainCar-v0"
        assert compose("train", ["experiment=ppo/CartPole-v1"]).env.id == "CartPole-v1"


@pytest.mark.parametrize(
    ("overrides", "given", "printed"),
    [
        ("override algorithm: ppo", [], ["None ppo"]),
        ("override algorithm: ppo}, {override env: CartPole-v1", [], ["CartPole-v1 ppo"]),
        (
            "override runner: local",
            ["experiment=es/Pendulum-v1", "seed=1"],
            ["Pendulum-v1 es"],
        ),
        (
            "override algorithm: ppo",
            ["-m", "env.id=CartPole-v1,Acrobot-v1"],
            ["CartPole-v1 ppo", "Acrobot-v1 ppo"],
        ),
    ],
    ids=["none", "defaults list", "preset", "sweep"],
)
def test_user_programs_find_options_on_a_search_path(
    tmp_path: Path, overrides: str, given: list[str], printed: list[str]
) -> None:
    """Options are found on a search path; neither Gymnasium nor PyTorch is imported."""
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "my_conf").mkdir()
    (tmp_path / "my_conf/app.yaml").write_text(APP_CONFIG.replace("OVERRIDES", overrides))
    told = subprocess.run(
        [sys.executable, "app.py", *given], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert [line for line in told.stdout.splitlines() if "HYDRA" not in line] == printed


def test_module_before_the_id_is_imported(toy_module: str) -> None:
    """`module:Id` imports the module, which registers its environments."""
    with pytest.raises(ConfigError, match="no such environment"):
        check_registered("toys/Toy-v3")
    check_registered(f"{toy_module}:toys/Toy-v3")


def test_missing_module_raises_config_error() -> None:
    """The error names the module."""
    with pytest.raises(ConfigError, match="importing no_such_module failed"):
        check_registered("no_such_module:Toy-v0")


@pytest.mark.skipif(importlib.util.find_spec("ale_py") is None, reason="ale-py is not installed")
def test_atari_ids_need_no_import() -> None:
    """`ALE/` ids require no import by the user."""
    check_registered("ALE/Pong-v5")


@pytest.mark.skipif(
    importlib.util.find_spec("gymnasium_robotics") is not None, reason="it is installed"
)
def test_robotics_ids_need_no_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids of gymnasium-robotics require no import; an error names the missing package."""
    factory = EnvFactory.from_any("FetchToy-v0")
    with pytest.raises(MissingExtraError, match=r"needs the package 'gymnasium-robotics'"):
        factory()
    (tmp_path / "gymnasium_robotics.py").write_text(ROBOTS)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        check_registered("FetchToy-v0")
        del gymnasium.registry["FetchToy-v0"], sys.modules["gymnasium_robotics"]
        assert factory().spec is not None
    finally:
        sys.modules.pop("gymnasium_robotics", None)
        gymnasium.registry.pop("FetchToy-v0", None)


def test_hydra_settings_are_restored() -> None:
    """Other applications in the same process use Hydra's defaults."""
    before = ConfigStore.instance().repo["hydra"]["config.yaml"]
    with extended_hydra():
        assert ConfigStore.instance().repo["hydra"]["config.yaml"] is not before
    assert ConfigStore.instance().repo["hydra"]["config.yaml"] is before
