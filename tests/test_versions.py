"""Versions in files."""

from __future__ import annotations

import importlib
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import gymnasium
import pytest
import yaml

from maze_train.core import files as module
from maze_train.core.errors import DependencyError
from maze_train.core.files import versions
from maze_train.spaces import autoreset


def test_versions_lists_python_and_packages() -> None:
    """Versions of Python and of packages that affect results; the mapping is read-only."""
    found = versions()
    assert list(found) == ["python", "maze_train", "torch", "numpy", "gymnasium"]
    assert found["python"] == platform.python_version()
    assert found["numpy"] == metadata.version("numpy")
    with pytest.raises(TypeError):
        found["python"] = "4"  # type: ignore[index]  # assignment must fail


def test_packages_without_version_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages without a version are reported as unknown."""

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module, "version", missing)
    assert set(versions.__wrapped__().values()) == {platform.python_version(), "unknown"}


@pytest.mark.slow
def test_versions_do_not_import_torch() -> None:
    """Reading the version of PyTorch does not import it."""
    code = "import sys, maze_train.core.files as v; v.versions(); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


@pytest.mark.parametrize("version", ["0.28.1", "0.29.1", "1.0.0"])
def test_outdated_gymnasium_raises(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gymnasium below 1.1 raises an error with the remedy."""
    monkeypatch.delattr(gymnasium.vector, "AutoresetMode")
    monkeypatch.setattr(gymnasium, "__version__", version)
    with pytest.raises(DependencyError, match=rf"gymnasium {version} is installed.*>= 1\.1"):
        importlib.reload(autoreset)


def test_ci_workflow_calls_make_targets() -> None:
    """Every command of the workflow is a target of the Makefile."""
    root = Path(__file__).parents[1]
    workflow = yaml.safe_load((root / ".github/workflows/ci.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = [step["run"].split() for step in steps if "run" in step]
    targets = re.findall(r"^([a-z-]+):.*## ", (root / "Makefile").read_text(), re.MULTILINE)
    assert {command[0] for command in commands} == {"make"}
    assert {command[1] for command in commands} <= set(targets)
