"""Run directories written without training."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from maze_train.config.compose import load_config
from maze_train.config.stored import config_text, write_config
from maze_train.tracking.tracker import CSVWriter, RunInfo

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

RETURN = "eval/episode_return_mean"


def write_run(
    directory: Path,
    values: Sequence[float],
    stop_reason: str | None = "total_steps",
    metric: str = RETURN,
    updates: int | None = None,
    **settings: Any,
) -> Path:
    """Write a run with one row per value, each of 1,000 steps and 10 seconds.

    If `stop_reason` is None, the run has not ended. `updates` is the number of updates in its
    summary. In `settings`, double underscores stand for dots.
    """
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    given = {"algorithm": "ppo", "env": "CartPole-v1", "seed": 0, **dotted}
    config = load_config({key: value for key, value in given.items() if value is not None})
    write_config(directory, config_text(config))
    writer = CSVWriter()
    writer.start(RunInfo(run_dir=directory))
    for i, value in enumerate(values, start=1):
        counts = {"epoch": i, "updates": i, "env_steps": 1000 * i}
        writer.write({**counts, metric: value, "time/total_s": 10.0 * i})
    writer.close()
    if stop_reason is not None:
        ended = {"stop_reason": stop_reason, "updates": updates or len(values)}
        (directory / "summary.json").write_text(json.dumps(ended))
    return directory
