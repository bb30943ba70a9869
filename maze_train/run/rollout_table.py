"""Rollouts with several policies, and a table of their results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from maze_train.config.rollout_config import RolloutConfig
from maze_train.core.errors import ConfigError
from maze_train.core.files import results_directory, writable
from maze_train.core.names import OUTPUTS, POLICIES_TABLE, ROLLOUTS
from maze_train.core.notices import say
from maze_train.core.report import csv_text, text_table, write_report
from maze_train.core.text import readable
from maze_train.run.rollout import RolloutRunner
from maze_train.run.rollout_report import RolloutSummary

COLUMNS = (
    *("return_mean", "return_std", "return_min", "return_max"),
    *("length_mean", "success_rate", "episodes"),
)
"""Columns of the table, from `RolloutSummary`."""


def roll_out_each(configs: Mapping[str, RolloutConfig]) -> float:
    """Play episodes with several policies, and write a table of their results.

    After an error, the table contains the policies whose episodes have finished.

    Args:
        configs: Configurations by the name of the policy, with the same output directory (None:
            `outputs/rollouts/<date>_<time>`). Results are written to one folder per policy.

    Returns:
        The largest mean return; NaN if no policy has a return.

    Raises:
        ConfigError: If the output directory already contains a table; see also `RolloutRunner.run`.
        MazeTrainError: See `RolloutRunner.run`.
    """
    given = next(iter(configs.values())).output_dir
    if given is not None and Path(given, POLICIES_TABLE).exists():
        problem = f"already contains results ({POLICIES_TABLE}); use another directory, or null"
        raise ConfigError("output_dir", problem, given)
    found: dict[str, RolloutSummary] = {}
    parent = Path(OUTPUTS, ROLLOUTS).absolute()
    with results_directory("output_dir", given, parent) as output:
        try:
            for name, config in configs.items():
                own = replace(config, output_dir=str(output / name))
                found[name] = RolloutRunner(own).run().summary
        finally:
            if found:
                _write(found, output)
    returns = [own.return_mean for own in found.values() if not math.isnan(own.return_mean)]
    return max(returns, default=math.nan)


def _write(found: Mapping[str, RolloutSummary], output: Path) -> None:
    """Write and print the table."""
    values = {name: own.as_dict() for name, own in found.items()}
    rows = [{"policy": name, **{key: own[key] for key in COLUMNS}} for name, own in values.items()]
    with writable("output_dir", output):
        write_report(output, {POLICIES_TABLE: csv_text(rows)}, {})
    shown = [key for key in COLUMNS if not all(math.isnan(own[key]) for own in values.values())]
    table = text_table(
        [
            {"policy": name, **{key.replace("_", " "): readable(own[key]) for key in shown}}
            for name, own in values.items()
        ]
    )
    say("\n".join(["", *table, "", f"results: {output}"]))
