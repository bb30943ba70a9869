"""Description of a run for its writers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from maze_train.config.train_config import TrainConfig
from maze_train.core.conversion import config_to_dict
from maze_train.core.files import versions
from maze_train.core.run_directory import MetricsRow, RunDirectory
from maze_train.core.secrets import settings_without_secrets
from maze_train.run.evaluation import selection_mode
from maze_train.tracking.tracker import RunInfo
from maze_train.training.builder import AlgorithmBuilder
from maze_train.training.checkpoints import Checkpoint
from maze_train.training.models import with_networks


def run_info(
    config: TrainConfig,
    builder: AlgorithmBuilder[Any],
    run: RunDirectory,
    resumed: Checkpoint | None,
    past_rows: Sequence[MetricsRow],
    is_resumed: bool,
) -> RunInfo:
    """Return the description of a run for its writers.

    Args:
        config: Configuration of the run.
        builder: Builder of the algorithm.
        run: Directory of the run.
        resumed: Checkpoint from which the run is resumed.
        past_rows: Rows of metrics before this checkpoint.
        is_resumed: Whether the run is resumed; without a checkpoint, the run restarts at step 0.
    """
    name, metric = config.algorithm.name, builder.selection_metric
    plain = with_networks(config_to_dict(config), config.model, config.algorithm, builder.spaces)
    settings = settings_without_secrets(plain)
    after = "" if resumed is None else f", continued from {resumed.path.name}"
    return RunInfo(
        run_dir=None if builder.context.processes.rank else run.path,
        title=f"{name.upper()} on {builder.task_name}{after}",
        name=config.tracking.name,
        group=config.tracking.group,
        past_rows=tuple(past_rows),
        resumed_at_step=(resumed.env_steps if resumed else 0) if is_resumed else None,
        config=settings,
        facts={
            "algorithm": name,
            "environment": builder.task_name,
            "seed": config.seed,
            "version": versions()["maze_train"],
            "metric": metric,
            "model": settings["model"],
        },
        total_env_steps=config.total_steps or None,
        n_epochs=config.algorithm.n_epochs or None,
        max_wall_time_s=config.runner.max_wall_time_s or None,
        step_label=builder.step_label,
        metric=metric,
        mode=selection_mode(builder),
    )
