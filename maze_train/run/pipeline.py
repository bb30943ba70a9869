"""The way of a configuration from what a user gives to what a runner gets.

    values by name      Hydra composes them, or a Python user gives them
    stored_settings     with `resume=<directory>`: the settings of that run, and changes of the user
    load_config         names of options and dotted keys become mappings, these become dataclasses,
                        which check themselves; then come the defaults of the algorithm
    prepare             a base run gives its networks; a trial is shortened; the settings of a run
                        that is continued are compared; a seed is drawn

`configure` is the way to a `TrainConfig`, `prepare` the rest of it. Runners change nothing.
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
    """Directory of the run that is continued; None: a new run."""

    checkpoint: CheckpointInfo | None = None
    """Checkpoint at which the run continues; None: it begins at step 0."""

    bases: tuple[BasePolicy, ...] = ()
    """Policies whose weights training starts from; none: new weights, or those of a checkpoint."""

    assembly: Assembly = field(default_factory=Assembly)
    """Builds the optional parts of the run."""


def configure(values: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> TrainConfig:
    """Return the configuration of a run from plain values.

    Args:
        values: Values as `load_config` takes them.
        changes: Settings that are changed in the run that `resume` names; None: the values are not
            changes, but a whole configuration, also with `resume`.

    Raises:
        ConfigError: If a setting is wrong, see `load_config` and `stored_settings`.
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
        ConfigError: If there is no run to continue, a setting differs from it that changes its
            numbers, or the algorithm cannot learn with the policy of the base run.
        RunDirectoryError: If the configuration of the run that is continued is damaged.
    """
    config = config.with_defaults()
    directory, bases = None, []
    if config.resume is not None:
        from maze_train.config.resuming import run_to_resume

        directory = run_to_resume(config)
    sources = [policy for policy, own in config.policies.items() if own.run is not None]
    for policy in [*[None] * (config.base_run is not None), *sources]:
        # Imported here, as below: an error in a configuration is reported before PyTorch is needed.
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
        The metric; None if there is more to do, or the outcome is not known.
    """
    last = prepared.checkpoint
    if prepared.resumed_dir is None:
        return None
    run = RunDirectory(prepared.resumed_dir)
    try:
        # Without checkpoints, those of the run are in its file only.
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
