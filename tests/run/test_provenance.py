"""Records of the start of a run and of its console output."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium
import own_envs
import pytest
import torch
from cases import everyday
from short_runs import settings, short_run

from maze_train import train
from maze_train.core.errors import EnvError
from maze_train.core.secrets import without_secrets
from maze_train.run import provenance
from maze_train.run.provenance import installed_packages
from maze_train.tracking import run_log

pytestmark = pytest.mark.usefixtures("empty_directory")


def git(*words: str) -> str:
    """Run git in the working directory; skip the test if git is not installed."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    name = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
    done = subprocess.run(["git", *name, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository() -> str:
    """Make the working directory a repository with a changed file; return the commit."""
    git("init", "-q", "-b", "trunk")
    Path("agent.py").write_text("speed = 1\n")
    git("add", "agent.py")
    git("commit", "-q", "-m", "begin")
    Path("agent.py").write_text("speed = 2\n")
    return git("rev-parse", "HEAD")


def starts(run_dir: str = "run") -> list[dict[str, Any]]:
    """Return the recorded starts of a run."""
    found: list[dict[str, Any]] = json.loads(Path(run_dir, "environment.json").read_text())[
        "starts"
    ]
    return found


def repositories(run_dir: str = "run") -> dict[str, dict[str, Any]]:
    """Return the repositories of the last start by directory."""
    return {found["directory"]: found for found in starts(run_dir)[-1]["repositories"]}


def test_environment_json_records_every_start() -> None:
    """A resume adds an entry that names its checkpoint."""
    short_run()
    train(resume="run", total_steps=256, tracking={"progress": "quiet"})
    first, second = starts()
    assert (first["checkpoint"], second["checkpoint"]) == (None, "epoch_000003")
    assert first["packages"]["torch"] == version("torch")
    assert first["packages"]["gymnasium"] == gymnasium.__version__
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    assert (first["working_directory"], first["gpus"]) == (os.getcwd(), gpus)
    assert first["command"] == sys.orig_argv


def test_first_package_on_the_path_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first package on the path counts, as in a virtual environment with system packages."""
    for name in ("one/some_tool-1.0", "two/some_tool-2.0", "two/other-1.0", "one/broken"):
        Path(f"{name}.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", ["absent", "one", "two"])
    installed_packages.cache_clear()
    try:
        assert installed_packages() == {"other": "1.0", "some_tool": "1.0"}
    finally:
        installed_packages.cache_clear()


def test_commit_branch_and_diff_are_recorded(repository: str) -> None:
    """Commit, branch and uncommitted changes of the user's repository are recorded."""
    short_run()
    own = repositories()[os.getcwd()]
    assert (own["commit"], own["branch"]) == (repository, "trunk")
    assert "-speed = 1\n+speed = 2\n" in own["diff"]
    short_run("private", **{"tracking.git_diff": False})
    assert repositories("private")[os.getcwd()] == {**own, "diff": None}


SCRIPT = """
import sys
from maze_train import train
from package_of_user.envs import MyEnv

if __name__ == "__main__":
    env = {"class": MyEnv, "lambda": lambda: MyEnv(), "id": "CartPole-v1"}[sys.argv[1]]
    train(env=env, run_dir="run", **eval(sys.argv[2]))
"""
ENVS = """
from own_envs import SpacesEnv

class MyEnv(SpacesEnv):
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", everyday(1, ["command", "class", "lambda", "id"]))
def test_repository_of_scripts_and_packages_is_recorded(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repository of a script, or of a package named in the settings, is recorded.

    Neither is below the working directory; the package has no `__init__.py`.
    """
    Path("code/package_of_user").mkdir(parents=True)
    Path("code/script.py").write_text(SCRIPT)
    Path("code/package_of_user/envs.py").write_text(ENVS)
    monkeypatch.chdir("code")
    git("init", "-q", "-b", "trunk")
    git("add", ".")
    git("commit", "-q", "-m", "begin")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    helpers = str(Path(own_envs.__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "code"), helpers]))
    values = {key: value for key, value in settings().items() if key not in ("env", "run_dir")}
    words = [str(tmp_path / "code/script.py"), kind, repr(values)]
    if kind == "command":
        own = [f"{key}={value}" for key, value in values.items()]
        words = ["-m", "maze_train", "env._target_=package_of_user.envs.MyEnv", "run_dir=run", *own]
    subprocess.run([sys.executable, *words], check=True)
    assert repositories()[str(tmp_path / "code")]["commit"]


PROGRAM = "touch ../marker"
CONFIGURED = {
    "a clean filter": {"filter.f.clean": PROGRAM},
    "a filter process": {"filter.f.process": PROGRAM, "filter.f.required": "true"},
    "a filter with an equals sign": {"filter.f=g.clean": PROGRAM},
    "a file system monitor": {"core.fsmonitor": PROGRAM},
    "an external diff": {"diff.external": PROGRAM, "diff.f.command": PROGRAM},
    "a text converter": {"diff.f.textconv": PROGRAM},
    "a diff of submodules": {"diff.submodule": "diff"},
}


@pytest.mark.parametrize("name", CONFIGURED)
def test_no_program_of_a_repository_is_run(name: str, repository: str) -> None:
    """Git runs no programs that the configuration of the working directory names."""
    (filters,) = {key.split(".")[1] for key in CONFIGURED[name] if key[:6] == "filter"} or {"f"}
    Path(".gitattributes").write_text(f"* filter={filters} diff=f\n")
    git("init", "-q", "inner")
    git("-C", "inner", "commit", "-q", "--allow-empty", "-m", "begin")
    git("add", "inner")
    git("commit", "-q", "-m", "submodule")
    Path("inner/.gitattributes").write_text("* filter=f\n")
    Path("inner/new").touch()
    git("-C", "inner", "config", "filter.f.clean", PROGRAM)
    git("-C", "inner", "config", "core.fsmonitor", PROGRAM)
    for key, value in CONFIGURED[name].items():
        git("config", key, value)
    os.utime("agent.py")
    short_run()
    assert not Path("../marker").exists()
    diff = repositories()[os.getcwd()]["diff"]
    assert "=" in filters or "+speed = 2" in diff


def test_missing_objects_are_not_fetched(repository: str) -> None:
    """The remote of a partial clone is not contacted."""
    git("commit", "-q", "-am", "changed")
    blob = git("rev-parse", "HEAD:agent.py")
    Path(".git/objects", blob[:2], blob[2:]).unlink()
    Path("agent.py").write_text("speed = 3\n")
    for key, value in {
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": f"ext::{PROGRAM}",
        "protocol.ext.allow": "always",
    }.items():
        git("config", key, value)
    short_run()
    assert not Path("../marker").exists()
    assert repositories()[os.getcwd()]["diff"] is None


def test_long_diff_is_truncated(repository: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The truncated diff ends with a note of the original length."""
    monkeypatch.setattr(provenance, "MAX_DIFF_CHARS", 40)
    short_run()
    diff = repositories()[os.getcwd()]["diff"]
    assert len(diff) < 90
    assert diff.endswith("characters]\n")


@pytest.mark.parametrize("state", ["no repository", "no commit", "no git"])
def test_code_outside_git_is_not_listed(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is not listed, and the run continues."""
    if state == "no commit":
        git("init", "-q")
    if state == "no git":
        monkeypatch.setenv("PATH", os.getcwd())
    short_run()
    assert os.getcwd() not in repositories()


@pytest.mark.parametrize(
    "word",
    [
        "seed=1", "tracking.info_keys=[key]", "env.kwargs.monkey=banana", "algorithm.lr=1e-3",
        "env.kwargs={keys: 3, monkey: 1}", "policy=token", "runner.address=ray://host:1", "-key",
    ],
)  # fmt: skip
def test_keys_resembling_secrets_are_kept(word: str) -> None:
    """Keys that only resemble the name of a secret are kept."""
    assert without_secrets([word]) == [word]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["tracking.writers.0.api_key=s1"], ["tracking.writers.0.api_key=***"]),
        (["+env.kwargs.TOKEN=s1 and s2"], ["+env.kwargs.TOKEN=***"]),
        (["runner.address=ray://ada:s3@host:1"], ["runner.address=ray://***@host:1"]),
        (["--password=s1", "x"], ["--password=***", "x"]),
        (["--wandb-api-key", "s1", "x"], ["--wandb-api-key", "***", "x"]),
        (["w=[{_target_: W, api_key: s1, x: 2}]"], ["w=[{_target_: W, api_key: ***, x: 2}]"]),
        (["w={password: s1 s2}"], ["w={password: ***}"]),
        (["w={'token': 's,1', x: 2}"], ["w={'token': ***, x: 2}"]),
        (['{"secret":"s1","x":2}'], ['{"secret":***,"x":2}']),
        (["url=http://h/?token=s1&x=2"], ["url=http://h/?token=***&x=2"]),
        (["train(password='s1', x=2)"], ["train(password=***, x=2)"]),
    ],
)
def test_secrets_are_removed_from_the_command_line(words: list[str], shown: list[str]) -> None:
    """Secrets are recognised by any part of their key, also within nested values."""
    assert without_secrets(words) == shown


@pytest.mark.parametrize("content", ["{", "[]", '{"starts": 3}'])
def test_damaged_record_is_kept_with_a_warning(
    content: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A warning names the file; the run continues."""
    short_run()
    Path("run/environment.json").write_text(content)
    train(resume="run", total_steps=256, tracking={"progress": "quiet"})
    assert "environment.json: this start is not recorded" in capfd.readouterr().err
    assert Path("run/environment.json").read_text() == content


def logged(run_dir: str = "run") -> list[str]:
    """Return the lines of the log without their times."""
    lines = Path(run_dir, "run.log").read_text().splitlines()
    return [line[20:] if line[:2] == "20" else line for line in lines]


def test_log_contains_the_console_output(capfd: pytest.CaptureFixture[str]) -> None:
    """The log contains all printed lines in order; resuming appends."""
    short_run(**{"tracking.progress": "lines", "tracking.info_keys": ["absent"]})
    train(resume="run")
    out, err = capfd.readouterr()
    printed = [line for line in out.splitlines() if line]
    log = logged()
    assert [line for line in log if line in printed] == printed
    assert set(log) == {*printed, *err.splitlines()}
    assert any(line.startswith("note: ") for line in log)


class Breaking(gymnasium.Env[Any, Any]):
    """Environment that fails in its first step."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        return self.observation_space.low, {}

    def step(self, action: Any) -> Any:
        raise RuntimeError("the wheel came off")


def test_log_contains_tracebacks() -> None:
    """The log contains the traceback of the user's code."""
    with pytest.raises(EnvError):
        short_run(env=Breaking)
    assert "RuntimeError: the wheel came off" in logged()
    assert any("in step" in line for line in logged())


def test_full_disk_delays_the_log(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The console warns once; missing lines are written when the disk has space again."""
    calls = []

    def write(descriptor: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) in (2, 3, 4):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwrite(descriptor, data[:7], 0) if len(calls) == 1 else original(descriptor, data)

    original = os.write
    monkeypatch.setattr(run_log.os, "write", write)
    short_run(**{"tracking.progress": "lines"})
    out, err = capfd.readouterr()
    assert err.count("run.log cannot be written: ") == 1
    printed = [line for line in out.splitlines() if line]
    assert [line for line in logged() if line in printed] == printed
