"""The tracker, its settings, and the construction of writers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock, call

import numpy as np
import pytest

from maze_train import (
    ConsoleWriter,
    CSVWriter,
    JSONSummaryWriter,
    LearningCurveWriter,
    MetricsWriter,
    RunInfo,
    TensorBoardWriter,
    Tracker,
    TrackingConfig,
    build_writers,
    read_rows,
)
from maze_train.core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

ROW = {"epoch": 1, "updates": 2, "env_steps": 300, "train/loss": 0.5}


def recorder(fail_at: str = "", error: Exception | None = None) -> Any:
    """Return a writer that records its calls, and fails in one of them if requested."""
    writer = MagicMock(spec=MetricsWriter, recovers=False, is_kept=True, filename="")
    if fail_at:
        failure = error or OSError(28, "No space left on device")
        getattr(writer, fail_at).side_effect = failure
    return writer


def told(writer: Any) -> list[str]:
    """Return the names of the calls."""
    return [name for name, _, _ in writer.method_calls]


def test_tracker_forwards_calls_to_all_writers() -> None:
    """Writers receive all calls in order, and the tracker keeps the rows."""
    writers = [recorder(), recorder()]
    run = RunInfo(title="x", past_rows=({**ROW, "epoch": 0},))
    with Tracker(writers, run) as tracker:
        tracker.advance(0.5, 150)
        tracker.write(ROW)
        tracker.finish({"a": 1})
    calls = [call.start(run), call.advance(0.5, 150), call.write(ROW), call.finish({"a": 1})]
    assert all(writer.method_calls == [*calls, call.close()] for writer in writers)
    assert tracker.history == [*run.past_rows, ROW]
    assert tracker.history[0] is not run.past_rows[0]


@pytest.mark.parametrize("name", ["start", "advance", "write", "finish"])
def test_failing_writer_is_dropped_with_one_warning(name: str) -> None:
    """A failing writer is closed with one warning; the others continue."""
    warnings: list[str] = []
    broken, sound = recorder(name), recorder()
    with Tracker([broken, sound], RunInfo(), warn=warnings.append) as tracker:
        for _ in range(2):
            tracker.advance(0.5, 1)
            tracker.write(ROW)
        tracker.finish({})
    assert told(broken)[-2:] == [name, "close"]
    assert told(broken).count(name) == 1
    assert len(told(sound)) == 7
    assert len(warnings) == 1
    assert "MagicMock" in warnings[0]
    assert "No space left" in warnings[0]


def test_unwritable_plot_does_not_end_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the plot cannot be written, the metrics still are; one line is printed to stderr."""
    (tmp_path / "plots").write_text("in the way")
    with Tracker([LearningCurveWriter(), CSVWriter()], RunInfo(run_dir=tmp_path)) as tracker:
        tracker.write(ROW)
        tracker.finish({})
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert read_rows(tmp_path / "metrics.csv") == [ROW]


@pytest.mark.parametrize("name", ["start", "write", "close"])
def test_other_writer_errors_propagate_after_closing_all(name: str) -> None:
    """Other exceptions propagate; all writers are closed once."""
    broken, sound = recorder(name, ValueError("bug")), recorder()
    tracker = Tracker([broken, sound], RunInfo())
    with pytest.raises(ValueError, match="bug"), tracker:
        tracker.write(ROW)
    assert told(broken)[-1] == told(sound)[-1] == "close"
    tracker.close()
    assert told(sound).count("close") == 1


def test_tracking_settings_select_the_writers() -> None:
    """Each switch and each named class adds one writer; the console comes last."""
    assert TrackingConfig().progress == "auto"
    files = [CSVWriter, TensorBoardWriter, JSONSummaryWriter, LearningCurveWriter]
    assert [type(writer) for writer in build_writers(TrackingConfig())] == [*files, ConsoleWriter]
    node = {"_target_": "maze_train.CSVWriter", "filename": "more.csv"}
    bare = TrackingConfig(csv=False, tensorboard=False, summary=False, plot=False, writers=[node])
    built = build_writers(bare)
    assert sorted(type(writer).__name__ for writer in built) == ["CSVWriter", "ConsoleWriter"]
    assert "more.csv" in [getattr(writer, "filename", "") for writer in built]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"progress": "line"}, "lines"),
        ({"writers": [{"project": "x"}]}, r"writers\[0\]"),
        ({"writers": [{"_target_": "pathlib.Path"}]}, r"writers\[0\].*MetricsWriter"),
        ({"writers": [{"_target_": "maze_train.CVSWriter"}]}, "CSVWriter"),
        ({"writers": [{"_target_": "maze_train.CSVWriter", "x": 1}]}, r"writers\[0\]"),
    ],
)
def test_invalid_writers_raise(settings: dict[str, Any], message: str) -> None:
    """Errors name the setting and the remedy."""
    with pytest.raises(ConfigError, match=message):
        build_writers(TrackingConfig(**settings))


def test_writer_error_is_cleared_by_written_rows_only(tmp_path: Path) -> None:
    """Calls that write no rows do not clear the writer's error."""
    writer, warnings = CSVWriter(), list[str]()
    with Tracker([writer], RunInfo(run_dir=tmp_path), warn=warnings.append) as tracker:
        tracker.write({"epoch": 0, "env_steps": 1})
        (tmp_path / "metrics.csv").unlink()
        (tmp_path / "metrics.csv").mkdir()  # blocks the file
        for use in (
            lambda: tracker.write(ROW),
            lambda: tracker.log("image", "x", lambda w: w.log_image("x", np.zeros((2, 2, 3)), 1)),
            lambda: tracker.log("text", "x", lambda w: w.log_text("x", "", 1)),
            lambda: tracker.advance(0.5, 1),
        ):
            use()
            assert tracker.missing == ["metrics.csv"]
        (tmp_path / "metrics.csv").rmdir()
        tracker.sync()
        assert tracker.missing == []
    assert read_rows(tmp_path / "metrics.csv")[1:] == [ROW]
    assert warnings[0].startswith("CSVWriter could not write and will retry: ")
