"""What is kept of a run: one line of JSON, with its curve in few points."""

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
from maze_train.tools.runs import WALL_TIME, Run, read_run
from maze_train.tracking.tracker import ENV_STEPS, EVAL_RETURN
from maze_train.workers.places import available_cores

if TYPE_CHECKING:
    from benchmarks.scores.cells import Cell, Settings

POINTS = 40
"""Points of a curve that are kept."""


@dataclass(frozen=True)
class Row:
    """The outcome of one run."""

    seed: int
    settings: str
    """Fingerprint of its settings."""

    version: str
    """Version of the package, and commit; `+`: with changes."""

    machine: str
    steps: int
    seconds: float
    """Wall time."""

    best: float
    """Evaluation by which the best policy was chosen."""

    final: float
    """Evaluation at the end of the run."""

    test_best: tuple[float, float]
    """Mean and deviation over the episodes of the best policy after the run, with fresh seeds."""

    test_final: tuple[float, float]
    """Those of the policy that training ended with."""

    curve: list[list[float]]
    """Steps, seconds and returns of evaluations."""

    def as_run(self, cell: Cell) -> Run:
        """The run as the comparison of runs takes it."""
        names = (ENV_STEPS, WALL_TIME, EVAL_RETURN)
        points: list[Any] = [
            dict(zip(names, p, strict=True)) for p in zip(*self.curve, strict=True)
        ]
        return Run(Path(cell.preset), cell.env, cell.algorithm, self.seed, {}, points)


@dataclass
class Rows:
    """The rows of a cell, and the settings that they were made with; one file of JSON lines."""

    path: Path
    settings: dict[str, Settings] = field(default_factory=dict)
    """Settings by fingerprint."""

    rows: dict[int, Row] = field(default_factory=dict)
    """The newest row of each seed."""

    @classmethod
    def read(cls, folder: Path, cell: Cell) -> Rows:
        """The rows of a cell; none if there is no file."""
        found = cls(folder / f"{cell.preset}.jsonl")
        lines = found.path.read_text().splitlines() if found.path.exists() else []
        for node in map(json.loads, lines):
            if "seed" in node:
                found.rows[node["seed"]] = Row(**node)
            else:
                found.settings.update(node)
        return found

    def add(self, cell: Cell, row: Row) -> None:
        """Put a row in the place of an earlier one with its seed, and write the file."""
        self.rows[row.seed] = row
        self.settings[row.settings] = cell.flat
        used = {row.settings for row in self.rows.values()}
        self.settings = {key: value for key, value in self.settings.items() if key in used}
        nodes = [{key: value} for key, value in self.settings.items()]
        nodes += [asdict(row) for _, row in sorted(self.rows.items())]
        with atomic_write(self.path) as file:
            file.write("".join(f"{json.dumps(node)}\n" for node in nodes).encode())

    def changes(self, cell: Cell) -> dict[str, list[str]]:
        """Changes of the settings since, by fingerprint; settings without any are not there."""
        found = {key: cell.changes(before) for key, before in self.settings.items()}
        return {key: changes for key, changes in found.items() if changes}

    def current(self, cell: Cell) -> list[Row]:
        """Rows that hold for the settings of now, by seed."""
        stale = self.changes(cell)
        return [row for _, row in sorted(self.rows.items()) if row.settings not in stale]


def measured(directory: Path, cell: Cell, seed: int) -> Row:
    """The row of a run that finished.

    Raises:
        RunDirectoryError: If it did not, or its files are damaged.
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
    """A number with six significant digits."""
    return float(f"{number:.6g}")


def _test(metrics: Settings) -> tuple[float, float]:
    return short(metrics["episode_return_mean"]), short(metrics["episode_return_std"])


@cache
def machine() -> str:
    """Processor, cores, and versions of what computes."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "gymnasium"))
    cpu = names[0] if names else platform.processor()
    return f"{cpu}, {available_cores()} cores, Python {platform.python_version()}, {packages}"


@cache
def commit() -> str:
    """The commit of the checkout; `+`: package or presets have changes that are not in it."""
    git = ("git", "-C", str(Path(__file__).parent))
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    paths = [":/maze_train", ":/conf"]
    diff = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *paths], capture_output=True)
    return head.stdout.strip() + ("+" if diff.returncode else "")
