"""Paths in a run directory, and lookup of policies by name."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from maze_train import ConfigError, RunDirectoryError
from maze_train.core.files import results_directory
from maze_train.core.policy_location import PolicyLocation
from maze_train.core.run_directory import (
    RunDirectory,
    checkpoint_name,
    final_test_value,
    final_tests,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Run below a folder named `checkpoints`, with a best policy, a dump and a checkpoint."""
    run = RunDirectory(tmp_path / "checkpoints" / "run")
    for directory in (run.best, run.policies / "epoch_000002", run.checkpoints / "epoch_000003"):
        directory.mkdir(parents=True)
    for path in (run.config, run.best / "config.yaml", run.best / "policy.pt"):
        path.write_text("{}")
    return run


def test_path_identifies_its_run(run: RunDirectory) -> None:
    """The run is found even if a parent folder has the name of one of its subdirectories."""
    checkpoint = run.checkpoints / "epoch_000003"
    for path in (run.path, run.best, run.policies / "epoch_000002", checkpoint):
        assert RunDirectory.of_policy(path) == run
    assert [checkpoint_name(path) for path in (run.path, checkpoint)] == [None, checkpoint.name]
    assert RunDirectory.to_resume(str(checkpoint)) == run
    assert RunDirectory.to_resume(str(run.path)) == run
    assert run.saved == [run.best, run.policies / "epoch_000002"]


def test_policy_name_leads_to_its_location(run: RunDirectory) -> None:
    """The best policy, a version or a directory, with the location of the configuration."""
    checkpoint = run.checkpoints / "epoch_000003"
    for name, directory, version, settings in (
        (run.path, run.best, "", run.best),
        (f"{run.path}@final", run.path, "final", run.path),
        (checkpoint, checkpoint, "", run.path),
        (run.best, run.best, "", run.best),
    ):
        place = PolicyLocation.named(name)
        assert (place.run, place.directory, place.version) == (run, directory, version)
        assert place.settings == settings
        place.check_files(str(name))
    dump = run.policies / "epoch_000002"
    with pytest.raises(ConfigError, match=r"no saved policy.*config\.yaml; did you mean .*best"):
        PolicyLocation.named(dump).check_files(str(dump))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 10**5], ids=["empty", "list", "cut", "deep"])
def test_damaged_summary_raises(run: RunDirectory, text: str) -> None:
    """Reading the summary raises an error; `outcome` is empty."""
    assert run.read_summary() == {}
    (run.path / "summary.json").write_text(text)
    with pytest.raises(RunDirectoryError, match=r"summary\.json is damaged"):
        run.read_summary()
    assert run.outcome == {}


def test_new_run_requires_a_free_directory(run: RunDirectory, tmp_path: Path) -> None:
    """A run may start in an empty directory, or after a run failed before its first checkpoint."""
    RunDirectory(tmp_path / "new").check_is_free()
    with pytest.raises(ConfigError, match="already contains a run"):
        run.check_is_free()
    (run.checkpoints / "epoch_000003").rmdir()
    with pytest.raises(ConfigError, match="already contains a run"):
        run.check_is_free()  # the run has a result
    (run.path / "summary.json").write_text('{"stop_reason": "error"}')
    run.check_is_free()
    run.config.unlink()
    with pytest.raises(ConfigError, match=r"contains checkpoints, best .* config\.yaml is missing"):
        run.check_is_free()


def fail_in(directory: Path, names: list[str]) -> None:
    """Create empty files and raise KeyboardInterrupt."""
    for name in names:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).touch()
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["a/b/run", None, "mine/run", "mine"])
@pytest.mark.parametrize("writes", [False, True])
def test_failure_leaves_no_empty_directory(tmp_path: Path, name: str | None, writes: bool) -> None:
    """Existing directories and those with results are kept."""
    (tmp_path / "mine").mkdir()
    given = None if name is None else str(tmp_path / name)
    with (
        pytest.raises(KeyboardInterrupt),
        results_directory("output", given, tmp_path / "outputs/kind") as path,
    ):
        fail_in(path, ["result"] * writes)
    assert path.exists() == (writes or name == "mine")
    assert len(list(tmp_path.iterdir())) == (2 if writes and not str(name).startswith("m") else 1)


@pytest.mark.parametrize(
    ("given", "written"), [([], []), (["notes.txt"], []), ([], ["config.yaml"])]
)
def test_failed_start_empties_the_directory(
    tmp_path: Path, given: list[str], written: list[str]
) -> None:
    """New files are removed from a directory that was empty, unless the settings were written."""
    own = tmp_path / "own"
    own.mkdir(mode=0o750)
    for name in given:
        (own / name).touch()
    before = own.stat()
    with pytest.raises(KeyboardInterrupt), RunDirectory.new(str(own), tmp_path) as run:
        fail_in(run.path, [*written, "metrics.csv", "best/policy.pt"])
    assert (own.stat().st_ino, own.stat().st_mode) == (before.st_ino, before.st_mode)
    kept = {*given, *written}
    left = {*kept, "metrics.csv", "best", ".lock"} if kept else set()
    assert {path.name for path in own.iterdir()} == left


TEST = {"epoch": 2, "episodes": 4, "episode_return_mean": 7.0, "win_rate": None}


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("eval/episode_return_mean", 7.0),
        ("eval/win_rate", None),
        ("eval/other", None),
        ("train/episode_return_mean", None),
        ("validation/episode_return_mean", None),
    ],
)
def test_final_test_value_requires_an_eval_metric(metric: str, value: float | None) -> None:
    """Only `eval/` metrics have a value in the final test."""
    assert final_test_value({"final_test": {"best": TEST, "last": {}}}, metric) == value


@pytest.mark.parametrize(
    "tests", [None, [], {"best": 3}, {"best": {**TEST, "epoch": "2"}}, {"best": {"x": [1]}}]
)
def test_damaged_final_tests_are_ignored(tests: object) -> None:
    """Invalid results are treated like a missing test."""
    assert final_tests({"final_test": tests}) == final_tests({}) == {}


@pytest.mark.parametrize("place", [".", "best", "plots", "policies/epoch_1", "policies/step_90"])
def test_unfinished_files_of_killed_processes_are_removed(run: RunDirectory, place: str) -> None:
    """Only files of dead processes are removed, in every directory with atomic writes."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    directory = run.path / place
    directory.mkdir(parents=True, exist_ok=True)
    for pid in (ended.pid, os.getpid()):
        (directory / f".policy.pt.{pid}.tmp").touch()
    run.clean()
    assert [path.name for path in directory.glob(".*.tmp")] == [f".policy.pt.{os.getpid()}.tmp"]
