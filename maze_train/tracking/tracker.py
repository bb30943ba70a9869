"""Metrics of a run and the interface of their writers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from maze_train.core.notices import warn
from maze_train.core.run_directory import EPOCH, MetricsRow

UPDATES = "updates"
ENV_STEPS = "env_steps"
TRAIN_RETURN = "train/episode_return_mean"
EVAL_RETURN = "eval/episode_return_mean"
STAGE = "curriculum/stage"
TRAIN_LENGTH = "train/episode_length_mean"
VALIDATION_LOSS = "validation/loss"
TOTAL_S = "time/total_s"
EVAL_RETURN_STD = "eval/episode_return_std"


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Description of a run for writers."""

    run_dir: Path | None = None
    """Directory of the run; None if nothing is written to disk."""

    title: str = ""
    """Display name, such as `PPO on CartPole-v1`."""

    name: str = ""
    """Subfolder for TensorBoard files in the run directory; empty for no subfolder."""

    group: str = ""
    """Name that related runs share, such as the jobs of a sweep; empty for none."""

    config: dict[str, Any] = field(default_factory=dict)
    """Resolved configuration as plain values."""

    total_env_steps: int | None = None
    """Environment steps after which training ends; None: not limited."""

    n_epochs: int | None = None
    """Epochs after which training ends; None: not limited."""

    max_wall_time_s: float | None = None
    """Seconds after which training ends; None: not limited."""

    step_label: str = "environment steps"
    """Display name of the unit of `env_steps`."""

    metric: str = EVAL_RETURN
    """Metric that selects the best policy."""

    mode: Literal["max", "min"] = "max"
    """Whether larger (max) or smaller (min) values of the metric are better."""

    past_rows: tuple[MetricsRow, ...] = ()
    """Rows of the epochs before the checkpoint from which this run resumed (see `read_rows`)."""

    resumed_at_step: int | None = None
    """Environment steps at that checkpoint; None for a new run."""

    @property
    def opponent(self) -> str:
        """Opponent whose results select the best policy; empty if other metrics do."""
        return self.metric.split("/")[1][3:] if self.metric.startswith("eval/vs_") else ""

    def is_better(self, score: float, best: float) -> bool:
        """Return whether a score is better than the best one so far."""
        return score > best if self.mode == "max" else score < best


class MetricsWriter:
    """Base class of metric writers. Subclasses override the methods they need.

    The order of calls is `start`, any number of `write`, `advance` and `sync`, `finish` if training
    finished, and `close` in any case. Writers must not use global state, so that several runs can
    share a process. If a method raises OSError, the tracker drops the writer (unless `recovers` is
    set) and training continues.
    """

    recovers: ClassVar[bool] = False
    """Whether the writer keeps rows that it failed to write and retries at the next call."""

    is_kept: ClassVar[bool] = True
    """Whether the files are results of the run, so that it is an error if they are missing."""

    filename: str = ""
    """Path relative to the run directory, for messages; empty for several files or none."""

    def start(self, run: RunInfo) -> None:
        """Prepare to write the rows of a run."""

    def write(self, row: Mapping[str, float]) -> None:
        """Write the row of a finished epoch; a writer may keep but not change it."""

    def advance(self, progress_fraction: float, env_steps: int) -> None:
        """Show progress within an epoch.

        Args:
            progress_fraction: Fraction of the running epoch that is done, in [0, 1].
            env_steps: Environment steps since the start of training.
        """

    def sync(self) -> None:
        """Flush all rows to disk; called before a checkpoint is written."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the outcome of the run: plain values by name."""

    def close(self) -> None:
        """Release files, threads and the terminal; may be called more than once."""


class Tracker:
    """Forwards metrics to all writers and keeps the rows in memory.

    If a writer raises OSError, such as on a full disk, a warning is printed and the writer is
    dropped (unless it `recovers`), so that training continues. Any other exception propagates. The
    tracker is a context manager that calls `start` and `close`.

    Args:
        writers: The writers.
        run_info: Description of the run for the writers.
        warn: Called with the warning about a dropped writer; prints it to stderr by default.
    """

    def __init__(
        self,
        writers: Sequence[MetricsWriter],
        run_info: RunInfo,
        warn: Callable[[str], None] = warn,
    ) -> None:
        self.run_info = run_info
        self.history: list[MetricsRow] = [dict(row) for row in run_info.past_rows]
        self._writers = list(writers)
        self._failing: set[MetricsWriter] = set()
        self._dropped: list[MetricsWriter] = []
        self._warn = warn

    @property
    def missing(self) -> list[str]:
        """Names of incomplete files or writers, except the console."""
        writers = [*self._dropped, *self._failing]
        return [
            str(writer.filename or type(writer).__name__) for writer in writers if writer.is_kept
        ]

    def start(self) -> None:
        """Open the writers."""
        self._forward("start", self.run_info)

    def write(self, row: Mapping[str, float]) -> None:
        """Store a copy of the row of a finished epoch and forward it to all writers."""
        kept = dict(row)
        self.history.append(kept)
        self._forward("write", kept)

    def advance(self, progress_fraction: float, env_steps: int) -> None:
        """Show progress within an epoch.

        Args:
            progress_fraction: Fraction of the running epoch that is done, in [0, 1].
            env_steps: Environment steps since the start of training.
        """
        self._forward("advance", progress_fraction, env_steps)

    def sync(self) -> None:
        """Flush all rows to disk."""
        self._forward("sync")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Forward the outcome of the run as plain values by name.

        The console shows `stop_reason`, `epochs`, `env_steps`, `wall_time_s`, `steps_per_second`
        and `final_test`; it takes the best and the last return from the rows.
        """
        self._forward("finish", summary)

    def close(self) -> None:
        """Close all writers, even if one of them fails; may be called more than once."""
        writers, self._writers = self._writers, []
        failure: Exception | None = None
        for writer in writers:
            try:
                writer.close()
            except OSError as error:
                self._report(writer, error)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def __enter__(self) -> Tracker:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _forward(self, call: str, *args: Any) -> None:
        for writer in tuple(self._writers):
            try:
                getattr(writer, call)(*args)
                if call != "advance":
                    self._failing.discard(writer)
            except OSError as error:
                if not writer.recovers:
                    self._drop(writer, error)
                elif writer not in self._failing:
                    self._failing.add(writer)
                    name = type(writer).__name__
                    self._warn(f"{name} could not write, and will try again: {error}")

    def _drop(self, writer: MetricsWriter, error: OSError) -> None:
        self._writers.remove(writer)
        # It has failed to write before, so it may fail to close.
        with contextlib.suppress(OSError):
            writer.close()
        self._report(writer, error)

    def _report(self, writer: MetricsWriter, error: OSError) -> None:
        self._dropped.append(writer)
        name = type(writer).__name__
        self._warn(f"{name} is no longer written; training continues: {error}")


def ordered_columns(names: Iterable[str]) -> list[str]:
    """Return names in column order: epoch, updates, env_steps, train, eval, others, time.

    Within a group the order of `names` is kept.
    """

    def rank(name: str) -> int:
        if name in (EPOCH, UPDATES, ENV_STEPS):
            return (EPOCH, UPDATES, ENV_STEPS).index(name)
        group = name.split("/", 1)[0]
        return {"train": 3, "eval": 4, "time": 6}.get(group, 5)

    return sorted(dict.fromkeys(names), key=rank)
