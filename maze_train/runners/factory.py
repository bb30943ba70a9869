"""Choice of the runner of a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maze_train.config.pipeline import prepare
from maze_train.runners.base import TrainingRunner

if TYPE_CHECKING:
    from maze_train.config.train_config import TrainConfig
    from maze_train.envs.factory import EnvFactory

__all__ = ["build_runner"]


def build_runner(config: TrainConfig, env_factory: EnvFactory | None = None) -> TrainingRunner:
    """The runner of a configuration.

    Args:
        config: The configuration.
        env_factory: Builds the environments instead of what `config.env` names.

    Raises:
        ConfigError: If parts of the configuration do not fit, see `prepare`.
        RunDirectoryError: If the configuration of a run that is continued is damaged.
    """
    return TrainingRunner(prepare(config), env_factory)
