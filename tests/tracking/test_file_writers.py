"""Writers of plain files, tested by reading the files."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maze_train import (
    CSVWriter,
    JSONSummaryWriter,
    MetricsWriter,
    RunInfo,
    TensorBoardWriter,
    read_rows,
)
from maze_train.tracking.console import ConsoleWriter
from maze_train.tracking.curves import LearningCurveWriter
from maze_train.training.outcome import TrainingSummary

ROWS: list[dict[str, float]] = [
    {"epoch": 1, "updates": 10, "env_steps": 1000, "time/epoch_s": 0.1, "train/loss": 1 / 3},
    {"epoch": 2, "updates": 20, "env_steps": 2000, "time/epoch_s": 0.2, "train/loss": 1e-17},
]


def write_all(writer: MetricsWriter, run: RunInfo, rows: list[dict[str, float]]) -> None:
    """Call all methods of a writer."""
    writer.start(run)
    for row in rows:
        writer.write(row)
    writer.finish({})
    writer.close()


def test_csv_round_trips_floats_exactly(tmp_path: Path) -> None:
    """Random floats of every size, numpy scalars and infinities are read back bit for bit."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=50) * 10.0 ** rng.integers(-200, 200, size=50)
    rows: list[dict[str, float]] = [
        {"epoch": i + 1, "env_steps": np.int64(10 * i), "train/x": x, "eval/y": math.inf}
        for i, x in enumerate(values)
    ]
    write_all(CSVWriter(), RunInfo(run_dir=tmp_path), rows)
    assert read_rows(tmp_path / "metrics.csv") == rows
    assert all(type(r["env_steps"]) is int for r in read_rows(tmp_path / "metrics.csv"))


def test_csv_adds_columns_of_new_metrics(tmp_path: Path) -> None:
    """A metric that appears later gets a column in its group, with empty cells in old rows."""
    late = {"epoch": 3, "updates": 30, "env_steps": 3000, "eval/r": 7.0, "train/new": math.nan}
    again = {"epoch": 4, "updates": 40, "env_steps": 4000, "train/loss": 2.0}
    write_all(CSVWriter(), RunInfo(run_dir=tmp_path), [*ROWS, late, again])
    assert (tmp_path / "metrics.csv").read_text() == (
        "epoch,updates,env_steps,train/loss,train/new,eval/r,time/epoch_s\n"
        "1,10,1000,0.3333333333333333,,,0.1\n"
        "2,20,2000,1e-17,,,0.2\n"
        "3,30,3000,,NaN,7.0,\n"
        "4,40,4000,2.0,,,\n"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.csv"]


def test_csv_replaces_rows_after_the_checkpoint(tmp_path: Path) -> None:
    """Rows after the checkpoint are replaced; rows of an unrelated run are kept in another file."""
    run, more = RunInfo(run_dir=tmp_path), {**ROWS[0], "epoch": 3}
    write_all(CSVWriter(), run, [*ROWS, more])
    whole = (tmp_path / "metrics.csv").read_text()
    past = tuple(read_rows(tmp_path / "metrics.csv", last_epoch=1))
    write_all(CSVWriter(), RunInfo(run_dir=tmp_path, past_rows=past), [ROWS[1], more])
    assert (tmp_path / "metrics.csv").read_text() == whole
    write_all(CSVWriter(), RunInfo(run_dir=tmp_path, resumed_at_step=0), ROWS)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]
    write_all(CSVWriter(), run, ROWS[:1])
    assert read_rows(tmp_path / "metrics.csv") == ROWS[:1]
    assert read_rows(tmp_path / "metrics.previous.csv") == ROWS


def test_csv_writes_rows_immediately(tmp_path: Path) -> None:
    """Rows are written immediately, so the file is complete without `close`."""
    writer = CSVWriter()
    writer.start(RunInfo(run_dir=tmp_path))
    for count in (1, 2):
        writer.write(ROWS[count - 1])
        assert read_rows(tmp_path / "metrics.csv") == ROWS[:count]
    writer.close()


def test_tensorboard_has_no_duplicate_points_after_resume(tmp_path: Path) -> None:
    """Points after the checkpoint do not appear twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_all(TensorBoardWriter(), RunInfo(run_dir=tmp_path), ROWS)
    first = max(tmp_path.glob("events.*"))
    first.rename(first.with_name("events.out.tfevents.0000000001.first"))
    again = {**ROWS[1], "train/loss": 5.0}
    write_all(TensorBoardWriter(), RunInfo(run_dir=tmp_path, resumed_at_step=1000), [again])
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"epoch", "updates", "train/loss", "time/epoch_s"}
    points = [(e.step, e.value) for e in events.Scalars("train/loss")]
    assert points == [(1000, pytest.approx(1 / 3)), (2000, 5.0)]


def test_tensorboard_writes_below_the_run_name(tmp_path: Path) -> None:
    """TensorBoard displays the end of the path as the name of a run."""
    name = "algorithm.lr=0.001,seed=2"
    write_all(TensorBoardWriter(), RunInfo(run_dir=tmp_path / "0", name=name), ROWS)
    assert {file.parent for file in tmp_path.rglob("events.*")} == {tmp_path / "0" / name}


def test_json_summary_has_no_nan(tmp_path: Path) -> None:
    """NaN and infinities become null; numpy values, paths and nested values are converted."""
    values: list[tuple[Any, Any]] = [
        (math.nan, None),
        (np.float32(math.inf), None),
        (np.array([1.0, math.nan]), [1.0, None]),
        (np.int64(3), 3),
        (True, True),
        ({"path": Path("a"), "list": [1, (2.5, "x")]}, {"path": "a", "list": [1, [2.5, "x"]]}),
    ]
    writer = JSONSummaryWriter()
    writer.start(RunInfo(run_dir=tmp_path))
    writer.finish({str(i): value for i, (value, _) in enumerate(values)})
    found = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert found == {str(i): expected for i, (_, expected) in enumerate(values)}


@pytest.mark.parametrize("kind", [CSVWriter, TensorBoardWriter, JSONSummaryWriter, MetricsWriter])
def test_writers_without_directory_write_nothing(
    kind: type[MetricsWriter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a directory nothing is written; `close` may be called twice and before `start`."""
    monkeypatch.chdir(tmp_path)
    writer = kind()
    writer.close()
    write_all(writer, RunInfo(), ROWS)
    assert os.listdir(tmp_path) == []
    write_all(writer, RunInfo(run_dir=tmp_path / "run"), ROWS)
    writer.close()
    assert (tmp_path / "run").exists() == (kind is not MetricsWriter)


FINISHING = [CSVWriter, TensorBoardWriter, JSONSummaryWriter, LearningCurveWriter, ConsoleWriter]


@pytest.mark.parametrize("reason", ["error", "total_steps"])
@pytest.mark.parametrize("kind", FINISHING)
def test_writers_finish_without_a_row(
    kind: type[MetricsWriter], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Writers finish without a row, even if a callback has logged text."""
    summary = TrainingSummary(reason, 0, 1, 64, 1.0, 64.0, math.nan, 0, math.nan)
    test = {"episodes": 1.0, "episode_return_mean": 2.0, "episode_return_std": 0.0, "epoch": 0.0}
    writer = kind()
    writer.start(RunInfo(run_dir=tmp_path))
    writer.log_text("note", "before the first row", 0)
    writer.sync()
    writer.finish(replace(summary, final_test={"best": test}).as_dict())
    writer.close()
    files = {path.name.partition(".")[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {JSONSummaryWriter: {"summary"}, TensorBoardWriter: {"events"}}.get(kind, set())
    is_shown = kind is ConsoleWriter and reason == "total_steps"
    assert bool(capsys.readouterr().out) == is_shown


def test_sync_flushes_rows_or_raises(tmp_path: Path) -> None:
    """`sync` writes TensorBoard's points, and raises an error if the file was deleted."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer, board = CSVWriter(), TensorBoardWriter()
    for one in (writer, board):
        one.sync()
        one.start(RunInfo(run_dir=tmp_path))
        one.write(ROWS[0])
        one.sync()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert len(events.Scalars("train/loss")) == 1
    (tmp_path / "metrics.csv").unlink()
    with pytest.raises(FileNotFoundError):
        writer.sync()
    for one in (writer, board):
        one.close()


def test_tensorboard_stores_settings_as_text(tmp_path: Path) -> None:
    """The settings are stored as text."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoardWriter()
    writer.start(RunInfo(run_dir=tmp_path, config={"seed": 1, "algorithm": {"lr": 0.5, "a": [1]}}))
    writer.write(ROWS[0])
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (text,) = events.Tensors("config/text_summary")
    assert b"    algorithm:\n      lr: 0.5" in text.tensor_proto.string_val[0]


def board_run(
    folder: Path, config: dict[str, Any], reason: str, resumed_at_step: int | None = None
) -> None:
    """Write a run of two epochs with an evaluation in the second one."""
    writer, metric = TensorBoardWriter(), "eval/episode_return_mean"
    past = tuple(ROWS[: resumed_at_step is not None])
    writer.start(
        RunInfo(run_dir=folder, config=config, past_rows=past, resumed_at_step=resumed_at_step)
    )
    for row in (ROWS[0], {**ROWS[1], metric: 5.0})[len(past) :]:
        writer.write(row)
    tests = {"best": {"episode_return_mean": 7.0, "epoch": 2}} if reason == "total_steps" else {}
    writer.finish({"stop_reason": reason, "best_metric": 9.0, "final_test": tests})
    writer.close()


def hparams_of(logdir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return columns and runs of the HParams tab, by name, from TensorBoard's plug-in."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.hparams import (
        api_pb2,
        backend_context,
        get_experiment,
        list_session_groups,
    )

    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(logdir))
    multiplexer.Reload()
    board = TBContext(data_provider=MultiplexerDataProvider(multiplexer, str(logdir)))
    places = RequestContext(), backend_context.Context(board), ""
    asked = api_pb2.GetExperimentRequest()
    experiment = get_experiment.Handler(*places, asked).run()
    listed = api_pb2.ListSessionGroupsRequest(
        allowed_statuses=api_pb2.Status.values(), start_index=0, slice_size=99
    )
    groups = list_session_groups.Handler(*places, listed).run().session_groups
    sessions = {group.sessions[0].name: group for group in groups}
    return {info.name: info for info in experiment.hparam_infos}, sessions


def test_tensorboard_hparams_show_settings_status_and_results(tmp_path: Path) -> None:
    """The table has the settings of all runs, their status, and best, last and test results."""
    from tensorboard.plugins.hparams.api_pb2 import Status

    ppo = {"seed": 1, "total_steps": None, "algorithm": {"lr": 0.5, "clip_range": 0.2, "a": [1]}}
    sac = {"seed": 2, "total_steps": 90, "algorithm": {"lr": "linear_0.001", "tau": True}}
    board_run(tmp_path / "ppo", ppo, "total_steps")
    board_run(tmp_path / "sac", sac, "error")
    for logdir in (tmp_path, tmp_path / "sac"):  # both ways to start TensorBoard
        columns, runs = hparams_of(logdir)
        assert "algorithm.tau" in columns
    columns, runs = hparams_of(tmp_path)
    own = {f"algorithm.{key}" for key in ("lr", "clip_range", "a", "tau")}
    assert columns.keys() == {"seed", "total_steps", *own}
    assert {name for name, info in columns.items() if info.differs} == {"seed", "algorithm.lr"}
    assert set(columns["algorithm.lr"].domain_discrete) == {"0.5", "linear_0.001"}
    assert columns["total_steps"].domain_interval.max_value == 90
    status = {name: Status.Name(group.sessions[0].status) for name, group in runs.items()}
    assert status == {"ppo": "STATUS_SUCCESS", "sac": "STATUS_FAILURE"}
    results = {value.name.tag: value.value for value in runs["ppo"].sessions[0].metric_values}
    expected = {"summary/best": 9.0, "summary/last": 5.0, "summary/tested": 7.0}
    assert {key: results[key] for key in expected} == expected


def test_tensorboard_hparams_of_a_resumed_run_are_updated(tmp_path: Path) -> None:
    """The table shows the new settings and status."""
    from tensorboard.plugins.hparams.api_pb2 import Status

    board_run(tmp_path, {"total_steps": 2000}, "interrupted")
    board_run(tmp_path, {"total_steps": 5000}, "total_steps", resumed_at_step=1000)
    _, runs = hparams_of(tmp_path)
    (group,) = runs.values()
    assert group.hparams["total_steps"].number_value == 5000
    assert Status.Name(group.sessions[0].status) == "STATUS_SUCCESS"
