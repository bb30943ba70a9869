"""Comparison of finished runs: tables, a plot, CSV and Markdown files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from maze_train.config.commands import CompareConfig
from maze_train.config.compose import load_settings
from maze_train.core.errors import ConfigError, RunDirectoryError, did_you_mean, nearest, printable
from maze_train.core.files import results_directory, writable
from maze_train.core.names import METRICS, OUTPUTS
from maze_train.core.notices import warn
from maze_train.core.report import (
    csv_text,
    markdown_code,
    markdown_table,
    markdown_text,
    text_table,
    write_report,
)
from maze_train.core.run_directory import final_test_value
from maze_train.core.targets import is_within
from maze_train.tools.compare_report import (
    COLORS,
    FEW_RUNS,
    Figures,
    Group,
    differing_settings,
    draw_comparison,
    figures,
    grouped,
    overall,
    short,
    shown,
)
from maze_train.tools.runs import Run, SkippedRun, find_runs, read_run
from maze_train.tracking.tracker import EVAL_RETURN, TRAIN_RETURN
from maze_train.training.config import EvaluationConfig

CSV_FILE, RUNS_FILE, MARKDOWN_FILE = "comparison.csv", "runs.csv", "comparison.md"
COMPARISONS = Path(OUTPUTS, "comparisons")
ALL_ENVS = "all environments"
MAX_ROWS = 40
"""Maximum number of table rows to print; the files contain all rows."""


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison of runs."""

    metric: str
    """The compared metric."""

    mode: Literal["max", "min"]
    """Whether larger (max) or smaller (min) values are better."""

    settings: list[str]
    """Settings that differ between runs of the same algorithm in the same environment."""

    groups: list[Group] = field(repr=False)
    """Groups of runs that differ only in the seed."""

    figures: list[Figures] = field(repr=False)
    """Statistics of each group."""

    overall: dict[tuple[str, ...], Figures] = field(repr=False)
    """Statistics aggregated over the environments in `bounds`, by algorithm and settings."""

    left_out: list[SkippedRun]
    """Excluded runs, with the reasons."""

    output: Path
    """Directory of the files."""

    picture: str = "comparison.png"
    """File name of the plot."""

    @property
    def run_rows(self) -> list[dict[str, Any]]:
        """Rows of runs.csv, one per run."""
        better, rows = max if self.mode == "max" else min, []
        for group in self.groups:
            named = dict(zip(self.settings, group.settings, strict=True))
            head = {"group": group.label(self.settings), "environment": group.env}
            for run in group.runs:
                steps, _, values = run.curve(self.metric)
                found = {"env_steps": int(steps[-1]), "final": values[-1], "best": better(values)}
                tested = final_test_value(run.outcome, self.metric)
                found |= {"tested": tested, "directory": str(run.directory)}
                own = {"algorithm": group.algorithm, **named, "seed": run.seed}
                rows.append({**head, **own, **found})
        return rows

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of comparison.csv."""
        rows = []
        for group, found in zip(self.groups, self.figures, strict=True):
            named = dict(zip(self.settings, group.settings, strict=True))
            seeds = {"seeds": " ".join(str(run.seed) for run in group.runs)}
            head = {"environment": group.env, "algorithm": group.algorithm}
            rows.append({**head, **named, **seeds, **found})
        for name, found in self.overall.items():
            named = dict(zip(self.settings, name[1:], strict=True))
            rows.append({"environment": ALL_ENVS, "algorithm": name[0], **named, **found})
        return rows

    def sections(self) -> dict[str, list[dict[str, str]]]:
        """Return the formatted tables by environment."""
        sections: dict[str, list[dict[str, str]]] = {}
        for row in self.rows:
            named = {key: short(row[key]) for key in ("algorithm", *self.settings)}
            sections.setdefault(row["environment"], []).append({**named, **shown(row)})
        return sections

    def notes(self) -> list[str]:
        """Return explanations of the values, and warnings."""
        meaning = "IQM: mean of the middle half of the runs; [95 %]: bootstrap interval of the IQM"
        is_range = any(row["runs"] < FEW_RUNS for row in self.rows)
        ranges = f"; range: bootstrap interval of fewer than {FEW_RUNS} runs, close to min and max"
        lines = [f"{self.metric}; {meaning}{ranges if is_range else ''}"]
        if self.overall:
            lines.append(f"{ALL_ENVS}: values normalised by the bounds, resampled per environment")
        for group in self.groups:
            seeds = [str(run.seed) for run in group.runs]
            twice = sorted({seed for seed in seeds if seeds.count(seed) > 1})
            if twice:
                lines.append(
                    f"{' '.join((*group.name, 'on', group.env))}: several runs have seed "
                    f"{', '.join(twice)}; repeated runs make intervals too narrow"
                )
        return lines + differing_code([run for group in self.groups for run in group.runs])

    def __str__(self) -> str:
        """Format the tables for a terminal."""
        lines: list[str] = []
        for env, rows in self.sections().items():
            table = text_table(rows, MAX_ROWS, self.output / CSV_FILE)
            lines += [env, *(f"  {line}" for line in table), ""]
        lines += self.notes()
        if self.left_out:
            lines += ["", f"left out: {len(self.left_out)}"]
            lines += [f"  {left.name}: {left.reason}" for left in self.left_out]
        return printable("\n".join(lines))

    def markdown(self) -> str:
        """Format the tables as Markdown with the plot, excluded runs, and run directories."""
        lines = ["# Comparison", "", f"![curves]({self.picture})", ""]
        for env, rows in self.sections().items():
            lines += [f"## {markdown_text(env)}", "", *markdown_table(rows), ""]
        lines += [f"- {markdown_text(line)}" for line in self.notes()]
        if self.left_out:
            lines += ["", "## Left out", ""]
            lines += [
                f"- {markdown_code(left.name)}: {markdown_text(left.reason)}"
                for left in self.left_out
            ]
        lines += ["", "## Runs", ""]
        for group in self.groups:
            lines.append(f"- {markdown_text(' '.join((*group.name, 'on', group.env)))}")
            lines += [
                f"  - seed {run.seed}: {markdown_code(str(run.directory))}" for run in group.runs
            ]
        return "\n".join(lines) + "\n"


def differing_code(runs: Sequence[Run]) -> list[str]:
    """Return a line for each recorded version or commit that differs between runs."""
    names = repository_names([list(run.commits) for run in runs])
    found: dict[str, Counter[str]] = {}
    for run in runs:
        commits = {f"commit of {names[folder]}": commit for folder, commit in run.commits.items()}
        for name, value in {**commits, **run.versions}.items():
            found.setdefault(name, Counter())[value] += 1
    lines = []
    for name, counts in found.items():
        if len(counts) > 1:
            listed = ", ".join(f"{value} (runs: {count})" for value, count in counts.most_common())
            lines.append(f"{name}: {listed}")
    return lines


def repository_names(folders_of_runs: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return a name for each repository: the shortest path suffix that is unique in each run.

    Args:
        folders_of_runs: Directories of the repositories of each run. Directories of different runs
            with the same name are assumed to be copies of one repository.
    """
    names: dict[str, str] = {}
    for folder in dict.fromkeys(folder for folders in folders_of_runs for folder in folders):
        parts = Path(folder).parts
        for length in range(1, len(parts) + 1):
            end = parts[-length:]
            counts = (sum(Path(x).parts[-length:] == end for x in own) for own in folders_of_runs)
            names[folder] = "/".join(end)
            if all(count < 2 for count in counts):
                break
    return names


def compare_runs(
    runs: str | Path | Sequence[str | Path], output: str | Path | None = None, **settings: object
) -> Comparison:
    """Compare runs, and write tables and a plot, like `maze-run compare`.

        comparison = compare_runs(["outputs/sweeps/a"], "outputs/comparison", threshold=475)
        print(comparison)

    Args:
        runs: Run directories, directories that contain runs, or glob patterns.
        output: Output directory for `comparison.csv`, `runs.csv`, `comparison.md` and the plot.
        **settings: Additional settings of `CompareConfig` by name.

    Raises:
        ConfigError: If a setting is invalid, no run is found, or no run has the metric.
        RunDirectoryError: If none of the runs can be compared. The message lists the reasons.
    """
    names = [runs] if isinstance(runs, str | Path) else runs
    given = {"runs": list(map(str, names)), "output": output, **settings}
    return compare(load_settings(CompareConfig, given))


def compare(config: CompareConfig) -> Comparison:
    """Compare runs and write the files."""
    runs, left_out = _read(config)
    metric = _metric(runs, config.metric)
    for run in runs:
        if not len(run.curve(metric)[2]):
            left_out.append(SkippedRun(str(run.directory), f"{METRICS} has no {metric}"))
    runs = [run for run in runs if len(run.curve(metric)[2])]
    _check_ignored(config, {key for run in runs for key in run.settings})
    keys = differing_settings(runs, config.ignore)
    groups = grouped(runs, keys)
    mode = _mode(runs, metric, config)
    n = config.n_resamples
    _check_envs(config, {group.env for group in groups})
    parent = COMPARISONS.absolute()
    with results_directory("output", config.output or None, parent) as output:
        comparison = Comparison(
            metric=metric,
            mode=mode,
            settings=keys,
            groups=groups,
            figures=[
                figures(group, metric, mode, config.threshold_in(group.env), n) for group in groups
            ],
            overall=overall(groups, metric, mode, config.bounds, n) if config.bounds else {},
            left_out=left_out,
            output=output,
            picture=f"comparison.{config.plot_format}",
        )
        drawn = drawn_groups(comparison)
        figure = draw_comparison(groups, drawn, metric, "environment steps")
        texts = {CSV_FILE: csv_text(comparison.rows), RUNS_FILE: csv_text(comparison.run_rows)}
        texts[MARKDOWN_FILE] = comparison.markdown()
        with writable("output", output):
            write_report(output, texts, {comparison.picture: figure})
    return comparison


def _read(config: CompareConfig) -> tuple[list[Run], list[SkippedRun]]:
    """Return the runs that can be compared, and the excluded runs with reasons."""
    found = find_runs(config.runs)
    runs, left_out = [], list(found.without_run)
    for directory in found.directories:
        try:
            error = found.errors.get(directory.resolve(), "")
            runs.append(read_run(directory, error, config.unfinished))
        except RunDirectoryError as problem:
            left_out.append(SkippedRun(str(directory), str(problem)))
    if not runs:
        reasons = "".join(f"\n  {left.name}: {left.reason}" for left in left_out)
        hint = "\nset unfinished=true to include runs that did not finish"
        remedy = "" if config.unfinished else hint
        raise RunDirectoryError(f"none of these runs can be compared:{reasons}{remedy}")
    return runs, left_out


def _metric(runs: Sequence[Run], metric: str | None) -> str:
    """Return the metric to compare.

    Raises:
        ConfigError: If no run has the metric.
    """
    selecting = {run.evaluation.selection_metric for run in runs}
    shared = selecting if len(selecting) == 1 else ()
    for name in [metric] if metric else [*shared, EVAL_RETURN, TRAIN_RETURN]:
        if any(len(run.curve(name)[2]) for run in runs):
            return name
    known = list(dict.fromkeys(name for run in runs for row in run.rows for name in row))
    hint = did_you_mean(nearest(metric or EVAL_RETURN, known), "", " ")
    problem = f"no run has this metric; {hint}columns of {METRICS}: {', '.join(known)}"
    raise ConfigError("metric", problem, metric)


def _mode(runs: Sequence[Run], metric: str, config: CompareConfig) -> Literal["max", "min"]:
    """Return `max` or `min`, derived from the settings, the runs or the name of the metric."""
    given = {run.evaluation.mode for run in runs if run.evaluation.selection_metric == metric}
    mode = config.mode if config.mode != "auto" or len(given) != 1 else given.pop()
    return EvaluationConfig(mode=mode).selection_mode(metric)


def _check_envs(config: CompareConfig, envs: set[str]) -> None:
    """Raise ConfigError if a setting names an environment without runs."""
    for key in ("bounds", "threshold"):
        value = config.value_of(key)
        for env in value if isinstance(value, dict) else ():
            if env not in envs:
                problem = f"no run has this environment; available: {', '.join(sorted(envs))}"
                raise ConfigError(key, problem, env)


def _check_ignored(config: CompareConfig, keys: set[str]) -> None:
    """Warn about names in `ignore` that are neither settings nor sections of the runs."""
    for name in config.ignore:
        if not any(is_within(key, [name]) for key in keys):
            meant = did_you_mean(nearest(name, keys, count=1))
            warn(f"ignore: no run has a setting {name!r}{meant}")


def drawn_groups(comparison: Comparison) -> dict[tuple[str, ...], str]:
    """Return the labels of the groups to draw: the best groups by mean rank over environments."""
    sign = -1.0 if comparison.mode == "max" else 1.0
    pairs = list(zip(comparison.groups, comparison.figures, strict=True))
    ranks: dict[tuple[str, ...], list[int]] = {}
    for env in dict.fromkeys(group.env for group in comparison.groups):
        here = [
            (sign * found["final_iqm"], group.name) for group, found in pairs if group.env == env
        ]
        for rank, (_, name) in enumerate(sorted(here)):
            ranks.setdefault(name, []).append(rank)
    best = sorted(ranks, key=lambda name: sum(ranks[name]) / len(ranks[name]))[: len(COLORS)]
    labels = {group.name: group.label(comparison.settings) for group in comparison.groups}
    return {name: label for name, label in labels.items() if name in best}
