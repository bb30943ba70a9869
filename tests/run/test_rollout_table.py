"""Rollouts with each policy that a pattern matches: names, directories, table."""

from __future__ import annotations

import csv
import math
import os
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from short_runs import short_run, summary

from maze_train import RolloutConfig, run_rollout
from maze_train.cli import main
from maze_train.core import files
from maze_train.core.checks import matching_folders
from maze_train.core.errors import ConfigError, RunDirectoryError
from maze_train.run import rollout_table
from maze_train.run.rollout_report import RolloutSummary
from maze_train.run.rollout_table import roll_out_each

pytestmark = pytest.mark.usefixtures("empty_directory")


def table(directory: str | Path) -> list[dict[str, str]]:
    """Return the rows of policies.csv."""
    return list(csv.DictReader(Path(directory, "policies.csv").read_text().splitlines()))


def test_pattern_plays_each_policy_as_alone(capfd: pytest.CaptureFixture[str]) -> None:
    """Each matching policy is played with the same results as alone."""
    short_run(**{"evaluation.dump_interval": 1})
    command = ["rollout", "run=run/policies/*", "n_episodes=2", "progress=quiet"]
    assert main([*command, "output_dir=played"]) == 0
    assert "epoch_000003" in capfd.readouterr().out
    found = table("played")
    assert [row["policy"] for row in found] == [f"epoch_00000{i}" for i in (1, 2, 3)]
    alone = run_rollout(run="run/policies/epoch_000002", n_episodes=2, progress="quiet")
    assert float(found[1]["return_mean"]) == alone.summary.return_mean
    assert summary("played/epoch_000002")["return_mean"] == alone.summary.return_mean
    assert main(["rollout", "run=run/nothing/*"]) == 2
    assert "run = 'run/nothing/*': no directory matches" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("runs/*/*", ["a/b-c", "a-b/c"]),  # replacing slashes with dashes would make these equal
        ("runs/*/", ["a", "a-b"]),
        ("runs/a/*", ["b-c"]),
        ("runs/*/.", ["a", "a-b"]),
        ("runs/*/*/..", ["a", "a-b"]),
        ("*/a", ["a"]),
        ("l*/a-b/c", ["c"]),
        ("runs/*/../a", ["a"]),
    ],
)
def test_pattern_directories_have_unique_names(pattern: str, names: list[str]) -> None:
    """Each folder is played once and has a unique name."""
    for name in ("runs/a/b-c", "runs/a-b/c"):
        Path(name).mkdir(parents=True)
    Path("runs/a/file").touch()
    Path("links").symlink_to("runs")
    found = matching_folders("run", pattern)
    assert sorted(found) == sorted(names)
    assert all(os.path.isdir(path) for path in found.values())


def test_pattern_sorts_epochs_numerically() -> None:
    """Epochs with different numbers of digits are sorted numerically."""
    for number in (9, 10, 100):
        Path("policies", f"step_{number}").mkdir(parents=True)
    assert list(matching_folders("run", "policies/*")) == ["step_9", "step_10", "step_100"]


class Player:
    """Substitute for `RolloutRunner`; the mean return is defined by `returns` for each folder."""

    returns: dict[str, float | Exception]

    def __init__(self, config: RolloutConfig) -> None:
        self.output = Path(str(config.output_dir))

    def run(self) -> Any:
        value = self.returns[self.output.name]
        if isinstance(value, Exception):
            raise value
        self.output.mkdir(parents=True)
        return SimpleNamespace(summary=RolloutSummary(2, 0, 2, *[value] * 8, math.nan))


def play(
    monkeypatch: pytest.MonkeyPatch, output_dir: str | None = None, **returns: float | Exception
) -> float:
    """Run rollouts of policies with the given mean returns."""
    monkeypatch.setattr(Player, "returns", returns, raising=False)
    monkeypatch.setattr(rollout_table, "RolloutRunner", Player)
    config = RolloutConfig(policy="random", env={"id": "CartPole-v1"}, output_dir=output_dir)
    return roll_out_each({name: config for name in returns})


@pytest.mark.parametrize(
    ("returns", "best"),
    [((math.nan, 1.0, -2.0), 1.0), ((1.0, math.nan), 1.0), ((-3.0,), -3.0), ((math.nan,), None)],
)
def test_best_policy_of_a_table_has_a_mean_return(
    returns: tuple[float, ...], best: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy without a mean return is not the best."""
    found = play(monkeypatch, "out", **{f"p{i}": value for i, value in enumerate(returns)})
    assert math.isnan(found) if best is None else found == best
    assert [row["policy"] for row in table("out")] == [f"p{i}" for i in range(len(returns))]


def test_simultaneous_tables_use_separate_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories are unique, and a given directory is not reused."""
    clock = SimpleNamespace(now=lambda: datetime(2026, 1, 2))
    monkeypatch.setattr(files, "datetime", clock)
    for _ in range(2):
        play(monkeypatch, a=1.0)
    assert len(list(Path("outputs/rollouts").glob("*/policies.csv"))) == 2
    play(monkeypatch, "out", a=1.0)
    with pytest.raises(ConfigError, match=r"output_dir = .*already contains results \(policies"):
        play(monkeypatch, "out", b=1.0)


def test_failed_policy_keeps_earlier_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table contains the finished policies."""
    with pytest.raises(RunDirectoryError):
        play(monkeypatch, "out", a=1.0, b=RunDirectoryError("damaged"), c=2.0)
    assert [row["policy"] for row in table("out")] == ["a"]
    with pytest.raises(RunDirectoryError):
        play(monkeypatch, "empty", b=RunDirectoryError("damaged"))
    assert not Path("empty").exists()
