"""Scores of the presets: runs presets without a score for their current settings, writes the page.

    python -m benchmarks.scores [--only 'ppo/*' ...] [--seeds 5] [--max-hours 2] [--parallel 2]
    python -m benchmarks.scores --page-only

`table.yaml` lists the presets, the number of seeds, the order, and published results. Each run is
one process with one thread in `outputs/scores`. Its result is one line in
`benchmarks/scores/<preset>.jsonl`; `docs/scores.md` has tables and plots of all lines. Interrupted
runs are resumed by the next call, and presets with changed settings are run again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import traceback
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from benchmarks.scores.cells import DATASET, Cell, Settings, Table, read_table
from benchmarks.scores.page import write_page
from benchmarks.scores.rows import Rows, commit, measured
from maze_train.api import run_rollout
from maze_train.config.compose import load_config
from maze_train.config.options import FAILURE
from maze_train.config.train_config import AUTO
from maze_train.core.files import exclusive
from maze_train.core.names import CHECKPOINTS
from maze_train.core.notices import notify
from maze_train.core.signals import Interruption
from maze_train.core.text import duration, readable
from maze_train.hydra_app import message_of
from maze_train.run.rollout import TRAJECTORIES
from maze_train.run.train import TrainingRunner
from maze_train.workers.job_pool import LOG_FILE, JobRecord, LocalJobs, ProcessJob, StartedJob

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class ScoreRecord(JobRecord):
    """Run of a cell."""

    word: ClassVar[str] = "score"


@dataclass
class Scores:
    """The scores of a table.

    Args:
        table: File with the cells.
        rows: Folder of the rows.
        runs: Folder of the run directories.
        docs: Folder of the page and its pictures.
    """

    table: Path = ROOT / "benchmarks/scores/table.yaml"
    rows: Path = ROOT / "benchmarks/scores"
    runs: Path = ROOT / "outputs/scores"
    docs: Path = ROOT / "docs"

    def __post_init__(self) -> None:
        self.content: Table = read_table(self.table)
        self._jobs: list[tuple[Cell, int, Path]] = []

    def run(self, only: Sequence[str], seeds: int | None, parallel: int) -> None:
        """Run the missing presets, then write the page (also after an interruption).

        Raises:
            KeyboardInterrupt: After a signal, once all runs have saved a checkpoint.
        """
        self.failures = 0
        self.runs.mkdir(parents=True, exist_ok=True)
        commit()  # cache the commit of the running code
        with exclusive(self.runs, "scores in"):
            self.processes = LocalJobs(self._take, parallel)
            try:
                self.processes.run(self._missing(only, seeds))
            finally:
                self.write_page()

    def write_page(self) -> None:
        """Write tables and plots of all rows."""
        write_page(self.content, self.rows, self.docs)

    def _missing(self, only: Sequence[str], seeds: int | None) -> Iterator[ProcessJob]:
        for cell in self.content.cells:
            if any(fnmatch(cell.preset, pattern) for pattern in only):
                done = {row.seed for row in Rows.read(self.rows, cell).current(cell)}
                for seed in range(seeds or cell.seeds):
                    if seed not in done:
                        yield self._job(cell, seed)

    def _job(self, cell: Cell, seed: int) -> ProcessJob:
        directory = self.runs / cell.preset / cell.fingerprint / str(seed)
        record = ScoreRecord(
            len(self._jobs), f"{cell.preset} seed={seed}", str(directory), code=FAILURE
        )
        self._jobs.append((cell, seed, directory))
        values = {**cell.values, "seed": seed, "run_dir": str(directory), "resume": AUTO}

        def work() -> JobRecord:
            try:
                given = _demonstrations(cell, seed, directory)
                TrainingRunner(load_config({**values, **given})).run()
            except Exception as error:
                traceback.print_exc()
                return replace(record, error=message_of(error))
            return replace(record, code=0)

        return ProcessJob(record, directory.with_suffix(f".{LOG_FILE}"), work)

    def _take(self, job: StartedJob) -> None:
        """Store the row of a finished run."""
        record, took = job.outcome, duration(job.seconds)
        cell, seed, directory = self._jobs[record.number]
        if job.result is None and self.processes.is_ending:
            print(f"{record.name}: interrupted after {took}", flush=True)
        elif record.error:
            self.failures += 1
            notify(f"error: {record.label}: {record.error}\n  its output: {job.log}")
        else:
            row = measured(directory, cell, seed)
            Rows.read(self.rows, cell).add(cell, row)
            shutil.rmtree(directory / CHECKPOINTS, ignore_errors=True)  # replay buffers are large
            tests = " and ".join(readable(mean) for mean, _ in (row.test_final, row.test_best))
            print(f"{record.name}: final and best {tests} after {took}", flush=True)


def _demonstrations(cell: Cell, seed: int, directory: Path) -> Settings:
    """Train the teacher of a run if necessary, and record episodes of its best policy.

    Returns:
        The setting that names the dataset; empty without a teacher.
    """
    if cell.teacher is None:
        return {}
    teacher, records = (directory.with_name(f"{seed}-{name}") for name in ("teacher", "records"))
    values = {**cell.teacher.values, "seed": seed, "run_dir": str(teacher), "resume": AUTO}
    TrainingRunner(load_config(values)).run()
    shutil.rmtree(records, ignore_errors=True)  # remove partial recordings
    played = {"n_episodes": cell.n_demonstrations, "seed": seed, "record": True}
    run_rollout(teacher, output_dir=str(records), **played)
    return {DATASET: str(records / TRAJECTORIES)}


def main(argv: Sequence[str] | None = None, scores: Scores | None = None) -> int:
    """Parse the arguments, run the presets and return the exit code."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.scores", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--only", nargs="+", default=["*"], help="presets, with * and ?")
    parser.add_argument("--seeds", type=int, help="seeds of each; by default as the table says")
    parser.add_argument("--max-hours", type=float, default=0.0, help="runs are saved then")
    parser.add_argument("--parallel", type=int, default=0, help="runs at a time; 0: one per core")
    parser.add_argument("--page-only", action="store_true", help="write the page, run nothing")
    given = parser.parse_args(argv)
    scores = scores or Scores()
    presets = [cell.preset for cell in scores.content.cells]
    for pattern in given.only:
        if not any(fnmatch(preset, pattern) for preset in presets):
            parser.error(f"--only {pattern}: not in the table, which has {', '.join(presets)}")
    if given.max_hours < 0 or given.parallel < 0 or (1 if given.seeds is None else given.seeds) < 1:
        parser.error("--max-hours and --parallel take numbers >= 0, --seeds >= 1")
    if given.page_only:
        scores.write_page()
        return 0
    # The time limit is handled like SIGTERM.
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        with Interruption():
            signal.setitimer(signal.ITIMER_REAL, 3600 * given.max_hours)
            scores.run(given.only, given.seeds, given.parallel)
    except KeyboardInterrupt:
        notify("stopped; the same command continues")
        return 130
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    return FAILURE if scores.failures else 0


if __name__ == "__main__":
    sys.exit(main())
