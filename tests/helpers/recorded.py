"""Small datasets of recorded episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.data.trajectories import DatasetMetadata, Trajectory
from maze_train.data.trajectory_files import TrajectoryWriter
from maze_train.spaces.describe import FlatView, flatten_value

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import gymnasium


def record(
    directory: Path,
    env: gymnasium.Env[Any, Any],
    act: Callable[[Any], Any] | None = None,
    n_episodes: int = 10,
    max_steps: int = 30,
) -> Path:
    """Record episodes of a function of observations, by default of random actions."""
    metadata = DatasetMetadata(
        env.observation_space, env.action_space, {"id": env.spec.id if env.spec else None}
    )
    env.action_space.seed(0)
    with TrajectoryWriter(directory, metadata, part_nbytes=2000) as writer:
        for seed in range(n_episodes):
            writer.add(
                one_episode(env, act or (lambda _: env.action_space.sample()), seed, max_steps)
            )
    env.close()
    return directory


def one_episode(
    env: gymnasium.Env[Any, Any], act: Callable[[Any], Any], seed: int, max_steps: int
) -> Trajectory:
    """Return one episode, truncated after `max_steps`."""
    obs, _ = env.reset(seed=seed)
    observations, actions, rewards = [obs], [], []
    terminated = truncated = False
    while not (terminated or truncated):
        action = act(obs)
        obs, reward, terminated, truncated, _ = env.step(action)
        truncated = truncated or len(rewards) + 1 >= max_steps
        observations.append(obs)
        actions.append(action)
        rewards.append(float(reward))
    return Trajectory(
        obs=stacked(env.observation_space, observations),
        actions=stacked(env.action_space, actions),
        rewards=np.array(rewards),
        terminated=bool(terminated),
        truncated=bool(truncated and not terminated),
        seed=seed,
    )


def stacked(space: gymnasium.Space[Any], values: list[Any]) -> Any:
    """Return values of a space as an array, or as one array per leaf."""
    flat = [flatten_value(space, value) for value in values]
    view = FlatView(space)
    if view.is_single:
        return np.stack([np.asarray(value, space.dtype) for value in flat])
    return {
        key: np.stack([np.asarray(value[key], leaf.dtype) for value in flat])
        for key, leaf in view.leaves.items()
    }


def cartpole_heuristic(obs: Any) -> int:
    """Push the cart to the side where the pole leans and falls."""
    return int(3 * obs[2] + obs[3] > 0)
