"""Paths in a run directory, and lookup of policies by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from maze_train import ConfigError, RunDirectoryError
from maze_train.core.policy_location import PolicyLocation
from maze_train.core.run_directory import RunDirectory, checkpoint_name

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


def test_which_run_a_path_belongs_to(run: RunDirectory) -> None:
    """The run is found even if a parent folder has the name of one of its subdirectories."""
    checkpoint = run.checkpoints / "epoch_000003"
    for path in (run.path, run.best, run.policies / "epoch_000002", checkpoint):
        assert RunDirectory.of_policy(path) == run
    assert [checkpoint_name(path) for path in (run.path, checkpoint)] == [None, checkpoint.name]
    assert RunDirectory.to_resume(str(checkpoint)) == run
    assert RunDirectory.to_resume(str(run.path)) == run
    assert run.saved == [run.best, run.policies / "epoch_000002"]


def test_which_policy_a_name_leads_to(run: RunDirectory) -> None:
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
def test_a_damaged_summary(run: RunDirectory, text: str) -> None:
    """Reading the summary raises an error; `outcome` is empty."""
    assert run.read_summary() == {}
    (run.path / "summary.json").write_text(text)
    with pytest.raises(RunDirectoryError, match=r"summary\.json is damaged"):
        run.read_summary()
    assert run.outcome == {}


def test_where_a_new_run_may_begin(run: RunDirectory, tmp_path: Path) -> None:
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
