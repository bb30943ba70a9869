"""Read runs for a comparison, and compute statistics over runs.

Source: Agarwal, Schwarzer, Castro, Courville, Bellemare (2021), Deep Reinforcement Learning at the
Edge of the Statistical Precipice, arXiv:2108.13264, sections 4.1 and 4.3.
"""

from __future__ import annotations

import glob
import hashlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from maze_train.config.stored import read_settings
from maze_train.core.checks import expanded
from maze_train.core.conversion import build_dataclass
from maze_train.core.errors import ConfigError, RunDirectoryError
from maze_train.core.files import PACKAGES
from maze_train.core.names import CONFIG, JOBS, METRICS, SUMMARY, VALIDATION_LOSS
from maze_train.core.run_directory import MetricsRow, RunDirectory
from maze_train.core.targets import TARGET, is_within
from maze_train.core.text import flattened
from maze_train.envs.config import EnvConfig
from maze_train.envs.factory import env_name
from maze_train.tracking.tracker import ENV_STEPS, TOTAL_S
from maze_train.training.config import EvaluationConfig
from maze_train.workers.job_pool import read_jobs

PACKAGE = "maze_train.algorithms."
NOT_COMPARED = ("seed", "run_dir", "resume", "trust", "moved", "tracking", "checkpoint")
"""Settings and sections that do not distinguish configurations."""

COMPARED = ("python", *PACKAGES)
"""Python and the packages whose versions are compared."""
SHORT_COMMIT, SHORT_DIGEST = 10, 6
"""Number of characters displayed for commits and digests of changes."""

SELECTING = ("n_episodes", "opponents", "metric", "mode")
"""Evaluation settings that determine how the best policy is selected."""


@dataclass(frozen=True)
class SkippedRun:
    """An excluded run with the reason."""

    name: str
    """Directory of the run, or job of a sweep."""

    reason: str


@dataclass(frozen=True)
class Run:
    """Contents of a run directory."""

    directory: Path
    env: str
    algorithm: str
    seed: int | None
    settings: dict[str, Any]
    """Settings by dotted key, except `NOT_COMPARED`."""

    rows: list[MetricsRow]
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Evaluation settings, which define the selection of the best policy."""

    versions: dict[str, str] = field(default_factory=dict)
    """Recorded versions of Python and packages by name."""

    commits: dict[str, str] = field(default_factory=dict)
    """Git commits by directory of the repository. The suffix is `+<digest>` for uncommitted changes
    and `?` if changes were not recorded."""

    outcome: Mapping[str, Any] = field(default_factory=dict)
    """Content of summary.json; empty if the file is missing."""

    def curve(self, metric: str) -> tuple[Array, Array, Array]:
        """Return the steps, seconds and metric values of all rows in which the metric is finite."""
        found = [(row[ENV_STEPS], row.get(TOTAL_S, np.nan), row.get(metric)) for row in self.rows]
        points = [point for point in found if point[2] is not None and np.isfinite(point[2])]
        steps, seconds, values = np.array(points, np.float64).reshape(-1, 3).T
        return steps, seconds, values


@dataclass(frozen=True)
class FoundRuns:
    """Run directories, and failed jobs of sweeps."""

    directories: list[Path]
    errors: dict[Path, str]
    """Error messages of failed jobs by run directory."""

    without_run: list[SkippedRun]
    """Jobs that failed before their run directory was created."""


def find_runs(names: Iterable[str]) -> FoundRuns:
    """Find the runs in the given directories, without duplicates, in the order of the names.

    Args:
        names: Run directories, directories that contain runs, or glob patterns.

    Raises:
        ConfigError: If a name matches no run.
        RunDirectoryError: If the jobs of a sweep cannot be read.
    """
    found = FoundRuns([], {}, [])
    for name in names:
        name = expanded(name)
        roots = sorted(glob.glob(name)) if glob.has_magic(name) else [name]
        before = len(found.directories) + len(found.without_run)
        known = {path.resolve() for path in found.directories}
        repeated = False
        for root in roots:
            for path in _below(Path(root).absolute(), found):
                repeated |= path.resolve() in known
                if path.resolve() not in known:
                    known.add(path.resolve())
                    found.directories.append(path)
        if len(found.directories) + len(found.without_run) == before and not repeated:
            problem = f"no run found; expected a directory with {CONFIG}, or a directory of runs"
            raise ConfigError("runs", problem, name)
    return found


def _below(root: Path, found: FoundRuns) -> Iterator[Path]:
    """Yield the run directories below a directory, without descending into runs."""
    for folder, names, files in os.walk(root):
        path = Path(folder)
        names.sort(key=lambda name: (len(name), name))  # Numeric order.
        if JOBS in files:
            for job in read_jobs(path):
                run_dir = Path(job.run_dir)
                try:
                    is_run = RunDirectory(run_dir).is_run
                except OSError as error:  # For example, the name is too long.
                    job, is_run = replace(job, error=f"run_dir: {error.strerror}"), False
                if is_run and not run_dir.is_relative_to(path):
                    yield run_dir
                if job.error and is_run:
                    found.errors[run_dir.resolve()] = job.error
                elif job.error:
                    left = SkippedRun(f"{path.name}: {job.label}", job.error)
                    found.without_run.extend([left] if left not in found.without_run else [])
        if CONFIG in files:
            names.clear()
            yield path


def read_run(directory: Path, error: str = "", unfinished: bool = False) -> Run:
    """Read a run without importing code named in its configuration.

    Args:
        directory: The run directory.
        error: Error message of a failed job; ignored if the run was resumed and has finished.
        unfinished: Whether to accept unfinished runs.

    Raises:
        RunDirectoryError: If the run has no metrics, has not finished, or a file is damaged. The
            message is the reason why the run cannot be compared.
    """
    settings = read_settings(directory).values
    rows = RunDirectory(directory).rows()
    problem = "" if unfinished else _stopped(directory, settings, rows, error)
    if not rows:
        empty = "has no rows" if RunDirectory(directory).metrics.exists() else "is missing"
        problem = problem or f"{METRICS} {empty}"
    if problem:
        raise RunDirectoryError(problem)
    if not all(math.isfinite(row.get(ENV_STEPS, math.nan)) for row in rows):
        raise RunDirectoryError(f"{METRICS} is damaged: a row has no {ENV_STEPS}")
    try:
        flat = {
            key: value
            for key, value in flattened(settings).items()
            if not is_within(key, NOT_COMPARED)
        }
        algorithm, seed = algorithm_name(settings["algorithm"]), settings.get("seed")
        given = settings.get("evaluation", {})
        selecting = {key: given[key] for key in SELECTING if key in given}
        evaluation = build_dataclass(EvaluationConfig, selecting, "evaluation")
        evaluation = _with_loss(evaluation, settings, rows)
        task, code = task_name(settings), code_of(directory)
        outcome = RunDirectory(directory).outcome
        return Run(directory, task, algorithm, seed, flat, rows, evaluation, *code, outcome)
    except (KeyError, TypeError, AttributeError, ConfigError) as cause:
        raise RunDirectoryError(f"{CONFIG} is not the configuration of a run: {cause}") from cause


def code_of(directory: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the versions and commits recorded at the last start of a run; see `Run`.

    Damaged files and values of unexpected types in `environment.json` are ignored.
    """
    last: object = None
    with suppress(RunDirectoryError, IndexError):
        last = RunDirectory(directory).read_starts()[-1]
    versions: dict[str, str] = {}
    commits: dict[str, str] = {}
    if isinstance(last, dict):
        packages, repositories = last.get("packages"), last.get("repositories")
        found = {**(packages if isinstance(packages, dict) else {}), "python": last.get("python")}
        versions = {name: found[name] for name in COMPARED if isinstance(found.get(name), str)}
        for repository in repositories if isinstance(repositories, list) else ():
            match repository:
                case {"directory": str(folder), "commit": str(commit), "diff": str() | None}:
                    commits[folder] = commit[:SHORT_COMMIT] + _changes(repository["diff"])
    return versions, commits


def _changes(diff: str | None) -> str:
    """Return the suffix of a commit for uncommitted changes."""
    if diff is None:
        return "?"
    digest = hashlib.sha256(diff.encode(errors="replace")).hexdigest()
    return f"+{digest[:SHORT_DIGEST]}" if diff else ""


def _with_loss(
    evaluation: EvaluationConfig, settings: Mapping[str, Any], rows: Sequence[MetricsRow]
) -> EvaluationConfig:
    """Return the evaluation settings with the metric that selected the best policy."""
    env, has_data = settings["env"], bool(settings["runner"].get("dataset"))
    has_env = bool(env.get("id") or env.get(TARGET))
    names = [name for name in rows[-1] if re.fullmatch(r"train/(.+/)?policy_loss", name)]
    losses = ([VALIDATION_LOSS] * (VALIDATION_LOSS in rows[-1]) + names) * has_data
    metric = evaluation.metric_of_run(has_env, losses)
    return replace(evaluation, metric=metric) if metric in losses else evaluation


def _stopped(
    directory: Path, settings: Mapping[str, Any], rows: Sequence[MetricsRow], error: str
) -> str:
    """Return the reason why a run did not finish; empty if there is no known reason."""
    summary = RunDirectory(directory).read_summary()
    if not summary:
        is_written = settings.get("tracking", {}).get("summary", False)
        return error or (f"has not ended, or was killed (no {SUMMARY})" if is_written else "")
    try:
        reason, updates = str(summary["stop_reason"]), float(summary.get("updates", math.inf))
    except (ArithmeticError, ValueError, LookupError, TypeError) as error:
        raise RunDirectoryError(f"{SUMMARY} is damaged: {error}") from error
    words = {"error": "failed (stop_reason error)", "interrupted": "was interrupted"}
    if reason in words:
        return error or words[reason]
    if rows and rows[-1].get("updates", 0) > updates:
        return error or "was resumed, and is still running or was killed"
    return ""


def algorithm_name(settings: Mapping[str, Any]) -> str:
    """Return the name of an algorithm: its folder in this package, or the user's class."""
    target = str(settings[TARGET])
    if target.startswith(PACKAGE):
        return target.removeprefix(PACKAGE).partition(".")[0]
    return target.rpartition(".")[2]


def task_name(settings: Mapping[str, Any]) -> str:
    """Return the name of the environment, or of the dataset without an environment."""
    env, dataset = settings["env"], settings["runner"].get("dataset")
    if env.get("id") or env.get(TARGET) or not dataset:
        return env_name(EnvConfig(id=env.get("id"), target=env.get(TARGET)))
    return str(dataset if isinstance(dataset, str) else dataset.get(TARGET))


Array: TypeAlias = "NDArray[np.float64]"

CONFIDENCE = 0.95
_CHUNK = 1 << 22  # Maximum number of values resampled at once.


def interquartile_mean(values: ArrayLike, axis: int = -1) -> Array:
    """Compute the mean of the middle half: floor(n / 4) of n values are dropped at each end.

    Args:
        values: Array of values. With fewer than 4 values, the result is the ordinary mean.
        axis: Axis over which the mean is taken.
    """
    ordered = np.sort(np.asarray(values, np.float64), axis=axis)
    n = ordered.shape[axis]
    middle = np.arange(n // 4, n - n // 4)
    mean: Array = np.take(ordered, middle, axis=axis).mean(axis=axis)
    return mean


def bootstrap_interval(
    strata: Sequence[Any], n_resamples: int = 10_000, seed: int = 0
) -> tuple[Array, Array]:
    """Compute the 95 % percentile bootstrap interval of the interquartile mean over all strata.

    Each stratum of n_i runs is resampled n_i times with replacement, so that every task keeps its
    weight.

    Args:
        strata: Values of the runs of each task, `[n_i, ...]`, with equal trailing axes.
        n_resamples: Number of bootstrap resamples, >= 1.
        seed: Seed of the resampling; identical data give identical intervals.

    Returns:
        Lower and upper bounds, `[...]`; NaN if no stratum has at least two runs.
    """
    arrays = [np.asarray(stratum, np.float64) for stratum in strata]
    shape = arrays[0].shape[1:]
    if max(map(len, arrays)) < 2:
        return np.full(shape, math.nan), np.full(shape, math.nan)
    rng = np.random.default_rng(seed)
    chunk = max(1, _CHUNK // sum(array.size for array in arrays))
    means = []
    for start in range(0, n_resamples, chunk):
        count = min(chunk, n_resamples - start)
        drawn = [array[rng.integers(len(array), size=(count, len(array)))] for array in arrays]
        means.append(interquartile_mean(np.concatenate(drawn, axis=1), axis=1))
    outside = 50.0 * (1.0 - CONFIDENCE)
    low, high = np.percentile(np.concatenate(means), [outside, 100.0 - outside], axis=0)
    return low, high
