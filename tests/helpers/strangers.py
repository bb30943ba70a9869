"""A run of another user, and the commands that read it."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import yaml

from maze_train import load_policy, run_rollout, train
from maze_train.cli import main
from maze_train.config.stored import PARTS, PARTS_OF_ENV, PARTS_OF_POLICY, is_signed, signed
from maze_train.core.errors import ConfigError
from maze_train.core.files import seal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MARKER = "marker"
SHELL = {"_target_": "subprocess.getoutput", "cmd": f"touch {MARKER}"}
OWN = {"_target_": "hostile.Part"}
QUIET: dict[str, Any] = {"tracking.progress": "quiet", "tracking.plot": False}
SMALL: dict[str, Any] = {
    "env": "CartPole-v1",
    "algorithm": "ppo",
    "algorithm.batch_size": 16,
    "algorithm.n_rollout_steps": 16,
    "algorithm.epoch_length": 2,
    "runner.concurrency": 2,
    "evaluation.n_episodes": 1,
    "evaluation.dump_interval": 1,
    "model.hidden_sizes": [8],
    "seed": 1,
    "total_steps": 64,
    **QUIET,
}
WORDS = [f"{key}={value}".replace(" ", "") for key, value in SMALL.items()]


class Command(NamedTuple):
    """Command that reads a run directory."""

    uses: tuple[str, ...]
    """Components that it builds from the configuration there."""
    run: Callable[[], Any]


def line(*words: str) -> None:
    """Call `maze-run`; raise ConfigError with its exit code if it fails."""
    if code := main(words):
        raise ConfigError("exit", str(code))


BASE_RUN = {**SMALL, "base_run": "run", "run_dir": "new"}
del BASE_RUN["model.hidden_sizes"]
COMMANDS = {
    "load_policy": Command(PARTS_OF_POLICY, lambda: load_policy("run")),
    "load_policy epoch": Command(PARTS_OF_POLICY, lambda: load_policy("run/policies/epoch_000001")),
    "load_policy final": Command(PARTS_OF_POLICY, lambda: load_policy("run@final")),
    "run_rollout": Command(
        (*PARTS_OF_POLICY, *PARTS_OF_ENV),
        lambda: run_rollout(run="run", n_episodes=1, progress="quiet"),
    ),
    "rollout": Command(
        (*PARTS_OF_POLICY, *PARTS_OF_ENV),
        lambda: line("-cn", "rollout", "run=run", "n_episodes=1", "progress=quiet"),
    ),
    "train resume": Command(tuple(PARTS), lambda: train(resume="run", total_steps=96)),
    "resume": Command(tuple(PARTS), lambda: line("resume=run")),
    "resume checkpoint": Command(
        tuple(PARTS), lambda: line("resume=run/checkpoints/epoch_000001", "trust=[elsewhere]")
    ),
    "resume auto": Command((), lambda: line(*WORDS, "run_dir=run", "resume=auto")),
    "compare": Command((), lambda: line("-cn", "compare", "runs=[run]", "unfinished=true")),
    "export": Command(
        (*PARTS_OF_POLICY, *PARTS_OF_ENV),
        lambda: line("-cn", "export", "run=run", "format=torch_export"),
    ),
    "train base_run": Command(PARTS_OF_POLICY, lambda: train(**BASE_RUN)),
    "base_run": Command(
        PARTS_OF_POLICY, lambda: line(*[f"{key}={value}" for key, value in BASE_RUN.items()])
    ),
}


@contextmanager
def another_user(home: Path) -> Iterator[None]:
    """Sign files written in the block with the key of another user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(home))
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs by another user; the current user has a key, too."""
    assert is_signed(signed(""))
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    with another_user(run_dir.parent):
        train(**SMALL, run_dir=run_dir)
    assert not is_signed((run_dir / "config.yaml").read_text())
    return run_dir


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `trained`, next to a module and an option that create the marker when used."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "hostile", raising=False)
    Path("hostile.py").write_text(f"open({str(tmp_path / MARKER)!r}, 'w').close()\n")
    Path("option.yaml").write_text(yaml.safe_dump(OWN))
    shutil.copytree(trained, "run")
    return tmp_path / "run"


def change(run_dir: Path, place: str, value: Any, signature: str = "none") -> None:
    """Set a value in every configuration of a run directory.

    Args:
        run_dir: The run directory.
        place: Dotted key of the setting.
        value: New value.
        signature: Signature of the changed file: `none`, `another key`, `copied` (the signature of
            this user for the original settings), `own`.
    """
    *parents, last = place.split(".")

    def changed(text: str) -> str:
        settings = yaml.safe_load(text)
        node = settings
        for parent in parents:
            node = node[parent]
        node[last] = value
        new = yaml.safe_dump(settings)
        if signature == "another key":
            with another_user(run_dir.parent):
                return signed(new)
        if signature == "copied":
            return new + signed(text)[len(text) :]
        return signed(new) if signature == "own" else new

    rewrite(run_dir, changed)


def rewrite(run_dir: Path, changed: Callable[[str], str]) -> None:
    """Change the text of every configuration, including those in checkpoints."""
    for path in [run_dir / "config.yaml", *run_dir.glob("*/**/config.yaml")]:
        path.write_text(changed(path.read_text()))
    for path in run_dir.glob("checkpoints/*/MANIFEST.json"):
        content = json.loads(path.read_text())
        content["settings"] = changed(content["settings"])
        path.write_bytes(seal(content))
