"""Stored results of runs: one line of JSON per run, with a downsampled curve."""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.core.files import atomic_write
from maze_train.core.names import SUMMARY
from maze_train.tools.runs import Run, read_run
from maze_train.tracking.tracker import ENV_STEPS, EVAL_RETURN, TOTAL_S
from maze_train.workers.backends import available_cores

if TYPE_CHECKING:
    from benchmarks.scores.cells import Cell, Settings

POINTS = 40
"""Number of stored points per curve."""


@dataclass(frozen=True)
class Row:
    """Result of one run."""

    seed: int
    settings: str
    """Fingerprint of the settings."""

    version: str
    """Version and commit of the package; `+` if there were uncommitted changes."""

    machine: str
    steps: int
    seconds: float
    """Wall time."""

    best: float
    """Evaluation that selected the best policy."""

    final: float
    """Evaluation at the end of the run."""

    test_best: tuple[float, float]
    """Mean and standard deviation of test episodes of the best policy, with new seeds."""

    test_final: tuple[float, float]
    """Mean and standard deviation of test episodes of the final policy."""

    curve: list[list[float]]
    """Steps, seconds and returns of evaluations."""

    def as_run(self, cell: Cell) -> Run:
        """Convert to a run for `maze_train.tools`."""
        names = (ENV_STEPS, TOTAL_S, EVAL_RETURN)
        points: list[Any] = [
            dict(zip(names, p, strict=True)) for p in zip(*self.curve, strict=True)
        ]
        return Run(Path(cell.preset), cell.env, cell.algorithm, self.seed, {}, points)


@dataclass
class Rows:
    """The rows of a cell with their settings, stored in one JSON lines file."""

    path: Path
    settings: dict[str, Settings] = field(default_factory=dict)
    """Settings by fingerprint."""

    rows: dict[int, Row] = field(default_factory=dict)
    """The newest row of each seed."""

    @classmethod
    def read(cls, folder: Path, cell: Cell) -> Rows:
        """Read the rows of a cell; empty if there is no file."""
        found = cls(folder / f"{cell.preset}.jsonl")
        lines = found.path.read_text().splitlines() if found.path.exists() else []
        for node in map(json.loads, lines):
            if "seed" in node:
                found.rows[node["seed"]] = Row(**node)
            else:
                found.settings.update(node)
        return found

    def add(self, cell: Cell, row: Row) -> None:
        """Add a row, replacing an earlier one with the same seed, and write the file."""
        self.rows[row.seed] = row
        self.settings[row.settings] = cell.flat
        used = {row.settings for row in self.rows.values()}
        self.settings = {key: value for key, value in self.settings.items() if key in used}
        nodes = [{key: value} for key, value in self.settings.items()]
        nodes += [asdict(row) for _, row in sorted(self.rows.items())]
        with atomic_write(self.path) as file:
            file.write("".join(f"{json.dumps(node)}\n" for node in nodes).encode())

    def changes(self, cell: Cell) -> dict[str, list[str]]:
        """Return changes of settings since earlier rows, by fingerprint; omits unchanged ones."""
        found = {key: cell.changes(before) for key, before in self.settings.items()}
        return {key: changes for key, changes in found.items() if changes}

    def current(self, cell: Cell) -> list[Row]:
        """Return the rows that are valid for the current settings, by seed."""
        stale = self.changes(cell)
        return [row for _, row in sorted(self.rows.items()) if row.settings not in stale]


def measured(directory: Path, cell: Cell, seed: int) -> Row:
    """Create the row of a finished run.

    Raises:
        RunDirectoryError: If the run has not finished, or its files are damaged.
    """
    run = read_run(directory)
    summary = json.loads((directory / SUMMARY).read_text())
    curve = np.stack(run.curve(EVAL_RETURN))
    chosen = np.unique(np.linspace(0, curve.shape[1] - 1, POINTS).round().astype(int))
    return Row(
        seed=seed,
        settings=cell.fingerprint,
        version=f"{version('maze-train')} {commit()}",
        machine=machine(),
        steps=summary["env_steps"],
        seconds=short(summary["wall_time_s"]),
        best=short(summary["best_metric"]),
        final=short(summary["final_eval_return_mean"]),
        test_best=_test(summary["final_test"]["best"]),
        test_final=_test(summary["final_test"]["last"]),
        curve=[[short(number) for number in line] for line in curve[:, chosen]],
    )


def short(number: float) -> float:
    """Round to six significant digits."""
    return float(f"{number:.6g}")


def _test(metrics: Settings) -> tuple[float, float]:
    return short(metrics["episode_return_mean"]), short(metrics["episode_return_std"])


@cache
def machine() -> str:
    """Describe processor, cores, and package versions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "gymnasium"))
    cpu = names[0] if names else platform.processor()
    return f"{cpu}, {available_cores()} cores, Python {platform.python_version()}, {packages}"


@cache
def commit() -> str:
    """Return the commit; `+` is appended if package or presets have uncommitted changes."""
    git = ("git", "-C", str(Path(__file__).parent))
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    paths = [":/maze_train", ":/conf"]
    diff = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *paths], capture_output=True)
    return head.stdout.strip() + ("+" if diff.returncode else "")
