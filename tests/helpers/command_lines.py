"""The command `maze-run` with runners that neither train nor play."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from maze_train.cli import main


class CommandLine:
    """`maze-run` in an empty directory, with runners that only record their configuration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.configs: list[Any] = []
        self.train: Any = lambda config: 1.0

    def __call__(self, *argv: str) -> int:
        """Return the exit code for these arguments."""
        return main(argv)

    def runner_of(self, config: Any) -> SimpleNamespace:
        """Return a replacement of a training or rollout runner."""
        self.configs.append(config)
        return SimpleNamespace(run=lambda: self.outcome(self.train(config)))

    def outcome(self, value: Any) -> SimpleNamespace:
        """Return the result of a run."""
        summary = SimpleNamespace(return_mean=value, as_dict=dict)
        history = [] if value is None else [{"eval/episode_return_mean": value}]
        return SimpleNamespace(history=history, missing=(), summary=summary)

    def write(self, path: str, text: str) -> None:
        """Write a file below the working directory."""
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(text)

    def files(self) -> list[str]:
        """Return all paths below the working directory."""
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))


@pytest.fixture
def maze_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """Return the command line in an empty directory."""
    command_line = CommandLine(tmp_path)
    for where, name in (("train", "TrainingRunner"), ("rollout", "RolloutRunner")):
        module = ModuleType(f"maze_train.run.{where}")
        setattr(module, name, command_line.runner_of)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    return command_line
