"""The commands of `maze-run`, each a function of composed settings."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from maze_train.config.commands import CheckConfig, CompareConfig, ExportConfig, PushConfig
from maze_train.config.compose import build_config, composed_by_hydra, load_settings
from maze_train.config.rollout_config import RolloutConfig, rollout_config
from maze_train.config.search_config import SearchConfig, load_search_config, without_search
from maze_train.config.train_config import AUTO, TrainConfig
from maze_train.core.checks import expanded, matching_folders
from maze_train.core.errors import EnvError, RunDirectoryError
from maze_train.core.notices import say
from maze_train.core.run_directory import WHOLE, RunDirectory, objective_of
from maze_train.run.resuming import restarted_run, resumed_config

# Each function checks its settings and returns the function that runs the command. Modules are
# imported when the command runs, because PyTorch and matplotlib are slow to import.

Work: TypeAlias = Callable[[], float]


@dataclass(frozen=True)
class Given:
    """Settings that the user wrote on the command line."""

    words: Sequence[str] = ()
    """The overrides, as the user may type them."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """The values by dotted name, with interpolations unresolved."""

    changes: Callable[[], dict[str, Any]] = dict
    """Returns the resolved values by dotted name, with names of options; raises ConfigError for a
    deletion."""


def train(values: dict[str, Any], directory: str | None, given: Given) -> Work:
    """Train a policy, or resume a run with changed settings."""
    if values.get("resume") not in (None, AUTO):
        config = resumed_config(str(values["resume"]), given.changes())
    else:
        if values.get("run_dir") is None:
            values["run_dir"] = directory
        config = build_config(composed_by_hydra("train", values, given.values))
    if config.resume is None and config.run_dir is not None and restarted_run() is None:
        RunDirectory(Path(config.run_dir)).check_is_free()
    return partial(_train, config, skips_finished=directory is not None and config.resume == AUTO)


def _train(config: TrainConfig, skips_finished: bool) -> float:
    """Train and return the objective of the run, see `objective_of`.

    Raises:
        RunDirectoryError: If some of the results could not be written.
    """
    from maze_train.run.train import TrainingRunner

    if skips_finished:
        from maze_train.run.build import finished_objective

        objective = finished_objective(config)
        if objective is not None:
            say(f"{config.run_dir} has already finished")
            return objective
    result = TrainingRunner(config).run()
    if result.missing:
        remedy = "restore it" if WHOLE in result.missing else "free disk space"
        raise RunDirectoryError(
            f"training finished, but some results could not be written to {result.run_dir}: "
            f"{', '.join(result.missing)}; {remedy} and resume the run to write them"
        )
    return objective_of(result.summary.as_dict(), result.history, config.selection_metric)


def roll_out(values: dict[str, Any], directory: str | None, given: Given) -> Work:
    """Play episodes with a policy, or with each policy that a pattern in `run` matches."""
    if values.get("output_dir") is None:
        values["output_dir"] = directory
    values = composed_by_hydra("rollout", values, {}).values
    run = values.get("run")
    if not isinstance(run, str) or not glob.has_magic(run) or os.path.exists(expanded(run)):
        return partial(_roll_out, rollout_config(values))
    configs = {
        name: rollout_config({**values, "run": path})
        for name, path in matching_folders("run", run).items()
    }
    return partial(_roll_out_each, configs)


def _roll_out(config: RolloutConfig) -> float:
    from maze_train.run.rollout import RolloutRunner

    return RolloutRunner(config).run().summary.return_mean


def _roll_out_each(configs: Mapping[str, RolloutConfig]) -> float:
    from maze_train.run.rollout_table import roll_out_each

    return roll_out_each(configs)


def search(values: dict[str, Any], directory: str | None, given: Given) -> Work:
    """Run the trials of a search and print the best trials."""
    config, settings = load_search_config(values)
    return partial(_search, config, settings, without_search(given.words), directory)


def _search(
    config: SearchConfig, settings: dict[str, Any], given: list[str], directory: str | None
) -> float:
    from maze_train.tools.search import run_search

    result = run_search(config, settings, given, directory)
    say(f"\n{result}\n\nresults: {result.study}")
    return result.best_value


def check(values: dict[str, Any], directory: str | None, given: Given) -> Work:
    """Check an environment and print the report."""
    return partial(_check, load_settings(CheckConfig, values))


def _check(config: CheckConfig) -> float:
    """Check an environment.

    Raises:
        EnvError: If a check failed.
    """
    from maze_train.run.check import check_env

    report = check_env(config.env, seed=config.seed, n_steps=config.n_check_steps)
    if report.problems:
        raise EnvError(str(report))
    say(str(report))
    return math.nan


def compare(values: dict[str, Any], directory: str | None, given: Given) -> Work:
    """Compare runs and print the tables."""
    if isinstance(values["runs"], str):
        values["runs"] = [values["runs"]]
    return partial(_compare, load_settings(CompareConfig, values))


def _compare(config: CompareConfig) -> float:
    from maze_train.tools.compare import compare as compared

    comparison = compared(config)
    say(f"\n{comparison}\n\nresults: {comparison.output}")
    return math.nan


def export(values: dict[str, Any], directory: str | None, given: Given) -> Work:
    """Export a policy and print a summary."""
    return partial(_export, load_settings(ExportConfig, values))


def _export(config: ExportConfig) -> float:
    from maze_train.tools.export import run_export

    say(f"\n{run_export(config)}")
    return math.nan


def push(values: dict[str, Any], directory: str | None, given: Given) -> Work:
    """Upload a policy and print its address."""
    return partial(_push, load_settings(PushConfig, values))


def _push(config: PushConfig) -> float:
    from maze_train.tools.hub import push as pushed

    say(str(pushed(config)))
    return math.nan


class Command(NamedTuple):
    """A command of `maze-run`; a primary config has the same name."""

    work: Callable[[dict[str, Any], str | None, Given], Work]
    """Checks the settings and returns the function that runs the command and returns the objective
    value. Called with plain values, the default output directory, and the user's settings. Raises
    ConfigError if a setting is invalid."""

    keys: frozenset[str] = frozenset()
    """Keys by which the command is recognised if the user's primary config has a different name."""


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "check": Command(check, frozenset({"n_check_steps"})),
        "compare": Command(compare, frozenset({"runs", "n_resamples"})),
        "export": Command(export, frozenset({"run", "format", "output"})),
        "push": Command(push, frozenset({"run", "repo_id"})),
        "rollout": Command(roll_out, frozenset({"run", "policy", "n_episodes"})),
        "search": Command(search, frozenset({"n_trials", "sampler"})),
        "train": Command(train),
    }
)


def command_of(name: str | None, values: Mapping[Any, Any]) -> str:
    """Return the command of a composed configuration.

    Args:
        name: Name of the primary config.
        values: Composed values, used if the user's primary config extends a command.
    """
    if name is not None and name in COMMANDS:
        return name
    return next(key for key, command in COMMANDS.items() if command.keys <= values.keys())
