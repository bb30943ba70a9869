"""The jobs of a sweep and what became of them: `jobs.csv` in the directory of the sweep."""

from __future__ import annotations

import csv
import math
import os
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from maze_train.errors import RunDirectoryError
from maze_train.files import atomic_write, read_regular

if TYPE_CHECKING:
    from collections.abc import Iterable

JOBS_FILE = "jobs.csv"
COLUMNS = ("job", "settings", "run_dir", "objective", "error")


@dataclass(frozen=True)
class JobRecord:
    """One job that ended."""

    number: int
    """Number of the job in its sweep; 0 without one."""

    settings: str
    """What the user chose, as on the command line."""

    run_dir: str
    """Directory of the results; there may be none after a failure."""

    sweep_dir: str = ""
    """Directory of the sweep; empty: there is none."""

    objective: float = math.nan
    """What a sweeper optimises; NaN after a failure."""

    error: str = ""
    """Message of a failure; empty: there was none."""

    code: int = 0
    """Exit code."""

    word: ClassVar[str] = "job"

    @property
    def name(self) -> str:
        """Word and number of the job."""
        return f"{self.word} {self.number}"

    @property
    def title(self) -> str:
        """Line with which the job begins."""
        return f"{self.name}: {self.settings}"

    @property
    def label(self) -> str:
        """Name of the job for people, with its settings."""
        return f"{self.name} ({self.settings})"


def write_jobs(sweep_dir: Path, records: Iterable[JobRecord]) -> None:
    """Write the jobs so far; directories within that of the sweep are relative to it.

    Raises:
        OSError: If the file can not be written.
    """
    buffer = StringIO()
    table = csv.writer(buffer, lineterminator="\n")
    table.writerow(COLUMNS)
    for record in sorted(records, key=lambda record: record.number):
        run_dir = record.run_dir
        if Path(run_dir).is_relative_to(sweep_dir):
            run_dir = os.path.relpath(run_dir, sweep_dir)
        objective = "" if math.isnan(record.objective) else repr(float(record.objective))
        table.writerow([record.number, record.settings, run_dir, objective, record.error])
    with atomic_write(sweep_dir / JOBS_FILE) as file:
        file.write(buffer.getvalue().encode())


def read_jobs(sweep_dir: Path) -> list[JobRecord]:
    """The jobs of a sweep with absolute directories; none if there is no such file.

    Raises:
        RunDirectoryError: If the file is damaged.
    """
    path = sweep_dir / JOBS_FILE
    if not path.exists():
        return []
    try:
        lines = list(csv.reader(StringIO(read_regular(path).decode())))
        return [
            JobRecord(
                int(number),
                settings,
                str(sweep_dir / run_dir),
                objective=float(objective or "nan"),
                error=error,
            )
            for number, settings, run_dir, objective, error in lines[1:]
        ]
    except (OSError, ValueError, csv.Error) as error:
        raise RunDirectoryError(f"{path} is damaged: {error}") from error
