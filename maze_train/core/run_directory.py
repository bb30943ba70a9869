"""The directory of a run: where its files are, whose they are, and what its tables say.

config.yaml              settings, signed by the user who trained
metrics.csv              a row of metrics per epoch
summary.json             the outcome
files.json               digests of the files that the settings name
checkpoints/             see `training/checkpoints.py`
best/                    the best policy, version `best`
policies/epoch_<n>/      regular dumps of the policy, versions `epoch_<n>`
plots/, profile/         pictures, traces
rollouts/, before/       results of rollouts, and of a run that began again
"""

from __future__ import annotations

import csv
import json
import os
import shutil
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from maze_train.core.errors import ConfigError, RunDirectoryError
from maze_train.core.files import (
    exclusive,
    new_directory,
    read_regular,
    remove_leftovers,
    results_directory,
    writable,
)
from maze_train.core.names import (
    BEFORE,
    BEST,
    CHECKPOINTS,
    CONFIG,
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
`eval/...` and `time/...`. A name is absent from the row of an epoch that has no value for it."""

EPOCH = "epoch"

FAILURES = ("error", "interrupted")
"""Stop reasons of runs that did not finish."""

WHOLE = "the directory itself"
"""Missing part of a run whose directory was moved or removed."""

MAX_NBYTES = 1 << 30
"""Maximum size of a table of metrics."""


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a run, which need not exist.

    Attributes:
        path: Its path.
    """

    path: Path

    @classmethod
    def to_resume(cls, resume: str) -> RunDirectory:
        """Return the run that `resume` names, itself or by one of its checkpoints."""
        path = Path(resume)
        return cls(path if checkpoint_name(path) is None else path.parent.parent)

    @classmethod
    def of_policy(cls, path: Path) -> RunDirectory:
        """Return the run of a saved policy or a checkpoint, as far as the path says it."""
        if path.name == BEST:
            return cls(path.parent)
        is_below = path.parent.name == POLICIES or checkpoint_name(path) is not None
        return cls(path.parent.parent if is_below else path)

    @classmethod
    def new(cls, name: str | None, default_parent: Path) -> RunDirectory:
        """Create the directory of a new run, see `results_directory`."""
        return cls(results_directory("run_dir", name, default_parent))

    @property
    def config(self) -> Path:
        """File with the settings."""
        return self.path / CONFIG

    @property
    def metrics(self) -> Path:
        """Table of metrics."""
        return self.path / METRICS

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def best(self) -> Path:
        """Folder of the best policy."""
        return self.path / BEST

    @property
    def policies(self) -> Path:
        """Folder of the regular dumps of the policy."""
        return self.path / POLICIES

    @property
    def plots(self) -> Path:
        """Folder of the pictures."""
        return self.path / PLOTS

    @property
    def profile(self) -> Path:
        """Folder of the traces of updates."""
        return self.path / PROFILE

    @property
    def rollouts(self) -> Path:
        """Folder of the results of rollouts with its policies."""
        return self.path / ROLLOUTS

    @property
    def is_run(self) -> bool:
        """Whether there is a run."""
        return self.config.is_file()

    @property
    def saved(self) -> list[Path]:
        """Folders of saved policies: the best one, then regular dumps in their order."""
        return [*[self.best] * self.best.is_dir(), *sorted(self.policies.glob("epoch_*"))]

    # -- reading ---------------------------------------------------------------------------------

    def rows(self, last_epoch: int | None = None) -> list[MetricsRow]:
        """Read the rows of metrics, see `read_rows`."""
        return read_rows(self.metrics, last_epoch)

    def read_summary(self) -> dict[str, Any]:
        """Read the outcome; empty without a file.

        Raises:
            RunDirectoryError: If it is damaged.
        """
        try:
            found = json.loads(read_regular(self.path / SUMMARY))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise RunDirectoryError(f"{SUMMARY} is damaged: {error}") from error
        if not isinstance(found, dict):
            raise RunDirectoryError(f"{SUMMARY} is damaged: expected values by name")
        return found

    @property
    def outcome(self) -> dict[str, Any]:
        """The outcome; empty if it is missing or damaged."""
        with suppress(RunDirectoryError):
            return self.read_summary()
        return {}

    # -- a run that begins -----------------------------------------------------------------------

    def lock(self) -> AbstractContextManager[None]:
        """Keep other processes from training in the directory, see `exclusive`."""
        return exclusive(self.path)

    def check_is_free(self) -> None:
        """Check that a new run may use the directory.

        A run that failed before its first checkpoint does not count: there is nothing to continue.

        Raises:
            ConfigError: If it holds another run, or the remains of one.
        """
        if self.config.exists():
            if not any(self.checkpoints.glob("*")) and self._has_failed:
                return
            problem = "holds a run already; continue it with resume=auto, name another directory"
            raise ConfigError("run_dir", f"{problem}, or remove it", str(self.path))
        left = [name for name in (CHECKPOINTS, BEST, METRICS) if (self.path / name).exists()]
        if left:
            raise ConfigError(
                "run_dir",
                f"holds {', '.join(left)} of a run whose {CONFIG} is missing: restore that file "
                f"({BEST}/ has a copy) to continue it, or name another directory",
                str(self.path),
            )

    @property
    def _has_failed(self) -> bool:
        """Whether the run says that it failed, or has written no result at all."""
        has_results = any((self.path / name).exists() for name in (METRICS, BEST, SUMMARY))
        return not has_results or self.outcome.get("stop_reason") in FAILURES

    def clean(self) -> None:
        """Remove unfinished files of killed processes; the directory must be locked."""
        for directory in (self.path, self.best):
            remove_leftovers(directory)

    def put_aside(self) -> None:
        """Move the results of a run that begins again into a directory below it.

        Its settings stay until those of the new run take their place, so that it can begin once
        more.

        Raises:
            ConfigError: If they cannot be moved.
        """
        found = [path for name in RESULTS for path in sorted(self.path.glob(name))]
        if not found or not self.config.exists():
            return
        with writable("run_dir", self.path):
            aside = new_directory(self.path / BEFORE)
            shutil.copy(self.config, aside)
            for path in found:
                path.rename(aside / path.name)
        warn(
            f"{self.path} has no checkpoint: the run begins again, at step 0; its earlier results "
            f"are in {aside}"
        )


def checkpoint_name(name: str | os.PathLike[str] | None) -> str | None:
    """Return the name of the checkpoint that a path leads to; None: it leads to a run."""
    path = Path(name or "")
    is_checkpoint = path.parent.name == CHECKPOINTS and not RunDirectory(path).is_run
    return path.name if is_checkpoint else None


def read_rows(path: str | Path, last_epoch: int | None = None) -> list[MetricsRow]:
    """Read the rows of a `metrics.csv`.

    A last line that was cut off when its process was killed is dropped.

    Args:
        path: The file; no rows if it does not exist.
        last_epoch: Epoch of the checkpoint from which a run continues: later rows, whose epochs
            will be repeated, are left out. None: all rows.

    Raises:
        RunDirectoryError: If the file is not a table of numbers.
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
    # A number of any length would be no float later.
    return int(cell) if cell.lstrip("-").isdigit() and len(cell) < 19 else float(cell)
