"""Writers for experiment trackers, against stand-ins for their packages."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock, call

import pytest

from maze_train import MLflowWriter, RunInfo, Tracker, WandbWriter
from maze_train.errors import MissingExtraError

if TYPE_CHECKING:
    from pathlib import Path

ROW = {"epoch": 1, "updates": 2, "env_steps": 300, "train/loss": 0.5}
MORE = {**ROW, "epoch": 2, "env_steps": 600}


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """A stand-in for wandb; all its runs are one."""
    monkeypatch.setitem(sys.modules, "wandb", module := MagicMock())
    return module


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """A stand-in for mlflow, which knows no experiment; its entities are tuples."""
    monkeypatch.setitem(sys.modules, "mlflow", module := MagicMock())
    module.entities = SimpleNamespace(
        Param=lambda key, value: (key, value),
        Metric=lambda key, value, time_ms, step: (key, value, step),
    )
    client = module.MlflowClient.return_value
    client.get_experiment_by_name.return_value = None
    client.create_experiment.return_value = "7"
    client.create_run.return_value.info.run_id = "r1"
    return module


def logged(client: MagicMock, what: str) -> list[Any]:
    """The batches of parameters or metrics of a run."""
    calls = client.log_batch.call_args_list
    assert all(one.args == ("r1",) for one in calls)
    return [one.kwargs[what] for one in calls if what in one.kwargs]


@pytest.mark.parametrize(("kind", "extra"), [(WandbWriter, "wandb"), (MLflowWriter, "mlflow")])
def test_a_missing_package_names_its_extra(
    kind: type[WandbWriter] | type[MLflowWriter], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes before training starts and says what to install."""
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(MissingExtraError, match=rf"maze-train\[{extra}\]"):
        kind()


def test_wandb_gets_rows_config_and_summary(wandb: MagicMock, tmp_path: Path) -> None:
    """Steps are environment steps; arguments of the user win over ours."""
    info = RunInfo(run_dir=tmp_path, title="PPO on X", config={"seed": 1})
    with Tracker([WandbWriter(project="p", mode="offline")], info) as tracker:
        tracker.write(ROW)
        tracker.finish({"stop_reason": "done"})
    wandb.init.assert_called_once_with(
        project="p",
        name="PPO on X",
        config={"seed": 1},
        dir=str(tmp_path),
        reinit="create_new",
        mode="offline",
    )
    run = wandb.init.return_value
    assert run.log.call_args_list == [call(ROW, step=300)]
    run.summary.update.assert_called_once_with({"stop_reason": "done"})
    run.finish.assert_called_once_with(exit_code=0)


def test_mlflow_gets_rows_params_and_outcome(mlflow: MagicMock, tmp_path: Path) -> None:
    """Everything goes to a client and a database of the run's own."""
    config = {"algorithm": {"lr": 0.1, "name": "x" * 900}, "seed": 1}
    info = RunInfo(run_dir=tmp_path, title="PPO", config=config)
    with Tracker([MLflowWriter(experiment="e")], info) as tracker:
        tracker.write(ROW)
        tracker.finish({"best": {"epoch": 3}})
    mlflow.MlflowClient.assert_called_once_with(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    client = mlflow.MlflowClient.return_value
    client.create_experiment.assert_called_once_with("e")
    client.create_run.assert_called_once_with("7", run_name="PPO")
    expected = [("algorithm.lr", "0.1"), ("algorithm.name", "x" * 500), ("seed", "1")]
    assert logged(client, "params") == [expected]
    assert logged(client, "metrics") == [[(key, float(value), 300) for key, value in ROW.items()]]
    client.set_tag.assert_called_once_with("r1", "summary.best.epoch", "3")
    client.set_terminated.assert_called_once_with("r1", status="FINISHED")


def test_mlflow_splits_long_configurations(mlflow: MagicMock) -> None:
    """No call has more parameters than MLflow takes; known experiments are not made anew."""
    client = mlflow.MlflowClient.return_value
    client.get_experiment_by_name.return_value = SimpleNamespace(experiment_id=5)
    writer = MLflowWriter(tracking_uri="file:///x", name="mine")
    writer.start(RunInfo(config={str(i): i for i in range(250)}))
    writer.close()
    mlflow.MlflowClient.assert_called_once_with(tracking_uri="file:///x")
    assert [len(batch) for batch in logged(client, "params")] == [100, 100, 50]
    client.create_run.assert_called_once_with("5", run_name="mine")
    client.create_experiment.assert_not_called()


def test_a_continued_run_brings_its_rows(wandb: MagicMock, mlflow: MagicMock) -> None:
    """It is a run of its own there, with the rows from before; without an outcome it has failed."""
    writers = [WandbWriter(), MLflowWriter()]
    with Tracker(writers, RunInfo(past_rows=(ROW,), resumed_at_step=300)) as tracker:
        tracker.write(MORE)
    for writer in writers:
        writer.close()
    run, client = wandb.init.return_value, mlflow.MlflowClient.return_value
    assert run.log.call_args_list == [call(ROW, step=300), call(MORE, step=600)]
    assert [batch[0][2] for batch in logged(client, "metrics")] == [300, 600]
    run.finish.assert_called_once_with(exit_code=1)
    client.set_terminated.assert_called_once_with("r1", status="FAILED")
