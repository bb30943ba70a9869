"""Conversion of user input to the checked configuration of a runner.

    values by name      composed by Hydra, or passed in Python
    stored_settings     with `resume=<directory>`: settings of that run, with the user's changes
    load_config         replaces option names and dotted keys by mappings, builds and checks the
                        dataclasses, and applies the defaults of the algorithm
    prepare             applies the networks of a base run, shortens a dry run, compares the
                        settings of a resumed run, and draws a seed

`configure` returns a `TrainConfig`; `prepare` does the remaining steps. Runners do not change the
configuration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maze_train.config.loading import load_config
from maze_train.config.train_config import AUTO, TrainConfig
from maze_train.config.writing import config_text
from maze_train.core.files import read_regular
from maze_train.core.run_directory import FAILURES, RunDirectory, checkpoint_name
from maze_train.core.seeding import draw_seed
from maze_train.nets.config import ModelConfig
from maze_train.run.assembly import Assembly
from maze_train.training.config import TRIAL_STEPS

if TYPE_CHECKING:
    from maze_train.run.base_policy import BasePolicy
    from maze_train.training.checkpoints import CheckpointInfo


@dataclass(frozen=True)
class PreparedRun:
    """A checked configuration and the initial state of the run."""

    config: TrainConfig
    """The configuration, with a seed and all defaults."""

    resumed_dir: Path | None = None
    """Directory of the resumed run; None: a new run."""

    checkpoint: CheckpointInfo | None = None
    """Checkpoint to resume from; None: start at step 0."""

    bases: tuple[BasePolicy, ...] = ()
    """Policies that initialize the weights; empty: new weights, or weights of a checkpoint."""

    assembly: Assembly = field(default_factory=Assembly)
    """Builds the optional parts of the run."""


def configure(values: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> TrainConfig:
    """Return the configuration of a run from plain values.

    Args:
        values: Values for `load_config`.
        changes: Changed settings of the run named by `resume`; None: `values` is a complete
            configuration, even with `resume`.

    Raises:
        ConfigError: If a setting is invalid, see `load_config` and `stored_settings`.
        RunDirectoryError: If the configuration of the run is damaged.
    """
    resume = values.get("resume")
    if changes is not None and resume not in (None, AUTO):
        from maze_train.config.resuming import stored_settings

        values = stored_settings(str(resume), changes)
    return load_config(values)


def prepare(config: TrainConfig) -> PreparedRun:
    """Complete a configuration and find the initial state of the run; write nothing.

    Raises:
        ConfigError: If there is no run to resume, a setting that affects its results was changed,
            or the algorithm does not support the policy of the base run.
        RunDirectoryError: If the configuration of the resumed run is damaged.
    """
    directory, bases = None, []
    if config.resume is not None:
        from maze_train.config.resuming import run_to_resume

        directory = run_to_resume(config)
    sources = [policy for policy, own in config.policies.items() if own.run is not None]
    for policy in [*[None] * (config.base_run is not None), *sources]:
        # Imported here, as below, to report configuration errors before loading PyTorch.
        from maze_train.run.base_policy import BasePolicy

        base = BasePolicy(config, policy)
        config = base.with_networks(directory)
        bases.append(base)
    config, checkpoint = shortened(config), None
    if directory is not None:
        from maze_train.config.resuming import continued
        from maze_train.training.checkpoints import CheckpointStore

        store = CheckpointStore(RunDirectory(directory).checkpoints)
        checkpoint = store.find(checkpoint_name(config.resume))
        config = continued(config, directory, checkpoint)
    if config.seed is None:
        config = replace(config, seed=draw_seed())
    return PreparedRun(config, directory, checkpoint, () if checkpoint else tuple(bases))


def best_of_finished(prepared: PreparedRun) -> float | None:
    """Return the best metric of a run that has finished and has nothing to resume.

    Args:
        prepared: The run.

    Returns:
        The metric; None if the run is unfinished, or its outcome is unknown.
    """
    last = prepared.checkpoint
    if prepared.resumed_dir is None:
        return None
    run = RunDirectory(prepared.resumed_dir)
    try:
        # Without checkpoints, the settings are only in the configuration file.
        settings = last.settings if last else read_regular(run.config).decode()
        summary = run.outcome
        is_over = str(summary["stop_reason"]) not in ("", *FAILURES)
        is_last = last is None or last.updates == int(summary["updates"])
        best = summary["best_metric"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    if not (is_over and is_last and settings == config_text(prepared.config)):
        return None
    return math.nan if best is None else float(best)


def shortened(config: TrainConfig) -> TrainConfig:
    """Shorten all parts of a dry run (`runner.fast_dev_run`)."""
    if not config.runner.fast_dev_run:
        return config
    limit = config.evaluation.max_episode_steps
    return replace(
        config,
        algorithm=config.algorithm.shortened(),
        evaluation=replace(
            config.evaluation,
            n_episodes=min(2, config.evaluation.n_episodes),
            final_episodes=min(2, config.evaluation.final_episodes),
            max_episode_steps=min(limit or TRIAL_STEPS, TRIAL_STEPS),
        ),
        model=_begins_soon(config.model),
        policies={
            key: replace(policy, model=policy.model and _begins_soon(policy.model))
            for key, policy in config.policies.items()
        },
    )


def _begins_soon(model: ModelConfig) -> ModelConfig:
    return replace(model, normalization=replace(model.normalization, n_steps=1))
