"""The page of all scores: tables with published results, and plots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.scores.rows import Row, Rows
from maze_train.config.options import list_options
from maze_train.core.files import atomic_write
from maze_train.core.report import markdown_table
from maze_train.core.text import compact, readable
from maze_train.tools.compare import (
    ABSENT,
    Figures,
    Group,
    draw_comparison,
    iqm_text,
    shown,
    spread,
)
from maze_train.tracking.tracker import EVAL_RETURN

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.scores.cells import Cell, Table

N_RESAMPLES = 10_000

MAX_WIDTH = 0.1
"""Maximum width of a conclusive interval, as a fraction of the published result."""

DPI = 90

HEAD = """\
# Scores

Returns of the presets compared with published results. `make scores` writes this page from one line
per run in `benchmarks/scores/`; see [below](#how-to-repeat-them).

- *final* is the policy at the end of training, *best* the one that evaluations selected, which
  `load_policy` returns. Both play 100 episodes after training with new seeds.
- IQM and intervals are over seeds, as in [comparing runs](compare.md#statistics).
- *above* and *below*: the interval lies above or below the highest published result. *not
  distinguishable*: the interval contains it. *inconclusive*: the interval contains it and is wider
  than 10 % of it. *one seed*: there is no interval. *3x steps*: with three times the steps of the
  published result. Protocols differ: see [sources](#sources).
- *bc (of ppo)* learns from 100 episodes of the best policy of PPO with the same seed. Its steps are
  recorded steps, including repetitions; its time excludes the training of PPO.
- Seeds are 0, 1, 2, ... Older presets were tuned manually with some of these seeds. Presets that
  were tuned later used seeds from 1000 on, as stated in their files.
- *version* is the version of maze_train that measured the row.
- `benchmarks/preset-runs.md` lists wall times and returns of single runs.
"""

SELECTION = """\
## How optimistic is the best evaluation?

*Chosen by* is the mean over seeds of the best evaluation of a run, the maximum of many evaluations
of few episodes. *Played* is the mean of the same policies in 100 new episodes.
"""

REPEAT = """\
## How to repeat them

```text
make scores
make scores ARGS="--only 'ppo/*' 'sac/Pendulum-v1' --seeds 3 --max-hours 2 --parallel 2"
python -m benchmarks.scores --page-only
```

This runs every preset that has no result for its current settings, one process with one thread per
core, in `outputs/scores/`. It keeps one line per run: fingerprint of the settings, seed, version,
commit, machine, results, and the curve in 40 points. After Ctrl-C, or `--max-hours`, the same
command continues from the checkpoints. Runs that fail are reported and have no line.
`benchmarks/scores/table.yaml` lists the runs, their order, and the published results. Wall times
were measured on loaded machines.
"""


@dataclass(frozen=True)
class Score:
    """The displayed rows of a cell: of the current settings if available, else of earlier ones."""

    cell: Cell
    rows: list[Row]
    missing: int
    """Number of seeds without a row for the current settings."""

    changes: list[str]
    """Differences between the settings of the rows and the current ones."""

    @property
    def names(self) -> dict[str, str]:
        """The first columns of the table rows."""
        mark = " (stale)" if self.changes else ""
        return {"environment": self.cell.env, "algorithm": self.cell.algorithm + mark}

    def tests(self, name: str) -> np.ndarray[Any, Any]:
        """Return the mean returns after training of the `final` or `best` policies."""
        return np.array([getattr(row, f"test_{name}")[0] for row in self.rows])

    def line(self, sources: dict[str, Any]) -> dict[str, str]:
        """Return the row in the table of a family."""
        figures = {
            "runs": len(self.rows),
            "env_steps": float(np.mean([row.steps for row in self.rows])),
            "wall_time_s": float(np.mean([row.seconds for row in self.rows])),
            **spread("final", [self.tests("final")], N_RESAMPLES),
            **spread("best", [self.tests("best")], N_RESAMPLES),
        }
        published = self.cell.published
        texts = [
            f"{readable(known['value'])} ({sources[known['source']]['name']}, "
            + (f"{known['note']}, " if "note" in known else "")
            + f"{compact(known['steps'])} steps)"
            for known in published
        ]
        highest = max(published, key=lambda known: float(known["value"]), default=None)
        return {
            **self.names,
            "version": ", ".join(sorted({row.version.split()[0] for row in self.rows})),
            **shown(figures),
            "published": "; ".join(texts) or ABSENT,
            **{f"{name} is": beside(figures, name, highest) for name in ("final", "best")},
        }

    def selection(self) -> dict[str, str]:
        """Return the row in the table about the selection of policies."""
        chosen, played = np.array([row.best for row in self.rows]), self.tests("best")
        gain = spread("difference", [chosen - played], N_RESAMPLES)
        return {
            **self.names,
            "runs": str(len(self.rows)),
            "episodes": str(self.cell.config.evaluation.n_episodes),
            "chosen by": readable(chosen.mean()),
            "played": readable(played.mean()),
            "difference IQM [95 %]": iqm_text(gain, "difference", len(self.rows)),
        }


def beside(figures: Figures, name: str, published: dict[str, Any] | None) -> str:
    """Return whether an interval lies above or below a published result, or contains it.

    If the steps differ by more than a quarter, their ratio is added.
    """
    if published is None:
        return ABSENT
    value, share = published["value"], figures["env_steps"] / published["steps"]
    low, high = figures[f"{name}_low"], figures[f"{name}_high"]
    if figures["runs"] == 1:
        verdict = "one seed"
    elif low > value or high < value:
        verdict = "above" if low > value else "below"
    else:
        is_wide = high - low > MAX_WIDTH * abs(value)
        verdict = "inconclusive" if is_wide else "not distinguishable"
    return verdict if 0.8 <= share <= 1.25 else f"{verdict}, {share:.2g}x steps"


def score_of(folder: Path, cell: Cell) -> Score:
    """Select the rows of a cell to display."""
    found = Rows.read(folder, cell)
    rows, stale = found.current(cell), found.changes(cell)
    missing = len({*range(cell.seeds)} - {row.seed for row in rows})
    if rows:
        return Score(cell, rows, missing, [])
    earlier = [row for _, row in sorted(found.rows.items())]
    changes = dict.fromkeys(change for row in earlier for change in stale[row.settings])
    return Score(cell, earlier, missing, list(changes))


def write_page(table: Table, folder: Path, docs: Path) -> None:
    """Write `scores.md` and its plots.

    Args:
        table: The table of presets.
        folder: Folder of the rows.
        docs: Folder of the page.
    """
    families = {
        name: [score_of(folder, cell) for cell in cells] for name, cells in table.families.items()
    }
    scores = [score for family in families.values() for score in family]
    there = [score for score in scores if score.rows]
    parts = [HEAD]
    for name, family in families.items():
        parts += _family(name, [score for score in family if score.rows], table.sources, docs)
    if there:
        parts += [SELECTION, *_lines(markdown_table([score.selection() for score in there]))]
    parts += [*_notes(scores), REPEAT, *_sources(table.sources), *_machines(there)]
    with atomic_write(docs / "scores.md") as file:
        file.write("\n".join(parts).encode())


def _lines(lines: Sequence[str]) -> list[str]:
    return ["\n".join(lines) + "\n"] if lines else []


def _family(name: str, scores: Sequence[Score], sources: Any, docs: Path) -> list[str]:
    """Return the table and the plot of a family."""
    if not scores:
        return []
    picture = f"images/scores-{name.lower().replace(' ', '-')}.png"
    groups = [
        Group(s.cell.env, s.cell.algorithm, (), tuple(row.as_run(s.cell) for row in s.rows))
        for s in scores
    ]
    labels: dict[tuple[str, ...], str] = {group.name: group.algorithm for group in groups}
    figure = draw_comparison(groups, labels, EVAL_RETURN, "environment steps")
    with atomic_write(docs / picture) as file:
        figure.savefig(file, format="png", dpi=DPI)
    alt = f"Returns on {', '.join(dict.fromkeys(group.env for group in groups))}"
    table = markdown_table([score.line(sources) for score in scores])
    return [f"## {name}\n", *_lines(table), f"![{alt}]({picture})\n"]


def _notes(scores: Sequence[Score]) -> list[str]:
    """List stale scores, missing seeds, and presets without scores."""
    stale = [f"- `{s.cell.preset}`: {'; '.join(s.changes)}" for s in scores if s.changes]
    missing = [_missing(s) for s in scores if s.missing and s.rows]
    never = [_missing(s) for s in scores if not s.rows]
    others = sorted({*list_options("experiment")} - {score.cell.preset for score in scores})
    if others:
        never.append(f"- not in the table: {', '.join(f'`{name}`' for name in others)}")
    titles = {
        "Stale: settings changed since": stale,
        "Missing seeds": missing,
        "Presets without scores": never,
    }
    return [part for title, lines in titles.items() if lines for part in _section(title, lines)]


def _missing(score: Score) -> str:
    steps = score.cell.config.total_steps
    length = f", {compact(steps)} steps each" if steps else ""
    count = f"{score.missing} of {score.cell.seeds}" if score.rows else score.missing
    return f"- `{score.cell.preset}`: {count} seeds{length}"


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}\n", *_lines(lines)]


def _sources(sources: dict[str, Any]) -> list[str]:
    lines = [f"- [{s['name']}]({s['url']}): {s['protocol']}" for s in sources.values()]
    return ["## Sources\n", *_lines(lines)]


def _machines(scores: Sequence[Score]) -> list[str]:
    """List machines and versions, with the number of runs of each."""
    rows = [row for score in scores for row in score.rows]
    parts = []
    for title, names in (
        ("Machines", [row.machine for row in rows]),
        ("Versions", [f"maze_train {row.version}" for row in rows]),
    ):
        lines = [f"- {name}: {names.count(name)} runs" for name in dict.fromkeys(names)]
        parts += [f"## {title}\n", *_lines(lines)] if lines else []
    return parts
