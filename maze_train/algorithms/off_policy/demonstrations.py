"""Demonstrations that a replay buffer begins with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maze_train.data.datasets import open_dataset
from maze_train.data.trajectories import trajectories_as_rollout
from maze_train.errors import ConfigError, DatasetError
from maze_train.spaces.compare import check_same_spaces

if TYPE_CHECKING:
    from maze_train.data.rollout import Rollout
    from maze_train.distributions.base import Distribution
    from maze_train.envs.vector import MazeVectorEnv


KEY = "algorithm.initial_demonstration_trajectories"


def read_demonstrations(
    source: str | dict[str, Any], env: MazeVectorEnv, distribution: Distribution
) -> Rollout:
    """Recorded episodes as a rollout of the environments.

    Args:
        source: The value of `initial_demonstration_trajectories`.
        env: The environments that training goes on with.
        distribution: The family of actions.

    Raises:
        ConfigError: If there are none, or their spaces are not those of the environments.
    """
    spaces = env.env_observation_space, env.single_action_space
    try:
        dataset = open_dataset(source, observation_space=spaces[0], action_space=spaces[1])
    except ConfigError as error:
        raise error.below(KEY) from error
    except DatasetError as error:
        raise ConfigError(KEY, str(error), source) from error
    found = (dataset.metadata.observation_space, dataset.metadata.action_space)
    problem = "it has the {kind} space {found}, the environment has {wanted}"
    check_same_spaces(KEY, problem, found, spaces, source)
    rollout = trajectories_as_rollout(
        dataset,
        env.num_envs,
        env.single_observation_space,
        env.single_action_space,
        distribution.from_env,
    )
    if rollout is None:
        raise ConfigError(KEY, "expected at least one trajectory", source)
    return rollout
