"""Scores of presets: resumed runs, outdated rows, and the page."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import everyday

from benchmarks.scores.__main__ import Scores, main
from benchmarks.scores.cells import Cell, read_table
from benchmarks.scores.page import write_page
from benchmarks.scores.rows import Row, Rows
from maze_train import Callback, __version__
from maze_train.core.text import readable

SHORT = (
    *("total_steps=512", "checkpoint.interval=1", "evaluation.n_episodes=1"),
    *("evaluation.final_episodes=2", "algorithm.n_rollout_steps=16", "algorithm.epoch_length=1"),
    "algorithm.batch_size=64",
)
TABLE = """
sources: {{them: {{name: Them, url: "https://example.org", protocol: one run}}}}
families:
  All toys:
  - preset: ppo/CartPole-v1
    seeds: 2
    settings: {settings}
    published: [{{value: 100, source: them, steps: 1500, note: CartPole-v0}}]
"""
CELL = Cell("ppo/CartPole-v1", 2, SHORT)


class KilledOnce(Callback):
    """Callback that kills its process once after two checkpoints, and logs the start steps."""

    def __init__(self, notes: str) -> None:
        self.notes = Path(notes)

    def on_run_start(self, run: Any) -> None:
        with self.notes.open("a") as file:
            file.write(f"{run.progress.env_steps} ")

    def on_checkpoint(self, run: Any) -> None:
        if run.progress.env_steps >= 256 and self.notes.read_text().count(" ") == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def scores_in(folder: Path, *settings: str) -> Scores:
    """Return the scores of a table with one preset, in a folder."""
    (folder / "table.yaml").write_text(TABLE.format(settings=[*SHORT, *settings]))
    return Scores(folder / "table.yaml", folder / "rows", folder / "runs", folder)


def row_of(cell: Cell, seed: int, value: float = 100.0, settings: str = "") -> Row:
    """Return the row of a run whose final policy has the return `value`, and its best 10 more."""
    test = (value, 1.0)
    curve = [[100.0, 200.0], [1.0, 2.0], [0.0, value]]
    named = settings or cell.fingerprint
    return Row(seed, named, "1", "a machine", 200, 2.0, value + 10, value, test, test, curve)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_killed_score_run_resumes_and_becomes_a_row(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A killed run has no row; the next call resumes it, and a third one has nothing to do."""
    node = f"{{_target_: test_scores.KilledOnce, notes: {tmp_path / 'notes'}}}"
    scores = scores_in(tmp_path, f"callbacks=[{node}]")
    arguments = ["--seeds", "1", "--parallel", "1"]
    with pytest.raises(SystemExit):
        main([*arguments, "--only", "es/*"], scores)
    assert "--only es/*: not in the table, which has ppo/CartPole-v1" in capfd.readouterr().err
    assert main([*arguments, "--max-hours", "1e-9"], scores) == 130
    assert main(arguments, scores) == 1
    assert "score 0 (ppo/CartPole-v1 seed=0): ended by SIGKILL" in capfd.readouterr().err
    (cell,) = scores.content.cells
    assert Rows.read(scores.rows, cell).rows == {}
    page = (tmp_path / "scores.md").read_text()
    assert "- `ppo/CartPole-v1`: 2 seeds, 512 steps each" in page
    assert main(arguments, scores) == 0
    assert (tmp_path / "notes").read_text() == "0 256 "
    (row,) = Rows.read(scores.rows, cell).current(cell)
    assert (row.seed, row.steps, row.settings) == (0, 512, cell.fingerprint)
    assert row.curve[0] == [128.0, 256.0, 384.0, 512.0]
    assert row.best == max(row.curve[2])
    (summary,) = (tmp_path / "runs").rglob("summary.json")
    tests = json.loads(summary.read_text())["final_test"]
    best, last = (tests[name]["episode_return_mean"] for name in ("best", "last"))
    assert best != last
    assert (row.test_best[0], row.test_final[0]) == (best, last)
    assert main(arguments, scores) == 0
    assert (tmp_path / "notes").read_text() == "0 256 "
    page = (tmp_path / "scores.md").read_text()
    assert f"| CartPole-v1 | ppo | {__version__} | 1 | 512 |" in page
    assert "| 100.0 (Them, CartPole-v0, 1.5k steps) | one seed, 0.34x steps |" in page
    assert (tmp_path / "images/scores-all-toys.png").exists()
    (scores.rows / "ppo/CartPole-v1.jsonl").unlink()
    assert main(arguments, scores) == 0
    assert (tmp_path / "notes").read_text() == "0 256 0 "
    (again,) = Rows.read(scores.rows, cell).current(cell)
    assert (again.test_best, again.curve[2]) == (row.test_best, row.curve[2])


@pytest.mark.exhaustive
def test_changed_preset_makes_score_rows_stale(tmp_path: Path) -> None:
    """Stale rows are kept and marked with the changed settings until new rows replace them."""
    before = replace(CELL, settings=(*SHORT, "algorithm.lr=0.5"))
    for seed in (0, 1):
        Rows.read(tmp_path, before).add(before, row_of(before, seed))
    assert len(Rows.read(tmp_path, before).current(before)) == 2
    assert Rows.read(tmp_path, CELL).current(CELL) == []
    scores = scores_in(tmp_path)
    scores.rows = tmp_path
    scores.write_page()
    page = (tmp_path / "scores.md").read_text()
    assert "| ppo (stale) | 1 | 2 |" in page
    assert "- `ppo/CartPole-v1`: `algorithm.lr` was 0.5, is linear_0.001\n" in page
    Rows.read(tmp_path, CELL).add(CELL, row_of(CELL, 1))
    scores.write_page()
    assert "stale" not in (tmp_path / "scores.md").read_text().replace("stale |", "").lower()
    assert [row.seed for row in Rows.read(tmp_path, CELL).current(CELL)] == [1]
    Rows.read(tmp_path, CELL).add(CELL, row_of(CELL, 0))
    assert list(Rows.read(tmp_path, CELL).settings) == [CELL.fingerprint]


@pytest.mark.parametrize(
    ("values", "steps", "verdict"),
    everyday(
        1,
        [
            ((101.0, 130.0), 1_200, "above"),
            ((95.0, 105.0), 1_875, "not distinguishable"),
            ((94.0, 105.0), 1_200, "inconclusive"),
            ((80.0, 110.0), 4_500, "inconclusive, 3x steps"),
            ((90.0, 99.0), 300, "below, 0.2x steps"),
        ],
        are_rows=True,
    ),
)
def test_score_verdict_depends_on_the_interval(
    tmp_path: Path, values: tuple[float, float], steps: int, verdict: str
) -> None:
    """The verdict depends on the interval over seeds and its width; selection is biased by 10."""
    table = read_table(scores_in(tmp_path).table)
    (cell,) = table.cells
    for seed, value in enumerate(values):
        Rows.read(tmp_path, cell).add(cell, replace(row_of(cell, seed, value), steps=steps))
    write_page(table, tmp_path, tmp_path)
    page = (tmp_path / "scores.md").read_text()
    assert f"| 100.0 (Them, CartPole-v0, 1.5k steps) | {verdict} | {verdict} |" in page
    mean = sum(values) / 2
    figures = f"{readable(mean + 10)} | {readable(mean)} | 10.00 range [10.00, 10.00]"
    assert f"| 2 | 1 | {figures} |" in page
