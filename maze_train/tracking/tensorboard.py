"""Writer of TensorBoard event files."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

from maze_train.core.files import open_own
from maze_train.core.folders import check_guarded, make_folders
from maze_train.core.plain_yaml import dump_yaml
from maze_train.core.run_directory import FAILURES, final_test_value
from maze_train.core.text import flattened
from maze_train.core.types import Array
from maze_train.tracking.media import animation
from maze_train.tracking.tracker import ENV_STEPS, MetricsWriter, RunInfo, plain_json

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from tensorboard.summary.writer.record_writer import RecordWriter
    from torch.utils.tensorboard import SummaryWriter

OF_NUMBERS = ("env", "model", "algorithm", "runner", "seed", "total_steps")
"""Sections of settings that are logged as TensorBoard hyperparameters."""


SESSION_FILE = "events.out.tfevents.0000000000.hparams"
"""Event file of the hyperparameters. TensorBoard uses the first hyperparameters of a run, so a
resumed run replaces the file. The name sorts before the file of metrics, because TensorBoard may
only read new data from the last file of a directory."""


class TensorBoardWriter(MetricsWriter):
    """Writes TensorBoard event files, with environment steps on the x axis.

    The configuration is logged as text, and its values as hyperparameters with the status and the
    results of the run.
    """

    def __init__(self) -> None:
        self._run = RunInfo()
        self._writer: SummaryWriter | None = None
        self._session: RecordWriter | None = None
        self._last: dict[str, float] = {}
        """Last value of each metric."""

    def start(self, run: RunInfo) -> None:
        """Import TensorBoard."""
        self._run, self._last = run, {}
        for row in run.past_rows:
            self._last.update(row)
        if run.run_dir is not None:
            import torch.utils.tensorboard  # noqa: F401  # The import may use random generators.

    def _opened(self) -> SummaryWriter | None:
        """Return the open event file; None if the run has no directory.

        Points after the checkpoint of a resumed run are discarded.
        """
        run = self._run
        if self._writer is None and run.run_dir is not None:
            from torch.utils.tensorboard import SummaryWriter

            purge_step = None if run.resumed_at_step is None else run.resumed_at_step + 1
            make_folders(run.run_dir / run.name)  # TensorBoard itself follows links.
            self._writer = SummaryWriter(str(run.run_dir / run.name), purge_step=purge_step)
            settings = dump_yaml(plain_json(run.config))
            self._writer.add_text("config", indent(settings, "    "))  # Indented: code in Markdown.
            self._open_session(run.run_dir / run.name / SESSION_FILE)
        return self._writer

    def _open_session(self, path: Path) -> None:
        """Write the settings that affect results as hyperparameters."""
        from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
        from tensorboard.plugins.hparams.plugin_data_pb2 import SessionStartInfo
        from tensorboard.summary.writer.record_writer import RecordWriter

        path.unlink(missing_ok=True)
        self._session = RecordWriter(os.fdopen(open_own(path, os.O_WRONLY), "wb"))
        start, config = SessionStartInfo(start_time_secs=time.time()), self._run.config
        settings = flattened({key: config[key] for key in OF_NUMBERS if key in config})
        for key, value in settings.items():
            if isinstance(value, bool):
                start.hparams[key].bool_value = value
            elif isinstance(value, int | float):
                start.hparams[key].number_value = value
            elif value is not None:  # "None" would change a column of numbers to text.
                start.hparams[key].string_value = str(value)
        self._add_to_session(SESSION_START_INFO_TAG, session_start_info=start)

    def _add_to_session(self, tag: str, **content: Message) -> None:
        """Write a summary for TensorBoard's hyperparameter plug-in."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams.metadata import NULL_TENSOR, create_summary_metadata
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

        assert self._session is not None
        metadata = create_summary_metadata(HParamsPluginData(**content))
        value = Summary.Value(tag=tag, metadata=metadata, tensor=NULL_TENSOR)
        event = Event(wall_time=time.time(), summary=Summary(value=[value]))
        self._session.write(event.SerializeToString())
        self._session.flush()

    def write(self, row: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        writer = self._opened()
        if writer is None:
            return
        check_guarded(Path(writer.log_dir))
        step = int(row[ENV_STEPS])
        for name, value in row.items():
            if name != ENV_STEPS:
                writer.add_scalar(name, value, step)
        self._last.update(row)
        writer.flush()  # Without flush, errors would occur in the thread of the writer.

    def log_image(self, name: str, image: Array, env_steps: int) -> bool:
        """Add an image."""
        writer = self._opened()
        if writer is not None:
            writer.add_image(name, image, env_steps, dataformats="HWC")
        return writer is not None

    def log_histogram(self, name: str, values: Array, env_steps: int) -> bool:
        """Add a histogram."""
        writer = self._opened()
        if writer is not None:
            writer.add_histogram(name, values, env_steps)
        return writer is not None

    def log_video(self, name: str, frames: Array, fps: float, env_steps: int) -> bool:
        """Add a video as an animated image."""
        writer = self._opened()
        if writer is not None:
            from tensorboard.compat.proto.summary_pb2 import Summary

            (height, width, channels), data = frames.shape[1:], animation(frames, fps)
            image = Summary.Image(
                height=height, width=width, colorspace=channels, encoded_image_string=data
            )
            summary = Summary(value=[Summary.Value(tag=name, image=image)])
            writer.file_writer.add_summary(summary, env_steps)  # type: ignore[attr-defined]
        return writer is not None

    def log_text(self, name: str, text: str, env_steps: int) -> bool:
        """Add a text."""
        writer = self._opened()
        if writer is not None:
            writer.add_text(name, text, env_steps)
        return writer is not None

    def sync(self) -> None:
        """Flush all points to the event file."""
        if self._writer is not None:
            self._writer.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Add the status, and the best, last and test value of the selection metric."""
        if self._writer is None:
            return
        from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS
        from tensorboard.plugins.hparams.metadata import SESSION_END_INFO_TAG
        from tensorboard.plugins.hparams.plugin_data_pb2 import SessionEndInfo

        # A callback may have opened the file before the first row.
        metric, steps = self._run.metric, int(self._last.get(ENV_STEPS, 0))
        results = {
            "best": summary.get("best_metric"),
            "last": self._last.get(metric),
            "tested": final_test_value(summary, metric),
        }
        for name, value in results.items():
            if value is not None:
                self._writer.add_scalar(f"summary/{name}", value, steps)
        self._writer.flush()
        status = STATUS_FAILURE if summary.get("stop_reason") in FAILURES else STATUS_SUCCESS
        end = SessionEndInfo(status=status, end_time_secs=time.time())
        self._add_to_session(SESSION_END_INFO_TAG, session_end_info=end)

    def close(self) -> None:
        """Write the remaining points and stop the writer thread."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
        if self._writer is not None:
            writer, self._writer = self._writer, None
            self._run = RunInfo()
            writer.close()
