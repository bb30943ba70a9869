"""Faults during a run: messages, lost data, and resuming afterwards."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Any

import pytest
from cases import everyday
from killed_runs import assert_equal_runs, maze_run, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.slow
exhaustive = pytest.mark.exhaustive

COMMON = (
    "env._target_=faulty_envs.FaultyEnv", "algorithm=ppo", "seed=1", "run_dir=run", "resume=auto",
    "algorithm.n_rollout_steps=16", "algorithm.batch_size=16", "algorithm.epoch_length=2",
    "runner.concurrency=4", "evaluation.n_episodes=2", "model.hidden_sizes=[8]",
    "total_steps=640", "tracking.progress=quiet", "tracking.plot=false",
)  # fmt: skip
LOCAL = (
    *("runner=local", "runner.start_method=fork", "runner.n_workers=2"),
    "evaluation.concurrency=1",
)
RESTART = (*LOCAL, "runner.on_worker_failure=restart")
GO_ON = r"to continue: maze-run resume=\S+/run\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Return a function that runs a command of five epochs in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")

    def call(*argv: str, **how: Any) -> tuple[int, str]:
        code, output = maze_run(tmp_path / "output.txt", *COMMON, *argv, **how)
        return code, output

    return call


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run without faults."""
    directory = tmp_path_factory.mktemp("undisturbed")
    code, output = maze_run(directory / "output.txt", *COMMON, f"run_dir={directory / 'run'}")
    assert code == 0, output
    return directory / "run"


def lost_episodes(run_dir: Path) -> float:
    """Return the number of lost episodes in metrics.csv."""
    return sum(float(row.get("train/lost_episodes") or 0) for row in rows_of(run_dir))


def fault(kind: str, **settings: Any) -> tuple[str, ...]:
    """Return arguments that add a fault to the environment."""
    return (f"+env.kwargs.fault={kind}", *(f"+env.kwargs.{k}={v}" for k, v in settings.items()))


# -- signals -------------------------------------------------------------------------------------


def test_signal_saves_and_the_run_resumes(run, tmp_path):
    """The run finishes the update, saves a checkpoint, and resumes without lost epochs."""
    started = (tmp_path / "run" / "checkpoints" / "latest", signal.SIGUSR1)
    assert run("total_steps=1e9", signals=(started,))[0] == 138
    output = (tmp_path / "output.txt").read_text()
    assert re.search(r"stopped in epoch .*last checkpoint: \S+/run/checkpoints/epoch_\d+", output)
    assert re.search(GO_ON, output)
    assert output.endswith("maze-run: ended by SIGUSR1\n")
    done = len(rows_of(tmp_path / "run"))
    assert run(f"total_steps={128 * (done + 2)}")[0] == 0
    epochs = [int(row["epoch"]) for row in rows_of(tmp_path / "run")]
    assert epochs == list(range(1, done + 3))


# -- disks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prepare", "code", "told"),
    [
        (
            "disk_full",
            1,
            [
                r"some results could not be written to \S+/run: the last checkpoint; free",
                r"epoch_000002 could not be written: \[Errno 28\] No space left on device",
                "the last valid checkpoint is epoch_000001",
            ],
        ),
        ("disk_full_for_a_while", 0, ["CSVWriter could not write and will retry"]),
        pytest.param("checkpoints_vanish", 0, [], marks=exhaustive),  # written again
        pytest.param("read_only", 1, ["could not be written"], marks=exhaustive),
    ],
)
def test_disk_faults_are_reported_once_and_lose_nothing(
    run, undisturbed, tmp_path, prepare, code, told
):
    """The run writes all rows and warns once per fault; a resumed run has lost nothing."""
    found, output = run(prepare=prepare)
    assert found == code
    assert all(re.search(pattern, output) for pattern in told)
    assert rows_of(tmp_path / "run") == rows_of(undisturbed)
    if prepare == "disk_full":
        names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
        assert names == {"latest", "epoch_000001"}
        assert run()[0] == 0
    if prepare == "disk_full_for_a_while":
        assert output.count(told[0]) == 1
    if prepare != "read_only":
        assert_equal_runs(tmp_path / "run", undisturbed)


@pytest.mark.parametrize("how", everyday(1, ["is_moved", "vanishes", "is_half_removed"]))
def test_lost_run_directory_is_reported_with_exit_code_1(run, undisturbed, tmp_path, how):
    """Each lost file is reported, the run exits with code 1, and the directory is not recreated.

    If the directory was moved, the run resumes once it has been moved back.
    """
    every_epoch = "evaluation.dump_interval=1"
    code, output = run(every_epoch, prepare=f"run_dir_{how}")
    assert code == 1
    reason = r".*was moved or removed during the run \(.lock is not the original file\): '\S+/run'"
    losses = ("policies/epoch_000004", "CSVWriter", "epoch_000003", "JSONSummary")
    assert [loss for loss in losses if not re.search(loss + reason, output)] == []
    assert "/run: the directory itself, " in output
    assert output.endswith("; restore it and resume the run to write them\n")
    left = {path.name for path in tmp_path.glob("run/*")}
    unaffected = {"best", "checkpoints", "environment.json", "run.log"}
    assert left <= {*unaffected, *(name for name in left if name.startswith("events."))}
    if how != "is_half_removed":
        assert not (tmp_path / "run").exists()
    if how == "is_moved":
        assert len(rows_of(tmp_path / "moved")) == 3
        (tmp_path / "moved").rename(tmp_path / "run")
        assert run(every_epoch)[0] == 0
        assert rows_of(tmp_path / "run") == rows_of(undisturbed)


# -- environments and workers --------------------------------------------------------------------


WORKER = (r"worker \d \(environments? \d", r"seeds? (of its episodes: )?\d+")
BROKEN = (r"step 3 of the episode with seed \d+: Runtime", "the wheel came off")


@pytest.mark.parametrize(
    ("where", "kind", "said"),
    [
        ((), "raise", (*BROKEN, r'faulty_envs\.py", line', "there is no checkpoint")),
        (LOCAL, "kill", (r"died in a step \(signal SIGKILL; was memory exhausted\?\)", *WORKER)),
        pytest.param(
            LOCAL, "hang", ("hangs: it did not finish a step within", *WORKER), marks=exhaustive
        ),
        # Every restart fails again, until the limit of restarts is reached.
        ((*RESTART, "runner.max_worker_restarts=6"), "raise", ("max_worker_restarts|6 restarts",)),
        ((), "constructor", ("the model file is missing",)),
    ],
)
def test_failing_environment_is_named_in_the_error(run, where, kind, said):
    """The run fails, and the message names worker, environment, step and seed."""
    code, output = run(*where, *fault(kind), *(["runner.worker_timeout_s=2"] if where else []))
    assert code == 1
    assert [pattern for pattern in said if not re.search(pattern, output)] == []


@pytest.mark.parametrize("kind", ["kill", "hang"])
@pytest.mark.exhaustive
def test_restarted_worker_does_not_change_results(run, undisturbed, tmp_path, kind):
    """A restarted worker is restored from its journal, so the results do not change."""
    marker = tmp_path / "happened"
    code, output = run(*RESTART, *fault(kind, marker=marker), "runner.worker_timeout_s=2")
    assert code == 0, output
    assert marker.exists()
    assert re.search(r"warning: .*worker \d", output)
    kept = [
        {name: cell for name, cell in row.items() if name != "train/worker_restarts"}
        for row in rows_of(tmp_path / "run")
    ]
    assert kept == rows_of(undisturbed)
    restarts = [row["train/worker_restarts"] for row in rows_of(tmp_path / "run")]
    assert sum(float(n or 0) for n in restarts) == 1


@pytest.mark.exhaustive
def test_resuming_a_nondeterministic_environment_raises(run, tmp_path):
    """Resuming raises an error unless new episodes are allowed."""
    assert run(*fault("chance"), "algorithm.n_epochs=2")[0] == 0
    code, output = run(*fault("chance"), "algorithm.n_epochs=0")
    assert code == 1
    assert re.search(r"environment 0 .*seed \d+", output)
    assert "checkpoint.allow_new_episodes=true" in output
    more = ("algorithm.n_epochs=0", "checkpoint.allow_new_episodes=true")
    code, output = run(*fault("chance"), *more)
    assert code == 0, output
    assert len(rows_of(tmp_path / "run")) == 5


# -- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "said"),
    everyday(
        1,
        [("nan_observation", r"observation.*nan"), ("inf_reward", r"reward.*inf")],
        are_rows=True,
    ),
)
def test_non_finite_values_raise_or_drop_the_episode(run, tmp_path, kind, said):
    """The error names environment, step and seed; with `skip`, the episode is dropped."""
    marker = tmp_path / "happened"
    code, output = run(*fault(kind))
    assert code == 1
    assert re.search(
        rf"environment \d failed at step 3 of the episode with seed \d+.*{said}", output
    )
    (tmp_path / "run" / "config.yaml").unlink()
    skip = ("algorithm.on_non_finite=skip", "evaluation.n_episodes=0")
    code, output = run(*fault(kind, marker=marker), *skip)
    assert code == 0, output
    assert lost_episodes(tmp_path / "run") == 1


@pytest.mark.parametrize("evaluated", everyday(1, [True, False]))
def test_environment_that_is_never_finite_ends_the_run(run, evaluated):
    """The run fails if every step is skipped, in training and in evaluation."""
    skip = ("algorithm.on_non_finite=skip", f"evaluation.n_episodes={2 * evaluated}")
    code, output = run(*fault("nan_observation", at=1 + evaluated), *skip)
    assert code == 1
    evaluation = "aborted in an evaluation of 2 episodes"
    assert (evaluation if evaluated else "every step of a rollout was lost") in output


@pytest.mark.exhaustive
def test_non_finite_gradients_raise_or_skip_the_step(run, tmp_path):
    """The error names epoch, update and loss; with `skip`, the step is skipped and counted."""
    code, output = run(prepare="nan_gradients")
    assert code == 1
    assert re.search(
        r"epoch 4, update 7: the gradient of minibatch \d+ is not finite, train/value_loss = nan",
        output,
    )
    assert re.search(r"last checkpoint: \S+/run/checkpoints/epoch_000003", output)
    assert re.search(GO_ON, output)
    code, output = run("algorithm.on_non_finite=skip", prepare="nan_gradients")
    assert code == 0, output
    assert sum(float(row["train/skipped_steps"] or 0) for row in rows_of(tmp_path / "run")) > 0
