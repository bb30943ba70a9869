"""Writers for experiment trackers, against stand-ins for their packages."""

from __future__ import annotations

import sys
from collections import namedtuple
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from maze_train import MLflowWriter, RunInfo, Tracker, WandbWriter
from maze_train.errors import MissingExtraError

if TYPE_CHECKING:
    from pathlib import Path

ROW = {"epoch": 1, "updates": 2, "env_steps": 300, "train/loss": 0.5}


class FakeWandbRun:
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.logged: list[tuple[dict[str, float], int]] = []
        self.summary: dict[str, Any] = {}
        self.exit_codes: list[int] = []

    def log(self, row: dict[str, float], step: int) -> None:
        self.logged.append((row, step))

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


class FakeMlflowClient:
    Param = namedtuple("Param", "key value")
    Metric = namedtuple("Metric", "key value timestamp step")

    def __init__(self, tracking_uri: str | None) -> None:
        self.tracking_uri = tracking_uri
        self.experiments: dict[str, str] = {}
        self.run_names: list[str | None] = []
        self.params: dict[str, str] = {}
        self.metrics: list[tuple[str, float, int]] = []
        self.tags: dict[str, str] = {}
        self.status: list[str] = []
        self.largest_batch = 0

    def get_experiment_by_name(self, name: str) -> Any:
        known = self.experiments.get(name)
        return None if known is None else SimpleNamespace(experiment_id=known)

    def create_experiment(self, name: str) -> str:
        return self.experiments.setdefault(name, "7")

    def create_run(self, experiment_id: str, run_name: str | None) -> Any:
        assert experiment_id == "7"
        self.run_names.append(run_name)
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert run_id == "r1"
        self.largest_batch = max(self.largest_batch, len(params))
        self.params.update({p.key: p.value for p in params})
        self.metrics.extend((m.key, m.value, m.step) for m in metrics)

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        assert run_id == "r1"
        self.tags[key] = value

    def set_terminated(self, run_id: str, status: str) -> None:
        assert run_id == "r1"
        self.status.append(status)


@pytest.fixture
def wandb_runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeWandbRun]:
    """The runs that a stand-in for wandb opened."""
    runs: list[FakeWandbRun] = []

    def init(**arguments: Any) -> FakeWandbRun:
        runs.append(FakeWandbRun(arguments))
        return runs[-1]

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return runs


@pytest.fixture
def mlflow_clients(monkeypatch: pytest.MonkeyPatch) -> list[FakeMlflowClient]:
    """The clients that a stand-in for mlflow made."""
    clients: list[FakeMlflowClient] = []

    def make_client(tracking_uri: str | None = None) -> FakeMlflowClient:
        clients.append(FakeMlflowClient(tracking_uri))
        return clients[-1]

    module = ModuleType("mlflow")
    module.MlflowClient = make_client  # type: ignore[attr-defined]
    module.entities = FakeMlflowClient  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return clients


@pytest.mark.parametrize(("kind", "extra"), [(WandbWriter, "wandb"), (MLflowWriter, "mlflow")])
def test_a_missing_package_names_its_extra(
    kind: type[WandbWriter] | type[MLflowWriter], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes before training starts and says what to install."""
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(MissingExtraError, match=rf"maze-train\[{extra}\]"):
        kind()


def test_wandb_gets_rows_config_and_summary(wandb_runs: list[FakeWandbRun], tmp_path: Path) -> None:
    """Steps are environment steps; arguments of the user win over ours."""
    run = RunInfo(run_dir=tmp_path, title="PPO on X", config={"seed": 1})
    with Tracker([WandbWriter(project="p", mode="offline")], run) as tracker:
        tracker.write(ROW)
        tracker.finish({"stop_reason": "done"})
    (made,) = wandb_runs
    assert made.arguments == {
        "project": "p",
        "name": "PPO on X",
        "config": {"seed": 1},
        "dir": str(tmp_path),
        "reinit": "create_new",
        "mode": "offline",
    }
    assert made.logged == [(ROW, 300)]
    assert made.summary == {"stop_reason": "done"}
    assert made.exit_codes == [0]


def test_a_failed_run_is_marked_at_wandb(wandb_runs: list[FakeWandbRun]) -> None:
    """A run that closes without its outcome ends with exit code 1; closing twice is harmless."""
    writer = WandbWriter()
    writer.start(RunInfo())
    writer.close()
    writer.close()
    assert wandb_runs[0].exit_codes == [1]
    assert wandb_runs[0].arguments["dir"] is None


def test_mlflow_gets_rows_params_and_outcome(
    mlflow_clients: list[FakeMlflowClient], tmp_path: Path
) -> None:
    """Everything goes to a client and a database of the run's own."""
    config = {"algorithm": {"lr": 0.1, "name": "x" * 900}, "seed": 1}
    run = RunInfo(run_dir=tmp_path, title="PPO", config=config)
    with Tracker([MLflowWriter(experiment="e")], run) as tracker:
        tracker.write(ROW)
        tracker.finish({"best": {"epoch": 3}})
    (client,) = mlflow_clients
    assert client.tracking_uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert client.experiments == {"e": "7"}
    assert client.run_names == ["PPO"]
    assert client.params == {"algorithm.lr": "0.1", "algorithm.name": "x" * 500, "seed": "1"}
    assert client.metrics == [(name, float(value), 300) for name, value in ROW.items()]
    assert client.tags == {"summary.best.epoch": "3"}
    assert client.status == ["FINISHED"]


def test_mlflow_splits_long_configurations(mlflow_clients: list[FakeMlflowClient]) -> None:
    """No call has more parameters than MLflow takes; a run without its outcome has failed."""
    writer = MLflowWriter(tracking_uri="file:///x", name="mine")
    writer.start(RunInfo(config={str(i): i for i in range(250)}))
    writer.close()
    (client,) = mlflow_clients
    assert len(client.params) == 250
    assert client.largest_batch == 100
    assert client.tracking_uri == "file:///x"
    assert client.run_names == ["mine"]
    assert client.status == ["FAILED"]


def test_a_continued_run_brings_its_rows(
    wandb_runs: list[FakeWandbRun], mlflow_clients: list[FakeMlflowClient]
) -> None:
    """It is a run of its own there, with the rows from before."""
    more = {**ROW, "epoch": 2, "env_steps": 600}
    run = RunInfo(past_rows=(ROW,), resumed_at_step=300)
    with Tracker([WandbWriter(), MLflowWriter()], run) as tracker:
        tracker.write(more)
    assert wandb_runs[0].logged == [(ROW, 300), (more, 600)]
    steps = [step for name, _, step in mlflow_clients[0].metrics if name == "train/loss"]
    assert steps == [300, 600]
