"""Writers for experiment trackers, tested with the packages, without a network."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from maze_train import (
    ConfigError,
    MetricsWriter,
    MLflowWriter,
    RunInfo,
    Tracker,
    WandbWriter,
    load_policy,
    train,
)
from maze_train.core.folders import check_enclosed
from maze_train.spaces.describe import FlatView, flatten_value, is_mask_key
from maze_train.tracking.mlflow_model import MODEL, save_model
from maze_train.tracking.services import check_answers, mlflow_name, service_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

# Warnings of the packages themselves are not tested.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ROW = {"epoch": 1, "updates": 2, "env_steps": 300, "league/main@3/win_rate": 0.5}
MORE = {**ROW, "epoch": 2, "env_steps": 600, "train/loss": math.nan}
CONFIG = {"algorithm": {"lr": 0.1, "text": "x" * 900, "@": []}, **{f"k{i}": i for i in range(250)}}
BLOCK = 1 << 15


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep runs and telemetry on this machine."""
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path_factory.mktemp("wandb_data")))
    for name, value in (("WANDB_MODE", "offline"), ("MLFLOW_DISABLE_TELEMETRY", "true")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))  # MLflow stores artifacts there by default.


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return the directory of a run with a policy and a video."""
    for name in ("best/policy.pt", "film/videos/a.mp4", "wandb/copy.mp4", "mlartifacts/copy.mp4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def write_run(writer: MetricsWriter, run_dir: Path | None, reason: str, **more: Any) -> None:
    """Write a run of two epochs that was resumed after the first one."""
    info = RunInfo(run_dir=run_dir, title="PPO on X", config=CONFIG, past_rows=(ROW,), **more)
    with Tracker([writer], info) as tracker:
        tracker.write(MORE)
        tracker.finish({"stop_reason": reason, "final_test": {"best": {"epoch": 3}}})


def records(run_dir: Path) -> Iterator[Any]:
    """Yield the records in the newest offline file of wandb, a sequence of blocks with headers."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # flushes wandb's process
    path = max(run_dir.glob("wandb/offline-run-*/run-*.wandb"), key=lambda p: p.stat().st_mtime_ns)
    data, place, held = path.read_bytes(), 7, b""
    while place < len(data):
        if BLOCK - place % BLOCK < 7:  # too short for a header
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        held += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # complete record, or its last chunk
            record = wandb_internal_pb2.Record()
            record.ParseFromString(held)
            held = b""
            yield record


def items(found: Any) -> dict[str, Any]:
    """Return names and values of a record."""
    return {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in found}


@pytest.mark.parametrize(("reason", "code"), [("total_steps", 0), ("error", 1)])
def test_wandb_gets_config_rows_artifact_and_videos(run_dir: Path, reason: str, code: int) -> None:
    """Configuration, curves, outcome, the best policy as an artifact, and videos."""
    pytest.importorskip("wandb")
    write_run(WandbWriter(project="p", tags=["mine"]), run_dir, reason)
    by_kind: dict[str, list[Any]] = {}
    for record in records(run_dir):
        kind = record.WhichOneof("record_type")
        by_kind.setdefault(kind, []).append(getattr(record, kind))
    (run,) = by_kind["run"]
    assert (run.project, run.display_name, list(run.tags)) == ("p", "PPO on X", ["mine"])
    assert items(run.config.update)["algorithm"] == CONFIG["algorithm"]
    first, second = (items(row.item) for row in by_kind["history"])
    assert {name: first[name] for name in ROW} == ROW
    assert (first["_step"], second["_step"], second["epoch"]) == (300, 600, 2)
    assert math.isnan(second["train/loss"])
    summary: dict[str, Any] = {}
    for update in by_kind["summary"]:
        summary.update(items(update.update))
    assert summary["stop_reason"] == reason
    assert summary["final_test"] == {"best": {"epoch": 3}}
    assert second["film/videos/a/_type"] == "video-file"
    (media,) = run_dir.glob(f"wandb/offline-run-*/files/{second['film/videos/a/path']}")
    assert media.read_bytes() == b"film/videos/a.mp4"
    (artifact,) = by_kind["artifact"]
    assert (artifact.type, sorted(artifact.aliases)) == ("model", ["best", "latest"])
    assert [entry.path for entry in artifact.manifest.contents] == ["policy.pt"]
    assert [end.exit_code for end in by_kind["exit"]] == [code]


def test_two_wandb_runs_in_a_process_are_separate(tmp_path: Path) -> None:
    """Each run has its own rows, and no artifact if there is no policy."""
    pytest.importorskip("wandb")
    trackers = [Tracker([WandbWriter()], RunInfo(run_dir=tmp_path / name)) for name in "ab"]
    for name in "ab":
        (tmp_path / name).mkdir()
    for tracker in trackers:
        tracker.start()
    for i, tracker in enumerate(trackers):
        tracker.write({**ROW, "epoch": i})
    for tracker in trackers:
        tracker.finish({})
        tracker.close()
    for i, name in enumerate("ab"):
        found = list(records(tmp_path / name))
        kinds = [record.WhichOneof("record_type") for record in found]
        (row,) = (found[k].history for k, kind in enumerate(kinds) if kind == "history")
        assert items(row.item)["epoch"] == i
        assert "artifact" not in kinds


def continued(writer: MetricsWriter, run_dir: Path | None) -> None:
    """Train two epochs, resume from the checkpoint of the first, and train until the third."""
    with Tracker([writer], RunInfo(run_dir=run_dir, title="PPO on X", config=CONFIG)) as tracker:
        tracker.write(ROW)
        tracker.write(MORE)
    resume(writer, run_dir)


def resume(writer: MetricsWriter, run_dir: Path | None) -> None:
    """Resume from the checkpoint of the first epoch, and train until the third."""
    run = RunInfo(run_dir=run_dir, title="PPO on X", config={**CONFIG, "k1": 3})
    with Tracker([writer], replace(run, past_rows=(ROW,), resumed_at_step=300)) as tracker:
        tracker.write(MORE)
        tracker.write({**MORE, "epoch": 3, "env_steps": 900})
        tracker.finish({"stop_reason": "total_steps"})


def test_resumed_run_continues_its_wandb_run(tmp_path: Path) -> None:
    """The resumed run has the same id; rows before the checkpoint are not written again."""
    pytest.importorskip("wandb")
    continued(WandbWriter(), tmp_path)
    # Directories of runs that start in the same second end in a number after the id.
    ids = {path.name.split("-")[3] for path in tmp_path.glob("wandb/offline-run-*")}
    known = json.loads((tmp_path / "services.json").read_text())
    assert list(known) == ["wandb:/maze_train"]
    assert ids == set(known.values())
    found = [items(r.history.item) for r in records(tmp_path) if r.HasField("history")]
    assert [row["epoch"] for row in found] == [2, 3]


class FakeRun:
    """Run on a server that has all rows up to a step."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.id = arguments.get("id", "fresh")
        self.step = 601 if "id" in arguments else 0
        self.rows: list[int] = []
        self.summary: dict[str, Any] = {}

    def log(self, row: dict[str, float], step: int) -> None:
        """Record the step of a row."""
        self.rows.append(step)

    def finish(self, exit_code: int) -> None:
        """Do nothing."""


def test_wandb_server_gets_each_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run requests its wandb run, and skips rows that the server already has."""
    wandb = pytest.importorskip("wandb")
    runs: list[FakeRun] = []

    def init(**arguments: Any) -> FakeRun:
        runs.append(FakeRun(arguments))
        return runs[-1]

    monkeypatch.setattr(wandb, "init", init)
    continued(WandbWriter(), tmp_path)
    first, second = runs
    assert "resume" not in first.arguments
    assert (second.arguments["id"], second.arguments["resume"]) == ("fresh", "must")
    assert (first.rows, second.rows) == ([300, 600], [900])
    continued(WandbWriter(project="another"), tmp_path)
    assert "resume" not in runs[2].arguments


def test_deleted_wandb_run_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error explains how to start a new wandb run."""
    wandb = pytest.importorskip("wandb")
    (tmp_path / "services.json").write_text('{"wandb:/maze_train": "gone"}')

    def init(**_: Any) -> None:
        raise wandb.Error("run gone does not exist")

    monkeypatch.setattr(wandb, "init", init)
    tracker = Tracker([WandbWriter()], RunInfo(run_dir=tmp_path, resumed_at_step=300))
    with pytest.raises(ConfigError, match=r"does not exist\); remove services.json"), tracker:
        pass


def test_wandb_names_and_groups_come_from_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep sets name and group; wandb's environment variables apply to other settings."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    info = RunInfo(run_dir=tmp_path, title="PPO on X", name="seed=2", group="2026-01-02")
    with Tracker([WandbWriter()], info):
        pass
    (run,) = (record.run for record in records(tmp_path) if record.HasField("run"))
    assert (run.project, run.display_name, run.run_group) == ("ours", "seed=2", "2026-01-02")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"projec": "x"}, "unexpected keyword argument 'projec'"),
        ({"project": "a#b"}, "found '#'"),
        ({"mode": "bogus"}, "Input should be 'online'"),
        ({"settings": {"symlink": "maybe"}}, "valid boolean"),
    ],
)
def test_invalid_wandb_arguments_raise(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """The error is raised before training starts."""
    pytest.importorskip("wandb")
    tracker = Tracker([WandbWriter(**arguments)], RunInfo(run_dir=tmp_path))
    with pytest.raises(ConfigError, match=message), tracker:
        pass


def runs_of_mlflow(uri: str, experiment: str = "maze_train") -> tuple[Any, list[Any]]:
    """Return a client and all runs of an experiment, newest first."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=uri)
    known = client.get_experiment_by_name(experiment)
    return client, list(client.search_runs([known.experiment_id]))


def test_mlflow_names_remain_distinct() -> None:
    """Names remain distinct and use only characters that MLflow accepts."""
    names = ["train/狼/return", "train/羊/return", "train/é/return", "train/🐺/return"]
    found = [mlflow_name(name) for name in names]
    assert len(set(found)) == len(names)
    assert all(re.fullmatch(r"train/_[0-9a-f]+/return", name) for name in found)
    assert mlflow_name("league/main@3/win_rate") == "league/main_3/win_rate"


def test_mlflow_writes_into_the_run_directory(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """All files are in the run directory; a second run is added to the same experiment."""
    pytest.importorskip("mlflow")
    monkeypatch.chdir(elsewhere := tmp_path_factory.mktemp("elsewhere"))
    write_run(MLflowWriter(), run_dir, "error")
    write_run(MLflowWriter(), run_dir, "total_steps")
    assert list(elsewhere.iterdir()) == []
    client, (run, failed) = runs_of_mlflow(f"sqlite:///{run_dir / 'mlflow.db'}")
    assert (run.info.run_name, run.info.status, failed.info.status) == (
        "PPO on X",
        "FINISHED",
        "FAILED",
    )
    params = run.data.params
    assert (len(params), params["algorithm.lr"], params["algorithm._"]) == (253, "0.1", "[]")
    assert params["algorithm.text"] == "x" * 500
    assert run.data.metrics["summary.final_test.best.epoch"] == 3
    assert run.data.tags["summary.stop_reason"] == "total_steps"
    history = client.get_metric_history(run.info.run_id, "league/main_3/win_rate")
    assert [(point.step, point.value) for point in history] == [(300, 0.5), (600, 0.5)]
    (loss,) = client.get_metric_history(run.info.run_id, "train/loss")
    assert math.isnan(loss.value)
    root = run_dir / "mlartifacts" / run.info.run_id / "artifacts"
    kept = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    assert sorted(kept) == ["best/policy.pt", "film/videos/a.mp4"]


def test_resumed_run_continues_its_mlflow_run(tmp_path: Path) -> None:
    """Each row is logged once, and the parameters are those of the first start."""
    pytest.importorskip("mlflow")
    continued(MLflowWriter(), tmp_path)
    client, (run,) = runs_of_mlflow(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert (run.info.status, run.data.params["k1"]) == ("FINISHED", "1")
    points = client.get_metric_history(run.info.run_id, "epoch")
    assert [(point.step, point.value) for point in points] == [(300, 1), (600, 2), (900, 3)]
    client.delete_run(run.info.run_id)
    continued(MLflowWriter(), tmp_path)
    assert len(runs_of_mlflow(f"sqlite:///{tmp_path / 'mlflow.db'}")[1]) == 1


class FailingWriter(MetricsWriter):
    """Writer of a service that cannot be reached."""

    def start(self, run: RunInfo) -> None:
        raise ConfigError("service", "does not answer")


@pytest.mark.parametrize("group", ["sweep", 'ada\'s "sweep" `100%`'])
def test_mlflow_runs_of_a_sweep_share_a_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    """Runs of a sweep share a parent; MLflow's environment variables apply to other settings.

    Runs that fail to start create no parent.
    """
    pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'own.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "ours")
    for seed in (1, 2):
        (run_dir := tmp_path / str(seed)).mkdir()
        info = RunInfo(run_dir=run_dir, title="PPO on X", name=f"seed={seed}", group=group)
        with Tracker([MLflowWriter()], info) as tracker:
            tracker.write(ROW)
    _, runs = runs_of_mlflow(uri, "ours")
    by_name = {run.info.run_name: run for run in runs}
    assert by_name.keys() == {group, "seed=1", "seed=2"}
    parents = {by_name[name].data.tags["mlflow.parentRunId"] for name in ("seed=1", "seed=2")}
    assert parents == {by_name[group].info.run_id}
    other = replace(info, name="other", group="other group")
    with pytest.raises(ConfigError), Tracker([MLflowWriter(), FailingWriter()], other):
        pass
    _, runs = runs_of_mlflow(uri, "ours")
    assert {run.info.run_name for run in runs} == {*by_name, "other"}


def test_mlflow_credentials_are_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials appear neither in services.json nor in errors; a resumed run finds its id."""

    class RequestError(Exception):
        """Exception of MLflow."""

    client = MagicMock()
    client.create_run.return_value.info.run_id = "r1"
    client.get_run.return_value.info.lifecycle_stage = "active"
    mlflow = SimpleNamespace(
        MlflowException=RequestError, MlflowClient=lambda tracking_uri: client, entities=MagicMock()
    )
    monkeypatch.setattr("maze_train.tracking.services.import_extra", lambda *_: mlflow)
    monkeypatch.setattr("maze_train.tracking.services.check_answers", lambda uri: None)
    uri, info = "https://ada:s3cret@host:5000", RunInfo(run_dir=tmp_path, resumed_at_step=9)
    for _ in range(2):
        MLflowWriter(uri).start(info)
    assert client.create_run.call_count == 1
    assert "s3cret" not in (tmp_path / "services.json").read_text()
    client.get_experiment_by_name.side_effect = RequestError(f"request to {uri}/api failed")
    with pytest.raises(ConfigError, match=r"https://\*{3}@host:5000.*request to h") as caught:
        MLflowWriter(uri).start(info)
    assert "s3cret" not in str(caught.value)


def test_mlflow_uses_the_given_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The given names are used; later failures are reported, and training continues."""
    pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    uri, warnings = f"sqlite:///{tmp_path / 'own.db'}", list[str]()
    write_run(MLflowWriter(uri, "mine", "first"), None, "total_steps")
    client, (run,) = runs_of_mlflow(uri, "mine")
    assert (run.info.run_name, run.data.metrics["epoch"]) == ("first", 2)
    assert client.list_artifacts(run.info.run_id) == []
    with Tracker([MLflowWriter(uri, "mine")], RunInfo(), warn=warnings.append) as tracker:
        (tmp_path / "own.db").unlink()
        for _ in range(2):
            tracker.write(ROW)
    assert tracker.missing == []  # the run directory is complete
    assert len(warnings) == 1
    assert warnings[0].startswith("MLflowWriter is no longer updated; training continues: ")


@pytest.mark.parametrize("link", ["best", "best/policy.pt", "film/videos/a.mp4", "film/videos"])
@pytest.mark.parametrize("service", ["wandb", "mlflow"])
def test_private_files_are_not_uploaded(
    run_dir: Path, tmp_path_factory: pytest.TempPathFactory, service: str, link: str
) -> None:
    """Targets of links are not uploaded, and wandb writes no log through links."""
    pytest.importorskip(service)
    private = tmp_path_factory.mktemp("private")
    for name in ("a.mp4", "policy.pt"):
        (private / name).write_bytes(b"private")
    path = run_dir / link
    path.rename(private / "aside")
    path.symlink_to(private / path.name if path.suffix else private)
    writer = WandbWriter() if service == "wandb" else MLflowWriter()
    write_run(writer, run_dir, "total_steps")
    path.unlink()
    if service == "wandb":
        list(records(run_dir))  # waits for wandb's process
    found = [p for p in run_dir.rglob("*") if p.is_file() and p.read_bytes() == b"private"]
    assert found == []
    check_enclosed(run_dir)


def test_mlflow_ignores_artifact_locations_elsewhere(run_dir: Path, tmp_path_factory: Any) -> None:
    """Artifact locations in a moved or untrusted database are ignored."""
    pytest.importorskip("mlflow")
    write_run(MLflowWriter(), run_dir, "total_steps")
    moved = tmp_path_factory.mktemp("other") / "run"
    shutil.copytree(run_dir, moved)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    write_run(MLflowWriter(), moved, "total_steps")
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
    _, (run,) = runs_of_mlflow(f"sqlite:///{moved / 'mlflow.db'}", "maze_train-2")
    assert (moved / "mlartifacts" / run.info.run_id / "artifacts/best/policy.pt").is_file()


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE runs SET artifact_uri = '{place}'", ""),
        ("UPDATE runs SET artifact_uri = artifact_uri || '/../../../../other'", ""),
        ("UPDATE runs SET artifact_uri = 'https://example.org/x'", ""),
        (
            "CREATE TRIGGER t AFTER INSERT ON metrics BEGIN "
            "UPDATE runs SET artifact_uri = '{place}'; END",
            "has triggers, which MLflow never creates: t",
        ),
    ],
)
def test_an_untrusted_database_does_not_choose_the_place_of_artifacts(
    tmp_path: Path, statement: str, message: str
) -> None:
    """A resumed run starts a new MLflow run if the artifacts are not in its directory."""
    pytest.importorskip("mlflow")
    run, other = tmp_path / "run", tmp_path / "other"
    (run / "best").mkdir(parents=True)
    (run / "best/policy.pt").write_bytes(b"policy")
    other.mkdir()
    continued(MLflowWriter(), run)
    with closing(sqlite3.connect(run / "mlflow.db")) as database, database:
        database.execute(statement.format(place=other.as_uri()))
    if message:
        with pytest.raises(ConfigError, match=message):
            resume(MLflowWriter(), run)
    else:
        resume(MLflowWriter(), run)
        assert len(runs_of_mlflow(f"sqlite:///{run / 'mlflow.db'}")[1]) == 2
    assert list(other.iterdir()) == []


@pytest.mark.parametrize("content", [b"SQLite format 3\0" + bytes(99), b"x" * 999])
def test_a_damaged_database_of_mlflow_is_named(tmp_path: Path, content: bytes) -> None:
    """The error names the file in the run directory."""
    pytest.importorskip("mlflow")
    (tmp_path / "mlflow.db").write_bytes(content)
    with pytest.raises(ConfigError, match=r"mlflow\.db is damaged"):
        resume(MLflowWriter(), tmp_path)


@pytest.mark.parametrize("run_id", ["a\nb", "../a", "a/b", "", "x" * 1000, "\0", 3.5, ["a"], None])
def test_invalid_ids_of_services_are_ignored(tmp_path: Path, run_id: object) -> None:
    """The next start creates a new run in the service."""
    (tmp_path / "services.json").write_text(json.dumps({"wandb:/maze_train": run_id}))
    assert service_ids(tmp_path) == {}


OPENED = """
import sys
from maze_train import MLflowWriter, RunInfo
writer = MLflowWriter(sys.argv[1], "new")
print("ready", flush=True)
sys.stdin.readline()
writer.start(RunInfo(title=sys.argv[2]))
"""


@pytest.mark.exhaustive
def test_processes_share_a_new_mlflow_database(tmp_path: Path) -> None:
    """One process creates the tables and the experiment; the others use them."""
    pytest.importorskip("mlflow")
    uri, pipe = f"sqlite:///{tmp_path / 'new.db'}", subprocess.PIPE
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", OPENED, uri, str(i)], stdin=pipe, stdout=pipe, stderr=pipe
        )
        for i in range(3)
    ]
    for job in jobs:
        assert job.stdout is not None
        assert job.stdout.readline() == b"ready\n"
    for job in jobs:
        assert job.stdin is not None
        job.stdin.write(b"\n")
        job.stdin.flush()
    ends = [job.communicate() for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0, 0], ends
    _, runs = runs_of_mlflow(uri, "new")
    assert sorted(run.info.run_name for run in runs) == ["0", "1", "2"]


@pytest.mark.parametrize("answers", [False, True])
def test_unreachable_mlflow_server_raises(monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    """An unreachable server raises an error within seconds; error responses are left to MLflow."""
    monkeypatch.setattr("maze_train.tracking.services.ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        if not answers:
            for place in (uri, "http://127.0.0.1:9"):
                with pytest.raises(OSError, match=r"the server does not answer .*; start it"):
                    check_answers(place)
            return

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        check_answers(uri.replace("//", "//ada:s3cret@"))
        thread.join()


def test_invalid_mlflow_uri_raises(tmp_path: Path) -> None:
    """The error is raised before training starts and contains MLflow's remedy."""
    pytest.importorskip("mlflow")
    tracker = Tracker([MLflowWriter(f"file://{tmp_path}/runs")], RunInfo(run_dir=tmp_path))
    with (
        pytest.raises(ConfigError, match=r"tracking_uri = .*database backend"),
        tracker,
    ):
        pass


def test_services_store_media_of_callbacks(tmp_path: Path) -> None:
    """Images, histograms, videos and texts are stored with their step."""
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    pixels = np.arange(96, dtype=np.uint8).reshape(2, 4, 4, 3)
    values = np.arange(9.0)
    for name, make in (("w", WandbWriter), ("m", MLflowWriter)):
        folder = tmp_path / name
        folder.mkdir()
        with Tracker([make()], RunInfo(run_dir=folder)) as tracker:
            tracker.log("image", "", lambda w: w.log_image("callback/image", pixels[0], 7))
            tracker.log("histogram", "", lambda w: w.log_histogram("callback/values", values, 7))
            tracker.log("video", "", lambda w: w.log_video("callback/video", pixels, 5.0, 7))
            tracker.log("text", "", lambda w: w.log_text("callback/text", "<b>", 7))
    media = {path.suffix for path in (tmp_path / "w").rglob("media/*/callback/*")}
    assert media == {".png", ".gif", ".html"}
    stored = (tmp_path / "m").rglob("callback/*/step_000000000007.*")
    found = {f"{path.parent.name}{path.suffix}" for path in stored}
    assert found == {"image.png", "values.json", "video.gif", "text.md"}


def test_wandb_copies_stay_below_the_run(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of the policy that wandb uploads is below the run, not in the home directory."""
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_DATA_DIR")
    monkeypatch.setenv("HOME", "/dev/null")  # as in some containers
    warnings = list[str]()
    info = RunInfo(run_dir=run_dir, title="PPO on X", config=CONFIG)
    with Tracker([WandbWriter()], info, warn=warnings.append) as tracker:
        tracker.write(ROW)
        tracker.finish({"stop_reason": "total_steps"})
    assert (warnings, tracker.missing) == ([], [])
    (artifact,) = (r.artifact for r in records(run_dir) if r.HasField("artifact"))
    (entry,) = artifact.manifest.contents
    assert run_dir in Path(entry.local_path).parents
    assert Path(entry.local_path).read_bytes() == b"best/policy.pt"
    assert "WANDB_DATA_DIR" not in os.environ


@pytest.mark.parametrize("service", ["wandb", "mlflow"])
def test_services_keep_time_differences_of_earlier_rows(tmp_path: Path, service: str) -> None:
    """Rows logged again in a new run of the service keep their time differences."""
    pytest.importorskip(service)
    past = tuple({**ROW, "env_steps": 10 * s, "time/total_s": float(s)} for s in (10, 30))
    writer = WandbWriter() if service == "wandb" else MLflowWriter()
    before = time.time()
    with Tracker([writer], RunInfo(run_dir=tmp_path, past_rows=past, resumed_at_step=300)):
        pass
    if service == "wandb":
        rows = [items(r.history.item) for r in records(tmp_path) if r.HasField("history")]
        times = [row["_timestamp"] for row in rows]
    else:
        client, (run,) = runs_of_mlflow(f"sqlite:///{tmp_path / 'mlflow.db'}")
        history = client.get_metric_history(run.info.run_id, "epoch")
        times = [point.timestamp / 1000 for point in history]
    assert times[1] - times[0] == pytest.approx(20.0, abs=1.0)
    assert before - 0.1 <= times[1] <= time.time()


def test_registered_mlflow_model_acts_like_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registered model acts like the policy of the run; its signature matches the spaces."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path / 'own.db'}"
    result = train(
        "CartPole-v1",
        total_steps=64,
        run_dir="run",
        evaluation={"n_episodes": 1},
        **{
            "tracking.progress": "quiet",
            "tracking.writers": [
                {
                    "_target_": "maze_train.MLflowWriter",
                    "tracking_uri": uri,
                    "registered_model": "cartpole",
                }
            ],
            "algorithm.n_rollout_steps": 16,
            "algorithm.batch_size": 16,
            "algorithm.epoch_length": 1,
            "runner.concurrency": 2,
        },
    )
    assert result.missing == ()
    (version,) = mlflow.MlflowClient(uri).search_model_versions("name = 'cartpole'")
    found = mlflow.MlflowClient(uri).get_run(version.run_id)
    assert found.data.metrics["summary.best_metric"] == result.best_metric
    model = mlflow.pyfunc.load_model(f"{found.info.artifact_uri}/model")
    obs = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    assert (model.predict(obs) == load_policy("run").act(obs, deterministic=True)).all()
    (inputs,) = model.metadata.signature.inputs.inputs
    assert (inputs.type, inputs.shape) == (np.dtype(np.float32), (-1, 4))
    with pytest.raises(mlflow.MlflowException, match="type"):
        model.predict(obs.astype(np.int64))


@pytest.mark.parametrize(
    ("obs", "action"), [("counts", "dict"), ("part mask", "choice and number"), ("dict", "boxes")]
)
def test_registered_mlflow_model_supports_nested_spaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obs: str, action: str
) -> None:
    """The model maps arrays by flattened name, with the types of its signature."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    env = {"_target_": "own_envs.SpacesEnv", "kwargs": {"obs": obs, "action": action}}
    best = train(env, "a2c", run_dir="run", **{"runner.fast_dev_run": True}).run_dir / "best"
    policy, n = load_policy(best), 6
    places = FlatView(policy.observation_space), FlatView(policy.action_space)
    samples = [policy.observation_space.sample() for _ in range(n)]
    flat = [dict(places[0].read(sample)) for sample in samples]
    inputs = {key: np.stack([one[key] for one in flat]) for key in flat[0]}
    for key in filter(is_mask_key, inputs):
        inputs[key][:] = 1
    save_model(best.absolute(), tmp_path)
    model = mlflow.pyfunc.load_model(str(tmp_path / MODEL))
    expected = flatten_value(places[1], policy.act(places[0].build(inputs)))
    np.testing.assert_equal(model.predict(inputs), expected)
    for schema, values in (("inputs", inputs), ("outputs", expected)):
        specs = getattr(model.metadata.signature, schema).inputs
        given = values if isinstance(values, dict) else {None: values}
        found = {name: (value.dtype, value.shape[1:]) for name, value in given.items()}
        assert {spec.name: (spec.type, spec.shape[1:]) for spec in specs} == found


def test_failed_run_registers_no_mlflow_model(run_dir: Path) -> None:
    """The best policy of a failed run is an artifact, but not a version of the registered model."""
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{run_dir / 'own.db'}"
    for reason in ("error", "interrupted"):
        write_run(MLflowWriter(uri, registered_model="mine"), run_dir, reason)
    assert mlflow.MlflowClient(uri).search_registered_models() == []
