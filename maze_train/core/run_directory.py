"""Files of a run directory.

config.yaml settings, signed by the user who started the run
metrics.csv              one row of metrics per epoch
summary.json             result of the run
environment.json         command, code, packages and machine of each start
run.log console output of the run
services.json            ids of the run in Weights & Biases and MLflow
files.json               digests of the files named in the settings
checkpoints/             see `training/checkpoints.py`
best/ best policy, version `best`
policies/epoch_<n>/      regular dumps of the policy, versions `epoch_<n>` or `step_<n>`
plots/, profile/         plots and profiler traces
rollouts/, before/       results of rollouts, and of an earlier run that was restarted
"""

from __future__ import annotations

import csv
import itertools
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, TypeAlias

from maze_train.core.errors import ConfigError, RunDirectoryError
from maze_train.core.files import (
    exclusive,
    new_directory,
    read_json,
    read_regular,
    remove_content,
    remove_leftovers,
    results_directory,
)
from maze_train.core.names import (
    BEFORE,
    BEST,
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    LOG,
    METRICS,
    PLOTS,
    POLICIES,
    PROFILE,
    RESULTS,
    ROLLOUTS,
    SUMMARY,
)
from maze_train.core.notices import warn

MetricsRow: TypeAlias = dict[str, float]
"""`epoch`, `updates`, `env_steps` (totals since the start of training), then `train/...`,
`eval/...` and `time/...`. Metrics without a value in an epoch are omitted."""

EPOCH = "epoch"

FAILURES = ("error", "interrupted")
"""Stop reasons of runs that did not finish."""

WHOLE = "the directory itself"
"""Name of the run directory in messages if the directory was moved or removed."""

MAX_NBYTES = 1 << 30
"""Maximum size of a metrics file in bytes."""


@dataclass(frozen=True)
class RunDirectory:
    """Directory of a run. The directory does not have to exist.

    Attributes:
        path: Path of the directory.
    """

    path: Path

    @classmethod
    def to_resume(cls, resume: str) -> RunDirectory:
        """Return the run selected by `resume`, which may be a run or a checkpoint."""
        path = Path(resume)
        return cls(path if checkpoint_name(path) is None else path.parent.parent)

    @classmethod
    def of_policy(cls, path: Path) -> RunDirectory:
        """Return the run of a saved policy or a checkpoint, derived from the path."""
        if path.name == BEST:
            return cls(path.parent)
        is_below = path.parent.name == POLICIES or checkpoint_name(path) is not None
        return cls(path.parent.parent if is_below else path)

    @classmethod
    @contextmanager
    def new(cls, name: str | None, default_parent: Path) -> Iterator[RunDirectory]:
        """Create and lock the directory of a new run, see `results_directory`.

        If the settings were not written, the new files are removed at the end.

        Raises:
            ConfigError: If the directory cannot be created, or contains a different run.
            RunDirectoryError: See `lock`.
        """
        with results_directory("run_dir", name, default_parent) as path:
            run, was_empty = cls(path), not os.listdir(path)
            with run.lock():
                run.check_is_free()  # Another process may have created the directory.
                try:
                    yield run
                finally:
                    if was_empty and path.is_dir() and not run.is_run:
                        remove_content(path)

    @property
    def config(self) -> Path:
        """File with the settings."""
        return self.path / CONFIG

    @property
    def metrics(self) -> Path:
        """File with the metrics."""
        return self.path / METRICS

    @property
    def damaged_metrics(self) -> Path:
        """File to which a damaged table of metrics is renamed when the run is resumed."""
        return self.metrics.with_suffix(".damaged.csv")

    @property
    def environment(self) -> Path:
        """File with the command, code, packages and machine of each start."""
        return self.path / ENVIRONMENT

    @property
    def log(self) -> Path:
        """File with the console output of the run."""
        return self.path / LOG

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def best(self) -> Path:
        """Directory of the best policy."""
        return self.path / BEST

    @property
    def policies(self) -> Path:
        """Directory of the regular policy dumps."""
        return self.path / POLICIES

    @property
    def plots(self) -> Path:
        """Directory of the plots."""
        return self.path / PLOTS

    @property
    def profile(self) -> Path:
        """Directory of the profiler traces."""
        return self.path / PROFILE

    @property
    def rollouts(self) -> Path:
        """Directory for rollout results of this run's policies."""
        return self.path / ROLLOUTS

    @property
    def is_run(self) -> bool:
        """Whether the directory contains a run."""
        return self.config.is_file()

    @property
    def saved(self) -> list[Path]:
        """Directories of saved policies: the best policy, followed by regular dumps in order."""
        kinds = (sorted(self.policies.glob(pattern)) for pattern in ("epoch_*", "step_*"))
        return [*[self.best] * self.best.is_dir(), *itertools.chain(*kinds)]

    def rows(self, last_epoch: int | None = None) -> list[MetricsRow]:
        """Read the rows of metrics; see `read_rows`."""
        return read_rows(self.metrics, last_epoch)

    def read_summary(self) -> dict[str, Any]:
        """Read the summary; return an empty dict if there is no file.

        Raises:
            RunDirectoryError: If the file is damaged.
        """
        return read_json(self.path / SUMMARY)

    def read_starts(self) -> list[dict[str, Any]]:
        """Read the starts in `environment.json`, oldest first; return [] if there is no file.

        Raises:
            RunDirectoryError: If the file is damaged.
        """
        found = read_json(self.environment)
        starts = found.get("starts", []) if found else []
        if not isinstance(starts, list) or bool(found) != ("starts" in found):
            raise RunDirectoryError(f"{self.environment} is damaged: expected a list of starts")
        return starts

    @property
    def outcome(self) -> dict[str, Any]:
        """The summary; empty if the file is missing or damaged."""
        with suppress(RunDirectoryError):
            return self.read_summary()
        return {}

    def lock(self) -> AbstractContextManager[None]:
        """Lock the directory against other processes; see `exclusive`."""
        return exclusive(self.path)

    def check_is_free(self) -> None:
        """Check that the directory can be used for a new run.

        A run that failed before its first checkpoint is ignored, because it cannot be resumed.

        Raises:
            ConfigError: If the directory contains a different run, or files of a different run.
        """
        if self.config.exists():
            if not any(self.checkpoints.glob("*")) and self._has_failed:
                return
            problem = "already contains a run; resume it with resume=auto, use another directory"
            raise ConfigError("run_dir", f"{problem}, or remove it", str(self.path))
        left = [name for name in (CHECKPOINTS, BEST, METRICS) if (self.path / name).exists()]
        if left:
            raise ConfigError(
                "run_dir",
                f"contains {', '.join(left)} of a run whose {CONFIG} is missing: restore the file "
                f"({BEST}/ has a copy) to resume the run, or use another directory",
                str(self.path),
            )

    @property
    def _has_failed(self) -> bool:
        """Whether the run failed, or has not written any result."""
        has_results = any((self.path / name).exists() for name in (METRICS, BEST, SUMMARY))
        return not has_results or self.outcome.get("stop_reason") in FAILURES

    def clean(self) -> None:
        """Remove unfinished files of killed processes; the directory must be locked."""
        for directory in (
            *(self.path, self.best, self.plots, self.profile),
            *self.policies.glob("*"),
        ):
            remove_leftovers(directory)

    @property
    def results(self) -> list[Path]:
        """Results of the run, without configuration and checkpoints."""
        return [path for name in RESULTS for path in sorted(self.path.glob(name))]

    def put_aside(self, results: Sequence[Path]) -> None:
        """Move the results of a restarted run into a subdirectory.

        The settings remain until the new run replaces them, so that the run can be restarted again.

        Raises:
            OSError: If the files cannot be moved.
        """
        if not results or not self.config.exists():
            return
        aside = new_directory(self.path / BEFORE)
        shutil.copy(self.config, aside)
        for path in results:
            path.rename(aside / path.name)
        warn(
            f"{self.path} has no checkpoint: the run restarts at step 0; earlier results were "
            f"moved to {aside}"
        )


def checkpoint_name(name: str | os.PathLike[str] | None) -> str | None:
    """Return the checkpoint name of a path, or None if the path is not a checkpoint."""
    path = Path(name or "")
    is_checkpoint = path.parent.name == CHECKPOINTS and not RunDirectory(path).is_run
    return path.name if is_checkpoint else None


def final_tests(summary: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the results of the test after training.

    Args:
        summary: Content of `summary.json`.

    Returns:
        Metrics (without the prefix `eval/`) and `epoch` of the policies `last` and `best`; null is
        NaN. Empty if there was no test, or the results are damaged.
    """
    tests = summary.get("final_test")
    found = {
        policy: {name: math.nan if value is None else value for name, value in results.items()}
        for policy, results in (tests.items() if isinstance(tests, Mapping) else ())
        if isinstance(results, Mapping)
    }
    values = (value for results in found.values() for value in results.values())
    return found if all(isinstance(value, Real) for value in values) else {}


def final_test_value(summary: Mapping[str, Any], metric: str) -> float | None:
    """Return a metric of the best policy in the test after training; None if not tested.

    Args:
        summary: Content of `summary.json`.
        metric: Name of the metric; only metrics of evaluations (`eval/...`) are tested.
    """
    prefix, _, name = metric.partition("/")
    value = final_tests(summary).get(BEST, {}).get(name, math.nan)
    return None if prefix != "eval" or math.isnan(value) else value


def objective_of(
    summary: Mapping[str, Any], rows: Sequence[Mapping[str, float]], metric: str
) -> float:
    """Return the objective of a run: its best policy in the test, or the last value of the metric.

    The best value of the metric is a maximum over noisy evaluations, so it is biased.

    Args:
        summary: Content of `summary.json`.
        rows: One row of metrics per epoch.
        metric: Metric that selects the best policy.

    Returns:
        The objective; NaN if the metric was never reported.
    """
    tested = final_test_value(summary, metric)
    values = [row[metric] for row in rows if math.isfinite(row.get(metric, math.nan))]
    return [math.nan, *values][-1] if tested is None else tested


def read_rows(path: str | Path, last_epoch: int | None = None) -> list[MetricsRow]:
    """Read the rows of a `metrics.csv`.

    An incomplete last line, left by a killed process, is dropped.

    Args:
        path: The file. A missing file is treated as empty.
        last_epoch: Epoch of the checkpoint from which a run is resumed. Rows of later epochs, which
            will be repeated, are omitted. None: all rows.

    Raises:
        RunDirectoryError: If the file is not a valid table.
    """
    if not Path(path).exists():
        return []
    try:
        text = read_regular(Path(path), MAX_NBYTES).decode()
        lines = list(csv.reader(text[: text.rfind("\n") + 1].splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RunDirectoryError(f"{path} is damaged: {error}") from error
    rows = []
    for number, cells in enumerate(lines[1:], start=2):
        try:
            pairs = zip(lines[0], cells, strict=True)
            rows.append({name: _number(cell) for name, cell in pairs if cell != ""})
        except ValueError as error:
            raise RunDirectoryError(f"{path} line {number} is damaged: {error}") from error
    if last_epoch is None:
        return rows
    return [row for row in rows if row.get(EPOCH, 0) <= last_epoch]


def _number(cell: str) -> float:
    # Integers are not converted to floats, which would lose digits.
    return int(cell) if cell.lstrip("-").isdigit() and len(cell) < 19 else float(cell)
