"""Comparison of finished runs: statistics, tables, a plot, CSV and Markdown files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from maze_train.config.commands import CompareConfig
from maze_train.config.compose import load_settings
from maze_train.core.errors import ConfigError, RunDirectoryError, did_you_mean, nearest, printable
from maze_train.core.files import results_directory, writable
from maze_train.core.names import METRICS, OUTPUTS
from maze_train.core.notices import warn
from maze_train.core.report import (
    BLUE,
    RED,
    add_legend,
    band,
    csv_text,
    curve,
    decorate,
    markdown_code,
    markdown_table,
    markdown_text,
    new_figure,
    text_table,
    write_report,
)
from maze_train.core.run_directory import final_test_value
from maze_train.core.targets import is_within
from maze_train.core.text import compact, duration, readable
from maze_train.tools.runs import (
    Array,
    Run,
    SkippedRun,
    bootstrap_interval,
    find_runs,
    interquartile_mean,
    read_run,
)
from maze_train.tracking.tracker import EVAL_RETURN, TRAIN_RETURN
from maze_train.training.config import EvaluationConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Figures: TypeAlias = dict[str, float]
Row: TypeAlias = dict[str, Any]

FEW_RUNS = 4
"""Minimum number of runs for a bootstrap interval; with fewer runs, the label is "range"."""

ABSENT = "-"
NOT_SET = "not set"
"""Placeholder for a missing setting."""


@dataclass(frozen=True)
class Group:
    """Runs of one algorithm in one environment that differ only in the seed."""

    env: str
    algorithm: str
    settings: tuple[str, ...]
    """Values of the settings that differ within the comparison."""

    runs: tuple[Run, ...]

    @property
    def name(self) -> tuple[str, ...]:
        """Algorithm and settings; groups in other environments may have the same name."""
        return (self.algorithm, *self.settings)

    def label(self, keys: Sequence[str]) -> str:
        """Return the algorithm and the settings, such as `ppo algorithm.lr=0.001`."""
        values = [f"{k}={short(value)}" for k, value in zip(keys, self.settings, strict=True)]
        return " ".join([self.algorithm, *values])


def differing_settings(runs: Iterable[Run], ignore: Sequence[str] = ()) -> list[str]:
    """Return the settings that differ between runs of the same algorithm and environment.

    Args:
        runs: The runs.
        ignore: Settings and sections to ignore.
    """
    alike: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        alike.setdefault((run.env, run.algorithm), []).append(run)
    differing: dict[str, None] = {}
    for others in alike.values():
        for key in dict.fromkeys(key for run in others for key in run.settings):
            if len({_text(run, key) for run in others}) > 1 and not is_within(key, ignore):
                differing[key] = None
    return list(differing)


def _text(run: Run, key: str) -> str:
    return str(run.settings.get(key, NOT_SET))


def grouped(runs: Iterable[Run], keys: Sequence[str]) -> list[Group]:
    """Group runs by environment, algorithm and differing settings."""
    members: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        name = (run.env, run.algorithm, *(_text(run, key) for key in keys))
        members.setdefault(name, []).append(run)

    def order(name: tuple[str, ...]) -> list[tuple[float, str]]:
        return [(_number(part), part) for part in name]

    return [Group(n[0], n[1], n[2:], tuple(members[n])) for n in sorted(members, key=order)]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.inf


def figures(group: Group, metric: str, mode: str, threshold: float | None, n: int) -> Figures:
    """Compute the statistics of a group by column name.

    Steps and time of runs that do not reach the threshold are infinite. If half of the runs do not
    reach the threshold, the medians are missing.

    Args:
        group: The runs.
        metric: Metric to compare.
        mode: `max` if larger values are better, otherwise `min`.
        threshold: Target value for the medians of steps and time; None: no threshold.
        n: Number of bootstrap resamples.
    """
    curves = [run.curve(metric) for run in group.runs]
    better = np.max if mode == "max" else np.min
    best = np.array([better(values) for _, _, values in curves])
    found: Figures = {
        "runs": len(curves),
        "env_steps": float(np.mean([steps[-1] for steps, _, _ in curves])),
        "wall_time_s": float(np.mean([seconds[-1] for _, seconds, _ in curves])),
        **spread("final", [np.array([values[-1] for _, _, values in curves])], n),
        **spread("best", [best], n),
    }
    if threshold is not None:
        ends = np.array([_reached(curve, threshold, mode) for curve in curves])
        found["threshold"] = threshold
        found["reached"] = int(np.isfinite(ends[:, 0]).sum())
        middle = np.sort(ends, axis=0)[[(len(ends) - 1) // 2, len(ends) // 2]].mean(axis=0)
        steps, seconds = np.where(np.isfinite(middle), middle, math.nan)
        found["steps_to_threshold"], found["seconds_to_threshold"] = float(steps), float(seconds)
    return found


def spread(name: str, strata: Sequence[Array], n: int) -> Figures:
    """Compute mean, interquartile mean and bootstrap interval over one or several tasks."""
    joined = np.concatenate(strata)
    low, high = bootstrap_interval(strata, n)
    return {
        f"{name}_mean": float(joined.mean()),
        f"{name}_iqm": float(interquartile_mean(joined)),
        f"{name}_low": float(low),
        f"{name}_high": float(high),
    }


def _reached(curve: tuple[Array, Array, Array], threshold: float, mode: str) -> tuple[float, float]:
    """Return steps and seconds until the threshold is first reached, or infinity."""
    steps, seconds, values = curve
    good = np.flatnonzero(values >= threshold if mode == "max" else values <= threshold)
    return (float(steps[good[0]]), float(seconds[good[0]])) if len(good) else (math.inf, math.inf)


def overall(
    groups: Iterable[Group], metric: str, mode: str, bounds: Mapping[str, Sequence[float]], n: int
) -> dict[tuple[str, ...], Figures]:
    """Compute statistics over several environments, for groups with runs in all environments.

    Args:
        groups: All groups.
        metric: Metric to compare.
        mode: `max` if larger values are better, otherwise `min`.
        bounds: Metric values that correspond to normalized scores of 0 and 1, by environment.
        n: Number of bootstrap resamples.

    Returns:
        Statistics by name of the group (algorithm and settings).
    """
    strata: dict[tuple[str, ...], dict[str, tuple[Array, Array]]] = {}
    for group in groups:
        if group.env in bounds:
            zero, one = bounds[group.env]
            better = np.max if (mode == "max") == (one > zero) else np.min
            values = [(run.curve(metric)[2] - zero) / (one - zero) for run in group.runs]
            ends = np.array([v[-1] for v in values]), np.array([better(v) for v in values])
            strata.setdefault(group.name, {})[group.env] = ends
    return {
        name: {
            "runs": sum(len(final) for final, _ in tasks.values()),
            **spread("final", [final for final, _ in tasks.values()], n),
            **spread("best", [best for _, best in tasks.values()], n),
        }
        for name, tasks in strata.items()
        if len(tasks) == len(bounds)
    }


def shown(row: Row) -> dict[str, str]:
    """Format the main values of a row for a table; the CSV file contains all values."""
    texts = {"runs": str(row["runs"])}
    if "env_steps" in row:
        texts["steps"], texts["time"] = compact(row["env_steps"]), _time(row["wall_time_s"])
    for name in ("final", "best"):
        texts[f"{name} mean"] = readable(row[f"{name}_mean"])
        texts[f"{name} IQM [95 %]"] = iqm_text(row, name, row["runs"])
    if "reached" in row:
        steps = row["steps_to_threshold"]
        texts[f"reached {row['threshold']:g}"] = f"{row['reached']} of {row['runs']}"
        texts["at step"] = ABSENT if math.isnan(steps) else compact(steps)
        texts["after"] = _time(row["seconds_to_threshold"])
    return texts


def iqm_text(figures: Figures, name: str, n_runs: int) -> str:
    """Format an interquartile mean with its interval; with few runs, the label is "range"."""
    low, high = figures[f"{name}_low"], figures[f"{name}_high"]
    word = "range " if n_runs < FEW_RUNS else ""
    interval = "" if math.isnan(low) else f" {word}[{readable(low)}, {readable(high)}]"
    return readable(figures[f"{name}_iqm"]) + interval


def short(value: str) -> str:
    """Format the value of a setting; numbers have four significant digits."""
    number = _number(value)
    return f"{number:.4g}" if "." in value and math.isfinite(number) else value


def _time(seconds: float) -> str:
    return ABSENT if math.isnan(seconds) else duration(seconds)


COLORS = (
    *(BLUE, RED, "#d7bc07", "#541039", "#12d1fa"),
    *("#b75b93", "#37227d", "#a1bd8d", "#7d4e00", "#57606a"),
)
"""Colors of the curves. The first eight colors are distinguishable with each type of color
blindness."""

LINES = ("-", "--", "-.", ":")
"""Line styles of the curves, used cyclically."""

N_POINTS = 200
"""Maximum number of points of a curve over several runs."""

N_RESAMPLES = 1_000
"""Number of bootstrap resamples for the bands of a plot; tables use more."""

UNITS = ((2 * 3600.0, 3600.0, "h"), (2 * 60.0, 60.0, "min"), (0.0, 1.0, "s"))
"""Units of time, each with its maximum in seconds."""


def draw_comparison(
    groups: Sequence[Group], labels: Mapping[tuple[str, ...], str], metric: str, step_label: str
) -> Figure:
    """Draw interquartile means with 95 % bands without the global state of pyplot.

    Thin lines are individual runs. A curve over several runs ends with the shortest run. With few
    runs, the label of the band is "range".

    Args:
        groups: The groups to draw.
        labels: Legend labels by name of the group; groups without a label are omitted.
        metric: Metric on the y axis.
        step_label: Unit of the steps.
    """
    labels = {name: _as_text(label) for name, label in labels.items()}
    envs = list(dict.fromkeys(group.env for group in groups))
    figure = new_figure(11.0, 3.6 * len(envs) + 0.3 * -(-len(labels) // 2))
    axes = figure.subplots(len(envs), 2, squeeze=False, sharey="row")
    styles = dict(zip(labels, zip(COLORS, cycle(LINES), strict=False), strict=False))
    for env, (by_steps, by_time) in zip(envs, axes, strict=True):
        drawn = [group for group in groups if group.env == env and group.name in labels]
        curves = [[run.curve(metric) for run in group.runs] for group in drawn]
        longest = max((seconds[-1] for runs in curves for _, seconds, _ in runs), default=0.0)
        unit, word = next((unit, word) for least, unit, word in UNITS if not longest < least)
        for group, runs in zip(drawn, curves, strict=True):
            style, label = styles[group.name], labels[group.name]
            _draw(by_steps, [(steps, values) for steps, _, values in runs], style, label)
            _draw(by_time, [(seconds / unit, values) for _, seconds, values in runs], style)
        decorate(by_steps, step_label, _as_text(metric), title=_as_text(env))
        decorate(by_time, f"wall time ({word})", "", note=_band_text(drawn), counts=False)
    add_legend(figure, 2)
    return figure


def _band_text(groups: Sequence[Group]) -> str:
    """Return the description of the bands; empty without bands."""
    sizes = [len(group.runs) for group in groups if len(group.runs) > 1]
    texts = {
        f"95 % interval of {FEW_RUNS} runs or more": any(size >= FEW_RUNS for size in sizes),
        f"range of fewer than {FEW_RUNS} runs": any(size < FEW_RUNS for size in sizes),
    }
    shown = ", ".join(text for text, is_shown in texts.items() if is_shown)
    return f"band: {shown}" if shown else ""


def _as_text(name: str) -> str:
    """Escape dollar signs, since matplotlib would interpret them as formulas."""
    return printable(name).replace("$", r"\$")


def _draw(
    axes: Axes, runs: list[tuple[Array, Array]], style: tuple[str, str], label: str = ""
) -> None:
    """Draw the runs of a group and their interquartile mean with its band."""
    color, line = style
    runs = [(xs, values) for xs, values in runs if np.isfinite(xs).all()]
    start = max((xs[0] for xs, _ in runs), default=0.0)
    end = min((xs[-1] for xs, _ in runs), default=-1.0)
    if len(runs) < 2 or end < start:
        for xs, values in runs:
            curve(axes, xs, values, label, color=color, linestyle=line, linewidth=2.0)
        return
    for xs, values in runs:
        curve(axes, xs, values, color=color, linewidth=0.8, alpha=0.3, marker="")
    grid = np.unique(np.concatenate([xs for xs, _ in runs]))
    grid = grid[(grid >= start) & (grid <= end)]
    if len(grid) > N_POINTS:
        grid = np.linspace(start, end, N_POINTS)
    values = np.stack([np.interp(grid, xs, values) for xs, values in runs])
    marker = "o" if len(grid) == 1 else ""
    mean = interquartile_mean(values, axis=0)
    curve(axes, grid, mean, label, color=color, linestyle=line, marker=marker)
    band(axes, grid, *bootstrap_interval([values], N_RESAMPLES), color=color)


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
