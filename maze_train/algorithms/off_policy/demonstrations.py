"""Demonstrations for a replay buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from maze_train.core.errors import ConfigError, DatasetError
from maze_train.core.step_end import StepEnd
from maze_train.core.types import Tensor, TensorTree, tree_leaves, tree_map
from maze_train.data.datasets import open_dataset
from maze_train.data.rollout import Rollout
from maze_train.data.trajectories import DatasetMetadata, Trajectory, checked_trajectory, joined
from maze_train.distributions.base import Distribution
from maze_train.envs.vector import MazeVectorEnv
from maze_train.spaces.describe import check_same_spaces
from maze_train.spaces.tensors import zeros_for

KEY = "algorithm.initial_demonstration_trajectories"


def read_demonstrations(
    source: str | dict[str, Any], env: MazeVectorEnv, num_envs: int, distribution: Distribution
) -> Rollout:
    """Convert recorded episodes to a rollout of the environments.

    Args:
        source: The value of `initial_demonstration_trajectories`.
        env: Training environments.
        num_envs: Number of environments, including environments of other processes.
        distribution: Distribution of the actions.

    Raises:
        ConfigError: If there are no episodes, or their spaces differ from the spaces of the
            environments.
    """
    expected = env.env_observation_space, env.single_action_space
    try:
        dataset = open_dataset(source, observation_space=expected[0], action_space=expected[1])
    except ConfigError as error:
        raise error.below(KEY) from error
    except DatasetError as error:
        raise ConfigError(KEY, str(error), source) from error
    found = (dataset.metadata.observation_space, dataset.metadata.action_space)
    problem = "the dataset has the {kind} space {found}, the environment has {wanted}"
    check_same_spaces(KEY, problem, found, expected, source)
    rollout = trajectories_as_rollout(
        dataset,
        num_envs,
        env.single_observation_space,
        env.single_action_space,
        distribution.from_env,
    )
    if rollout is None:
        raise ConfigError(KEY, "expected at least one trajectory", source)
    return rollout


def trajectories_as_rollout(
    trajectories: Iterable[Trajectory],
    num_envs: int,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    from_env: Callable[[TensorTree], TensorTree],
) -> Rollout | None:
    """Return all trajectories as one rollout of B environments.

    The concatenated steps are split into B columns of equal length; unused rows are RESET_ONLY.
    Episodes that did not terminate count as truncated.

    Args:
        trajectories: The episodes.
        num_envs: B.
        observation_space: Flat observation space of one environment.
        action_space: Action space of one environment.
        from_env: Converts environment actions to policy actions, see `Distribution.from_env`.

    Returns:
        The rollout; None if there are no trajectories.

    Raises:
        ShapeError: If shapes of observations or actions do not match the spaces.
        SpaceError: If an action is not in the action space.
    """
    metadata = DatasetMetadata(observation_space, action_space)
    leaves = metadata.leaves
    episodes = [
        checked_trajectory(episode, leaves, f"trajectory {number}")
        for number, episode in enumerate(trajectories)
    ]
    if not episodes:
        return None
    part = joined(episodes, metadata, "trajectories")
    length = -(-part.num_steps // num_envs)

    def columns(steps: Tensor) -> Tensor:
        """Reshape values of all steps `[steps, ...]` to `[T, B, ...]`, padded with zeros."""
        rows = steps.new_zeros((length * num_envs, *steps.shape[1:]))
        rows[: len(steps)] = steps
        return rows.view(num_envs, length, *steps.shape[1:]).transpose(0, 1).contiguous()

    is_step = columns(torch.ones(part.num_steps, dtype=torch.bool))
    last = torch.from_numpy(part.starts[1:] - 1)
    positions = last % length * num_envs + last // length
    end = torch.full_like(is_step, StepEnd.RESET_ONLY, dtype=torch.uint8)
    end[is_step] = StepEnd.RUNNING
    codes = np.where(part.terminated, StepEnd.TERMINATED, StepEnd.TRUNCATED)
    end.view(-1)[positions] = torch.from_numpy(codes.astype(np.uint8))
    numbers = torch.arange(part.num_episodes)
    acted_on = torch.arange(part.num_steps) + numbers.repeat_interleave(torch.tensor(part.lengths))
    obs = zeros_for(observation_space, (length + 1, num_envs))
    final_obs = zeros_for(observation_space, (part.num_episodes,))
    trees = (tree_leaves(obs), tree_leaves(final_obs), tree_leaves(part.obs))
    for target, final, recorded in zip(*trees, strict=True):
        rows = torch.from_numpy(recorded)
        # The first observation of an episode overwrites the final observation of the previous one.
        target[1:] = columns(rows[acted_on + 1])
        target[:-1][is_step] = columns(rows[acted_on]).to(target.dtype)[is_step]
        final[:] = rows[last + numbers + 1]
    return Rollout(
        obs=obs,
        actions=tree_map(columns, from_env(tree_map(torch.from_numpy, part.actions))),
        rewards=columns(torch.from_numpy(part.rewards).float()),
        end=end,
        final_obs=final_obs,
        final_positions=positions,
    )
