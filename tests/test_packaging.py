"""Contents of the source distribution, and use after installation."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import maze_train

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SOURCES = ("maze_train", "conf", "pyproject.toml", "setup.py", "MANIFEST.in")
TEXTS = ("README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")
NOT_SHIPPED = ("tests", "docs", "benchmarks")
BUILD = (
    "from setuptools import build_meta as build; build.build_wheel('dist'); "
    "print(build.build_sdist('dist'))"
)
TIMEOUT_S = 180


@dataclass(frozen=True)
class Installation:
    """Package installed by pip from a source distribution into a separate folder."""

    target: Path
    archive: Path
    build_log: str
    """Standard error of building the wheel and the source distribution."""

    def python(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run a new interpreter that imports the installed package."""
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(self.target)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """Copy the working tree, build a source distribution and install it."""
    pytest.importorskip("setuptools", "77")
    sources, target = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("target")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in (*SOURCES, *TEXTS, *NOT_SHIPPED):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, sources / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, sources)
    built = run(sys.executable, "-W", "default", "-c", BUILD, cwd=sources)
    archive = sources / "dist" / built.stdout.splitlines()[-1]
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    run(*pip, "--no-index", "--target", str(target), str(archive), cwd=sources)
    return Installation(target, archive, built.stderr)


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command and assert that it succeeds."""
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert result.returncode == 0, result.stderr
    return result


@pytest.mark.exhaustive
def test_build_prints_no_warning(installation: Installation) -> None:
    """Building the package prints no warning."""
    assert "Warning" not in installation.build_log


def test_texts_have_the_package_version() -> None:
    """Changelog, citation and README have the version of the package."""
    version = maze_train.__version__
    assert re.search(rf"^## {re.escape(version)} - ", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"version-{version}-" in (ROOT / "README.md").read_text()


@pytest.mark.exhaustive
def test_source_distribution_contains_package_and_texts(installation: Installation) -> None:
    """The package, its configuration and four texts; no tests, no pages, no build files."""
    with tarfile.open(installation.archive) as archive:
        paths = [Path(*Path(m.name).parts[1:]) for m in archive.getmembers() if m.isfile()]
    made = {"PKG-INFO", "setup.cfg", "maze_train.egg-info"}
    assert {path.parts[0] for path in paths} == {*SOURCES, *TEXTS, *made}
    assert {p.suffix for p in paths if p.parts[0] in SOURCES[:2]} == {
        ".py",
        ".pyi",
        ".txt",
        ".yaml",
        ".typed",
    }


@pytest.mark.exhaustive
def test_steps_of_the_dockerfile_install_the_command(tmp_path: Path) -> None:
    """The copied files suffice to install the package, and the entry point trains."""
    pytest.importorskip("setuptools", "77")
    steps = [line.split(maxsplit=1) for line in (ROOT / "Dockerfile").read_text().splitlines()]
    said = {word: text for word, text in steps if word in ("FROM", "COPY", "ENTRYPOINT")}
    assert said["COPY"] == ". ."
    version = re.fullmatch(r"python:3\.(\d+)-slim", said["FROM"])
    assert version is not None
    assert int(version[1]) >= 11
    ignored = [name.rpartition("/")[2] for name in (ROOT / ".dockerignore").read_text().split()]
    shutil.copytree(ROOT, tmp_path / "src", ignore=shutil.ignore_patterns(*ignored, ".*_cache"))
    torch, package = (text for word, text in steps if word == "RUN")
    assert shlex.split(torch)[:4] == ["pip", "install", "--no-cache-dir", "torch"]
    target = tmp_path / "target"
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    run(sys.executable, "-m", *shlex.split(package), *offline, cwd=tmp_path / "src")
    (command,) = json.loads(said["ENTRYPOINT"])
    (tmp_path / "work").mkdir()
    installed = Installation(target, target, "")
    argv = ("algorithm=ppo", "env=CartPole-v1", "runner.fast_dev_run=true")
    result = installed.python(str(target / "bin" / command), *argv, cwd=tmp_path / "work")
    assert result.returncode == 0, result.stderr


@pytest.mark.exhaustive
def test_installation_fixture_imports_the_installed_package(
    installation: Installation, tmp_path: Path
) -> None:
    """The interpreter of the fixture imports the installed package, not the working tree."""
    code = (
        "import maze_train as m; from maze_train.core.files import versions; "
        "print(m.__file__, m.__version__ == versions()['maze_train'])"
    )
    result = installation.python("-c", code, cwd=tmp_path)
    path, has_version = result.stdout.split()
    assert path.startswith(str(installation.target)), result.stderr
    assert has_version == "True"


@pytest.mark.exhaustive
def test_configuration_is_shipped(installation: Installation) -> None:
    """Every YAML file of conf/ is installed inside the package; tests and benchmarks are not."""
    package = installation.target / "maze_train"
    shipped = {str(path.relative_to(package / "conf")) for path in package.rglob("conf/**/*.yaml")}
    assert shipped == {str(p.relative_to(ROOT / "conf")) for p in (ROOT / "conf").rglob("*.yaml")}
    assert (package / "py.typed").is_file()  # type checkers read the annotations
    roots = {path.name for path in installation.target.iterdir()}
    assert roots.isdisjoint({"tests", "benchmarks", "conf"})


@pytest.mark.exhaustive
def test_installation_has_every_file_of_the_package(installation: Installation) -> None:
    """The installation has exactly the files of the package, including stubs and markers."""
    shipped, expected = (
        {str(path.relative_to(root)) for path in (root / "maze_train").rglob("*") if path.is_file()}
        for root in (installation.target, ROOT)
    )
    compiled = {name for name in shipped | expected if "__pycache__" in name}
    configuration = {name for name in shipped if name.startswith("maze_train/conf/")}
    assert shipped - compiled - configuration == expected - compiled


@pytest.mark.exhaustive
def test_training_works_from_an_empty_directory(installation: Installation, tmp_path: Path) -> None:
    """A short run works and writes to outputs/ below the working directory."""
    command = str(installation.target / "bin" / "maze-run")
    argv = ("+algorithm=ppo", "env=CartPole-v1", "runner.fast_dev_run=true")
    result = installation.python(command, *argv, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]
    (run_dir,) = (tmp_path / "outputs" / "CartPole-v1-ppo-dev").iterdir()
    names = {path.name for path in run_dir.iterdir()}
    assert {"config.yaml", "metrics.csv", "summary.json", "best"} <= names
