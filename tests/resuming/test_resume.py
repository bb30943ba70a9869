"""Resuming run directories: by name, by checkpoint, automatically, longer, damaged."""

from __future__ import annotations

import json
import os
import re
import shutil
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import gymnasium
import pytest
import run_cases
import torch
import yaml
from killed_runs import assert_equal_runs, differences, final_state, rows_of
from short_runs import file_contents
from short_runs import summary as summary_of
from strangers import change

from maze_train import Callback, MetricsWriter, load_policy, run_rollout, train
from maze_train.core.errors import ConfigError, RunDirectoryError
from maze_train.core.files import exclusive, seal
from maze_train.run.resuming import fitting

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

QUIET = {"progress": "quiet", "plot": False}
ONE_EPOCH, TWO_EPOCHS, TO_THE_END = ({"algorithm.n_epochs": n} for n in (1, 2, 0))
TENSORBOARD = {"tracking.tensorboard": True}
start = partial(run_cases.start, "ppo")


def make_cartpole() -> Any:
    """Environment function that a checkpoint cannot import by name."""
    return gymnasium.make("CartPole-v1")


def tracking(part: type) -> dict[str, Any]:
    """Return settings with a writer of this module."""
    return {"tracking": {**QUIET, "writers": [{"_target_": f"test_resume.{part.__name__}"}]}}


class StoppingWriter(MetricsWriter):
    """Writer that ends the run before its first checkpoint, like a kill."""

    def write(self, row: Any) -> None:
        raise KeyboardInterrupt


class RefusingWriter(MetricsWriter):
    """Writer that fails in `start`."""

    def start(self, run: Any) -> None:
        raise ValueError("no")


class Forgetful(Callback):
    """Callback that fails to restore its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"x": 1}

    def load_state_dict(self, state: Any) -> None:
        raise ValueError("no")


class DrawingWriter(MetricsWriter):
    """Writer that draws from the global random generators in `start`."""

    def start(self, run: Any) -> None:
        torch.rand(3)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of an uninterrupted run of four epochs."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    start(run_dir)
    return run_dir


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the same run, ended after two epochs."""
    run_dir = tmp_path_factory.mktemp("half") / "run"
    start(run_dir, **TWO_EPOCHS)
    return run_dir


@pytest.fixture
def half(two_epochs: Path, tmp_path: Path) -> Path:
    """Return a copy of `two_epochs`."""
    return shutil.copytree(two_epochs, tmp_path / "run")


def points(run_dir: Path) -> list[int]:
    """Return the steps of a curve in TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir))
    events.Reload()
    return [event.step for event in events.Scalars("eval/episode_return_mean")]


def edit_settings(run_dir: Path, change: Callable[[Any], Any]) -> None:
    """Change the `config.yaml` of a run."""
    node = yaml.safe_load((run_dir / "config.yaml").read_text())
    change(node)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(node))


# -- what is continued ---------------------------------------------------------------------------


def test_finished_run_is_extended_by_path(half, whole):
    """A run resumes by a path or its text, with changed limits."""
    assert train(resume=str(half)).summary.epochs == 2
    result = train(resume=half, **TO_THE_END)
    assert_equal_runs(half, whole)
    assert [row["epoch"] for row in result.history] == [1, 2, 3, 4]
    assert result.summary.stop_reason == "total_steps"
    written = yaml.safe_load((half / "config.yaml").read_text())
    assert written["algorithm"]["n_epochs"] == 0
    assert json.loads((half / "summary.json").read_text())["epochs"] == 4


@pytest.mark.parametrize("limit", [{"total_steps": 64}, ONE_EPOCH])
def test_limit_below_progress_raises_and_changes_nothing(half, limit):
    """Resuming raises ConfigError and changes no file."""
    before = [(path, path.read_bytes()) for path in sorted(half.rglob("*")) if path.is_file()]
    with pytest.raises(ConfigError, match="the run has already completed"):
        train(resume=half, **limit)
    assert all(path.read_bytes() == content for path, content in before)


def test_resume_auto_starts_or_resumes(tmp_path, whole):
    """`resume="auto"` starts a run and resumes it, also below a folder named `checkpoints`."""
    run_dir = tmp_path / "checkpoints" / "run"
    for epochs in (1, 3, 0, 0):
        start(run_dir, resume="auto", **{"algorithm.n_epochs": epochs})
    assert_equal_runs(run_dir, whole)
    assert train(resume=run_dir).summary.epochs == 4


def test_resuming_a_finished_run_changes_its_summary_only(whole, tmp_path):
    """Resuming a finished run changes only its summary."""
    run_dir = shutil.copytree(whole, tmp_path / "run")
    outcome = json.loads((run_dir / "summary.json").read_text())
    assert train(resume=run_dir).summary.epochs == 4
    again = json.loads((run_dir / "summary.json").read_text())
    assert again["final_eval_return_mean"] == outcome["final_eval_return_mean"] is not None
    assert again["best_metric"] == outcome["best_metric"]
    assert_equal_runs(run_dir, whole)


def test_repeated_epoch_appears_once(tmp_path, whole):
    """A repeated epoch appears once, in `metrics.csv` and in TensorBoard."""
    run_dir = tmp_path / "run"
    start(run_dir, **TENSORBOARD, **TWO_EPOCHS)
    shutil.rmtree(run_dir / "checkpoints" / "epoch_000002")
    (run_dir / "checkpoints" / "latest").unlink()
    train(resume=run_dir, **TO_THE_END)
    assert_equal_runs(run_dir, whole)
    assert points(run_dir) == [64, 128, 192, 256]


def test_run_killed_on_a_branch_resumes_on_the_branch(half, whole):
    """A run killed before its first new checkpoint resumes from the one it had started from."""
    checkpoints = half / "checkpoints"
    with pytest.raises(KeyboardInterrupt):
        train(resume=checkpoints / "epoch_000001", **tracking(StoppingWriter), **TO_THE_END)
    assert (checkpoints / "latest").read_text() == "epoch_000001\n"
    train(resume=half, tracking=QUIET)
    assert_equal_runs(half, whole)


def test_settings_are_compared_with_the_loaded_checkpoint(tmp_path, capsys):
    """Settings are compared with the loaded checkpoint, which may not be the newest one."""
    run_dir = tmp_path / "run"
    start(run_dir, **ONE_EPOCH)
    train(resume=run_dir, **TWO_EPOCHS)
    first, second = sorted((run_dir / "checkpoints").glob("epoch_*"))
    latest, state = first.with_name("latest"), second / "state.pt"
    latest.write_text(f"{first.name}\n")
    final = load_policy(f"{run_dir}@final").model.state_dict()
    wanted = load_policy(first).model.state_dict()
    assert all(torch.equal(final[name], wanted[name]) for name in wanted)
    capsys.readouterr()
    train(resume=run_dir, **ONE_EPOCH)
    assert "changed since" not in capsys.readouterr().err
    latest.write_text(f"{second.name}\n")
    state.write_bytes(state.read_bytes()[:-1])
    manifest = json.loads((first / "MANIFEST.json").read_text())
    settings = manifest["settings"].replace("gamma: 0.99", "gamma: 0.5")
    (first / "MANIFEST.json").write_bytes(seal(manifest | {"settings": settings}))
    with pytest.raises(ConfigError, match=rf"gamma = 0.99: checkpoint {first} has 0.5"):
        train(resume=run_dir, **TO_THE_END)
    assert latest.read_text() == f"{second.name}\n"


def test_run_without_checkpoint_restarts_with_a_warning(tmp_path, whole, capsys):
    """A warning is printed, earlier results are kept, and TensorBoard has no duplicate points."""
    run_dir = tmp_path / "run"
    more = {**TENSORBOARD, "resume": "auto", "checkpoint.interval": 3}
    start(run_dir, **more, **TWO_EPOCHS)
    shutil.rmtree(run_dir / "checkpoints")
    rows, score = rows_of(run_dir), (run_dir / "best" / "score.json").read_bytes()
    (run_dir / "rollouts").mkdir()  # rollouts of a policy of the earlier run
    start(run_dir, **more)
    assert not (run_dir / "rollouts").exists()
    assert rows_of(run_dir) == rows_of(whole)
    (before,) = (run_dir / "before").iterdir()
    assert (before / "rollouts").exists()
    warning = f"{run_dir} has no checkpoint: the run restarts at step 0"
    assert warning in capsys.readouterr().err
    assert (rows_of(before), (before / "best" / "score.json").read_bytes()) == (rows, score)
    assert points(run_dir) == [64, 128, 192, 256]


@pytest.mark.parametrize("resume", [None, "auto", "run"])
def test_failed_start_can_be_repeated_with_changed_settings(tmp_path, capsys, resume):
    """The run restarts with changed settings, and its earlier files are moved to `before`."""
    run_dir = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        start(run_dir, **tracking(StoppingWriter))
    again = {"tracking": QUIET, "algorithm.lr": 0.02, **ONE_EPOCH}
    if resume == "run":
        train(resume=run_dir, **again)
    else:
        start(run_dir, resume=resume, **again)
    (before,) = (run_dir / "before").iterdir()
    assert f"restarts at step 0; earlier results were moved to {before}" in capsys.readouterr().err
    assert summary_of(before)["stop_reason"] == "interrupted"
    assert summary_of(run_dir)["stop_reason"] == "n_epochs"
    settings = [yaml.safe_load((path / "config.yaml").read_text()) for path in (before, run_dir)]
    assert settings[0]["algorithm"]["lr"] != settings[1]["algorithm"]["lr"] == 0.02
    with pytest.raises(ConfigError, match="already contains a run"):
        start(run_dir)


def test_fast_dev_run_resumes(tmp_path):
    """A run with `fast_dev_run` resumes with the same setting."""
    for _ in range(2):
        assert start(tmp_path / "run", resume="auto", **{"runner.fast_dev_run": True})


def test_random_draws_of_writers_do_not_change_results(tmp_path, whole):
    """Random draws of writers do not change the results, at the start or after resuming."""
    start(tmp_path / "run", **tracking(DrawingWriter), **TWO_EPOCHS)
    train(resume=tmp_path / "run", trust=["test_resume"], **TO_THE_END)
    states = [final_state(path)["generators"] for path in (tmp_path / "run", whole)]
    assert differences(*states) == []


def test_resume_restores_global_generators(tmp_path):
    """Dropout in a custom network uses the restored global generators."""
    own = {"model.policy": {"_target_": "own_networks.OwnNet"}}
    start(tmp_path / "a", **own)
    start(tmp_path / "b", **own, **TWO_EPOCHS)
    halfway = final_state(tmp_path / "b")["generators"]
    train(resume=tmp_path / "b", trust=["own_networks"], **TO_THE_END)
    assert differences(halfway, final_state(tmp_path / "b")["generators"]) != []
    assert_equal_runs(tmp_path / "b", tmp_path / "a")


# -- what is damaged or left over ----------------------------------------------------------------


def test_resume_skips_a_damaged_checkpoint(half, whole, capsys):
    """A warning names the damaged checkpoint, and the run resumes from the previous one."""
    state = half / "checkpoints" / "epoch_000002" / "state.pt"
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 1
    state.write_bytes(data)
    train(resume=half, **TO_THE_END)
    told = capsys.readouterr().err
    assert "epoch_000002 is damaged" in told
    assert "state.pt" in told
    assert_equal_runs(half, whole)
    for path in (half / "checkpoints").glob("*/state.pt"):
        path.write_bytes(b"")
    before = (half / "metrics.csv").read_bytes()
    with pytest.raises(RunDirectoryError, match="no undamaged checkpoint"):
        train(resume=half)
    assert (half / "metrics.csv").read_bytes() == before


def test_resume_sets_aside_a_damaged_table(half, whole, capsys):
    """The run resumes from the checkpoint; one warning names the file with the old rows."""
    table = half / "metrics.csv"
    damaged = table.read_bytes().replace(b"0", b"\xff", 1)
    table.write_bytes(damaged)
    train(resume=half, **TO_THE_END)
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert re.search(r"metrics\.csv is damaged: .*renamed to metrics\.damaged\.csv", warnings[0])
    assert (half / "metrics.damaged.csv").read_bytes() == damaged
    assert rows_of(half) == rows_of(whole)[2:]
    assert differences(final_state(half), final_state(whole)) == []


def test_resume_with_an_empty_table_appends_rows(half, capsys):
    """A warning reports the missing epochs, and new rows are appended."""
    table = half / "metrics.csv"
    table.write_text(table.read_text().partition("\n")[0] + "\n")
    train(resume=half, **TO_THE_END)
    assert "metrics.csv lacks 2 of 2 epochs" in capsys.readouterr().err
    assert not (half / "metrics.damaged.csv").exists()
    assert len(rows_of(half)) == 2


def test_resume_replaces_the_best_policy_of_an_abandoned_branch(half, whole):
    """A best policy written by an abandoned branch is replaced."""
    before = json.loads((half / "best" / "score.json").read_text())
    (half / "best" / "policy.pt").unlink()
    (half / "best" / "score.json").write_text('{"score": 999.0, "epoch": 3}')
    train(resume=half)
    assert json.loads((half / "best" / "score.json").read_text()) == before
    train(resume=half, **TO_THE_END)
    assert_equal_runs(half, whole)


def test_resume_removes_files_of_dead_processes(half):
    """Temporary files of dead processes are removed; those of living processes stay."""
    dead = [half / ".metrics.csv.999999999.tmp", half / "best" / ".policy.pt.999999999.tmp"]
    living = half / f".mine.{os.getpid()}.tmp"
    for path in (*dead, living):
        path.touch()
    train(resume=half)
    assert not any(path.exists() for path in dead)
    assert living.exists()


# -- what is refused -----------------------------------------------------------------------------


def damage(run_dir: Path, pattern: str) -> None:
    """Remove the last byte of files."""
    for path in run_dir.glob(f"checkpoints/{pattern}"):
        path.write_bytes(path.read_bytes()[:-1])


REFUSED = tracking(RefusingWriter)
REFUSALS: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "a writer fails": (lambda run: None, REFUSED),
    "a writer fails, at an earlier checkpoint": (
        lambda run: None,
        {**REFUSED, "resume": "checkpoints/epoch_000001"},
    ),
    "a writer fails, the last checkpoint is damaged": (
        lambda run: damage(run, "epoch_000002/state.pt"),
        REFUSED,
    ),
    "a writer fails, metrics are damaged": (
        lambda run: (run / "metrics.csv").write_bytes(b"\xff\n\n"),
        REFUSED,
    ),
    "a writer fails, there is no checkpoint": (
        lambda run: shutil.rmtree(run / "checkpoints"),
        REFUSED,
    ),
    "all checkpoints are damaged": (lambda run: damage(run, "*/*.pt"), {}),
    "the networks differ": (lambda run: change(run, "model.hidden_sizes", [4]), {}),
    "a setting may not change": (lambda run: None, {"algorithm.gamma": 0.5}),
    "a limit is exceeded": (lambda run: None, {"total_steps": 64}),
    "a callback fails": (
        lambda run: None,
        {"callbacks": [{"_target_": "test_resume.Forgetful"}], "resume": "with_callback"},
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_failed_resume_changes_nothing(half, case):
    """No file changes if resuming fails, even if it fails late."""
    prepare, changes = REFUSALS[case]
    changes = {"tracking": {**QUIET, "tensorboard": True, "plot": True}, **changes}
    resume = half / changes.pop("resume", "")
    if resume.name == "with_callback":
        start(resume, callbacks=changes.pop("callbacks"), **TWO_EPOCHS)
    prepare(half)
    # A policy written by an abandoned branch.
    (half / "best" / "score.json").write_text('{"score": 999.0, "epoch": 3}')
    before = file_contents(half)
    with pytest.raises((ValueError, ConfigError, RunDirectoryError)):
        train(resume=resume, trust=["test_resume"], **changes)
    assert file_contents(half) == before


def test_edited_configuration_is_reported_or_raises(half, capsys):
    """Changed settings are reported; ConfigError is raised if a setting may not change."""
    edit_settings(half, lambda node: node.update(total_steps=192))
    train(resume=half, **TO_THE_END)
    place = f"checkpoint {half}/checkpoints/epoch_000002"
    told = (
        f"changed since {place}:\n"
        "  setting             before  now\n"
        "  algorithm.n_epochs       2    0\n"
        "  total_steps            256  192\n"
    )
    assert told in capsys.readouterr().err
    edit_settings(half, lambda node: node["algorithm"].update(gamma=0.5))
    with pytest.raises(ConfigError, match=r"gamma = 0.5: checkpoint \S+epoch_000003 has 0.99"):
        train(resume=half)


def test_checkpoint_of_another_run_raises(half, tmp_path):
    """One message names all settings that differ."""
    start(tmp_path / "other", env="Acrobot-v1", **{"model.hidden_sizes": [4]}, **ONE_EPOCH)
    shutil.rmtree(half / "checkpoints")
    shutil.copytree(tmp_path / "other" / "checkpoints", half / "checkpoints")
    text = r"env.id = 'CartPole-v1': checkpoint .* has 'Acrobot-v1', (.|\n)*hidden_sizes .* refused"
    with pytest.raises(ConfigError, match=text):
        train(resume=half)


def test_second_process_in_a_run_directory_raises(half):
    """A second process raises an error while the first one runs."""
    with exclusive(half), pytest.raises(RunDirectoryError, match=r"another process \(pid \d+"):
        train(resume=half)
    train(resume=half)


@pytest.mark.parametrize("resume", [None, "auto"])
def test_overtaken_start_touches_nothing(tmp_path, whole, resume):
    """Another process starts and finishes the run while this one builds its environments."""

    def make() -> Any:
        if not (tmp_path / "run").exists():
            start(tmp_path / "run")
        return make_cartpole()

    with pytest.raises(ConfigError, match="already contains a run; resume it with resume=auto"):
        start(tmp_path / "run", env=make, resume=resume)
    assert_equal_runs(tmp_path / "run", whole)


@pytest.mark.parametrize("resume", [None, "auto"])
def test_run_directory_without_configuration_raises(half, resume):
    """A new run in the directory would overwrite the remaining files."""
    (half / "config.yaml").unlink()
    text = "contains checkpoints, best, metrics.csv of a run whose config.yaml is missing"
    with pytest.raises(ConfigError, match=text):
        start(half, resume=resume)
    assert len(list((half / "checkpoints").glob("epoch_*"))) == 2


def test_checkpoint_can_be_loaded_as_a_policy(half):
    """Path and name of a checkpoint give the same weights and the same rollouts."""
    found = load_policy(half / "checkpoints" / "epoch_000002").model.state_dict()
    wanted = load_policy(f"{half}@epoch_000002").model.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    runs = (half / "checkpoints" / "epoch_000002", f"{half}@epoch_000002")
    played = [run_rollout(run, n_episodes=5, progress="quiet").episodes for run in runs]
    assert [own.episode_return for own in played[0]] == [own.episode_return for own in played[1]]


IMPALA = "maze_train.algorithms.impala.config.ImpalaAlgorithmConfig"


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("model.hidden_sizes", [4], r"policy.*weight \[8, 4\] there, \[4, 4\] here; .*more"),
        ("algorithm", {"_target_": IMPALA}, "it has no 'actors', as of another algorithm"),
    ],
)
def test_checkpoint_that_does_not_match_names_the_component(half, key, value, told):
    """The error names the component that does not match."""
    change(half, key, value)
    with pytest.raises(RunDirectoryError, match=rf"epoch_000002 does not fit this run: .*{told}"):
        train(resume=half)


@pytest.mark.parametrize("error", [KeyError("x"), TypeError("x"), AttributeError("x")])
def test_errors_of_user_code_propagate_on_resume(error):
    """Exceptions of user code propagate unchanged."""

    def load_state_dict(state):
        raise error

    with pytest.raises(type(error)) as caught, fitting(SimpleNamespace(path="epoch_1")):
        load_state_dict({})
    assert caught.value is error


def test_run_of_an_older_version_raises(half):
    """The error names the version that can resume the run, and no file changes."""
    for path in half.glob("checkpoints/*/MANIFEST.json"):
        content = json.loads(path.read_text())
        path.write_bytes(seal(content | {"schema": 1, "versions": {"maze_train": "0.0.9"}}))
    rows = (half / "metrics.csv").read_bytes()
    text = r"by maze_train 0\.0\.9 with schema 1, .* resume the run with maze_train 0\.0\.9, or"
    with pytest.raises(RunDirectoryError, match=text):
        train(resume=half)
    assert (half / "metrics.csv").read_bytes() == rows
