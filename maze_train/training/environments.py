"""Vector environments that algorithms train and evaluate in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maze_train.envs.foreign import make_foreign_env
from maze_train.envs.pooled import PooledVectorEnv
from maze_train.errors import EnvError
from maze_train.notices import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gymnasium import Env

    from maze_train.envs.config import EnvConfig
    from maze_train.envs.vector import MazeVectorEnv
    from maze_train.workers.places import Place


def build_vector_env(
    factories: Sequence[Callable[[], Env[Any, Any]]],
    config: EnvConfig,
    place: Place,
    on_non_finite: Any,
    first_env: int = 0,
    *,
    training: bool = True,
    max_episode_steps: int = 0,
    can_be_restored: bool = True,
) -> MazeVectorEnv:
    """Environments that are stepped in a place.

    Args:
        factories: Build single environments, one each, where the backend is gymnasium.
        config: Settings of the environments.
        place: Where their workers live.
        on_non_finite: Reaction to a bad number.
        first_env: Number of the first environment in messages.
        training: Whether rewards and ends of episodes may be changed, as in training.
        max_episode_steps: Steps after which environments of another backend cut an episode;
            0: never.
        can_be_restored: Whether their state will be asked for.
    """
    if config.backend != "gymnasium":
        env: MazeVectorEnv = make_foreign_env(
            config,
            len(factories),
            training=training,
            num_threads=place.num_workers(len(factories)),
            max_episode_steps=max_episode_steps or None,
        )
        env.first_env = first_env
        return env
    return PooledVectorEnv(
        factories,
        place,
        on_non_finite=on_non_finite,
        can_be_restored=can_be_restored,
        first_env=first_env,
    )


def close_quietly(env: Any) -> None:
    """Close environments; an error of theirs must not cost a finished training."""
    try:
        env.close()
    except EnvError as error:
        warn(str(error))
