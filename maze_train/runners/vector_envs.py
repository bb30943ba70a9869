"""Vector environments of runners, and their collectors."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from maze_train.envs.foreign import make_foreign_env
from maze_train.envs.sequential import SequentialVectorEnv
from maze_train.envs.subprocess_env import SubprocVectorEnv
from maze_train.errors import TrainingError
from maze_train.workers.places import LocalProcesses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from gymnasium import Env

    from maze_train.config.train_config import TrainConfig
    from maze_train.envs.factory import EnvFactory
    from maze_train.envs.vector import MazeVectorEnv
    from maze_train.nets.config import ObservationNormalizationConfig
    from maze_train.nets.normalization import ObservationNormalizer
    from maze_train.rollout.acting import ActingModel, RecurrentModel
    from maze_train.rollout.collector import RolloutCollector
    from maze_train.workers.places import Place

__all__ = ["begin_statistics", "build_actor_env", "build_vector_env", "num_env_threads"]


def build_vector_env(
    factories: Sequence[Callable[[], Env[Any, Any]]], place: Place, on_non_finite: Any
) -> MazeVectorEnv:
    """Environments that are stepped in a place."""
    if isinstance(place, LocalProcesses):
        return SubprocVectorEnv(factories, on_non_finite=on_non_finite, **asdict(place))
    return SequentialVectorEnv(factories, on_non_finite=on_non_finite)


def build_actor_env(
    factory: EnvFactory,
    config: TrainConfig,
    num_envs: int,
    first_env: int = 0,
    *,
    can_be_restored: bool,
) -> MazeVectorEnv:
    """The environments of an actor, all stepped in its process."""
    if config.env.backend != "gymnasium":
        env = make_foreign_env(config.env, num_envs, training=True, num_threads=1)
        env.first_env = first_env
        return env
    return SequentialVectorEnv(
        [factory] * num_envs,
        on_non_finite=config.algorithm.on_non_finite,
        can_be_restored=can_be_restored,
        first_env=first_env,
    )


def num_env_threads(place: Place) -> int:
    """Threads of vector environments that have their own: as many as there would be workers.

    0: one per core.
    """
    return place.n_workers if isinstance(place, LocalProcesses) else 1


def begin_statistics(
    normalizer: ObservationNormalizer | None,
    config: ObservationNormalizationConfig,
    make_collector: Callable[[], RolloutCollector],
    model: ActingModel | RecurrentModel,
) -> None:
    """Take statistics of observations before training, if there are too few yet.

    Args:
        normalizer: Normaliser that takes them.
        config: Settings of the normalisation.
        make_collector: Makes what collects observations; training begins with new episodes.
        model: The acting model.

    Raises:
        TrainingError: If every step of a rollout was lost; else this would never end.
    """
    if normalizer is None or normalizer.frozen:
        return
    collector, steps = None, int(normalizer.count)
    while steps < config.initial_steps:
        collector = collector or make_collector()
        rollout, _ = collector.collect(model)
        if not rollout.num_samples:
            raise TrainingError(
                "every step of a rollout was lost before training: the environments return numbers "
                "that are not finite, or their workers fail, at the beginning of each episode"
            )
        normalizer.update(rollout.to(normalizer.mean.device).acted_on(normalizer.keys))
        steps += rollout.num_samples
    if config.mode == "estimated":
        normalizer.freeze()
