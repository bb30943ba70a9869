"""Choice of the runner that a configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maze_train.config.pipeline import prepare
from maze_train.errors import ConfigError
from maze_train.runners.base import TrainingRunner
from maze_train.targets import locate

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
        ConfigError: If the class that the algorithm names is not a `TrainingRunner`, or as
            `prepare`.
    """
    path = config.algorithm.runner_class
    runner_class = locate(path, key="runner")
    if not (isinstance(runner_class, type) and issubclass(runner_class, TrainingRunner)):
        raise ConfigError("runner", "expected a subclass of maze_train.TrainingRunner", path)
    return runner_class(prepare(config), env_factory)
