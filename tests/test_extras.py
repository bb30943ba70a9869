"""Missing and broken optional packages."""

from __future__ import annotations

import importlib.util
import pickle
import re
import sys
from importlib.metadata import PackageNotFoundError
from typing import TYPE_CHECKING, NoReturn

import gymnasium
import pytest

from maze_train import MLflowWriter, WandbWriter, load_policy, push_to_hub, search
from maze_train.core.errors import ConfigError, MissingExtraError
from maze_train.core.targets import _too_old, import_extra
from maze_train.envs.factory import EnvFactory
from maze_train.hydra_app import report

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BROKEN = {
    "import no_such_thing": "ModuleNotFoundError: No module named 'no_such_thing'",
    "from os import no_such_thing": "ImportError: cannot import name 'no_such_thing'",
    "None.wheel": "AttributeError: 'NoneType' object has no attribute 'wheel'",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a package's module that exists for one test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "toy_extra", raising=False)
    return tmp_path / "toy_extra.py"


@pytest.mark.parametrize("module", ["no_such_module_at_all", "no_such_module_at_all.errors"])
def test_missing_package_names_its_extra(module: str) -> None:
    """The error names the extra and the feature; the command ends with code 2."""
    match = r"Toys need.*'toy'.*not installed.*\[toys\]"
    with pytest.raises(MissingExtraError, match=match) as caught:
        import_extra("toy", "toys", "Toys need it:", module)
    assert report(caught.value) == 2


@pytest.mark.parametrize(
    ("package", "extra", "call"),
    [
        ("optuna", "optuna", lambda: search("CartPole-v1", "ppo", "ppo")),
        ("huggingface_hub", "hub", lambda: load_policy("hf://me/a")),
        ("huggingface_hub", "hub", lambda: push_to_hub("run", "me/a")),
        ("wandb", "wandb", WandbWriter),
        ("mlflow", "mlflow", MLflowWriter),
    ],
)
def test_features_name_their_missing_extra(
    package: str,
    extra: str,
    call: Callable[[], object],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """MissingExtraError is raised first, with the command that installs the extra."""
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingExtraError, match=rf'pip install "maze-train\[{extra}\]"'):
        call()


def test_outdated_package_raises_with_the_upgrade_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that upgrades it."""
    package = "optuna"
    pytest.importorskip(package)
    monkeypatch.setattr("maze_train.core.targets.metadata.version", lambda name: "2.10.1")
    _too_old.cache_clear()
    message = 'version 2.10.1 is too old: pip install --upgrade "optuna>=4"'
    with pytest.raises(MissingExtraError, match=re.escape(message)):
        import_extra(package, package, "a search")
    _too_old.cache_clear()


@pytest.mark.parametrize("name", ["requires", "version"])
def test_version_without_metadata_is_not_checked(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This package or the optional package is a folder in the search path."""

    def missing(name: str) -> NoReturn:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(f"maze_train.core.targets.metadata.{name}", missing)
    assert _too_old.__wrapped__("optuna") is None


@pytest.mark.parametrize("code", BROKEN)
def test_broken_package_names_the_cause(package: Path, code: str) -> None:
    """The error contains the cause and no installation command, and can be pickled."""
    package.write_text(code)
    with pytest.raises(MissingExtraError) as caught:
        import_extra("toy_extra", "toys", "this test")
    assert f"which is installed, but does not work: {BROKEN[code]}" in str(caught.value)
    assert "pip" not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        (ModuleNotFoundError("No module named 'Box2D'", name="Box2D"), r"pip install .*\[box2d\]"),
        (
            ModuleNotFoundError("No module named 'wheel'", name="wheel"),
            "be imported: .*'wheel'",
        ),
        (ImportError("libwheel.so: cannot open", name="_Box2D"), "cannot be imported: .*libwheel"),
    ],
)
def test_import_errors_of_gymnasium_show_the_cause(
    cause: ImportError, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gymnasium reports every import error as a missing package; our error shows the cause."""

    def make(*_: object, **__: object) -> None:
        raise gymnasium.error.DependencyNotInstalled("Box2D is not installed, run pip") from cause

    monkeypatch.setattr(gymnasium, "make", make)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # not installed
    with pytest.raises(ConfigError, match=told) as caught:
        EnvFactory.from_any("LunarLander-v3")()
    assert ("pip" in str(caught.value)) == (cause.name == "Box2D")
