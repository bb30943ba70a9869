"""Builds the environments of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from maze_train.envs.factory import BoundedEnvFactory, EnvFactory, cap_on_episodes
from maze_train.envs.pooled import PooledVectorEnv
from maze_train.envs.vector import MazeVectorEnv
from maze_train.workers.backends import WorkerBackend


def build_vector_env(
    factory: EnvFactory,
    backend: WorkerBackend,
    on_non_finite: Literal["raise", "skip"],
    num_envs: int,
    first_env: int = 0,
    total_envs: int = 0,
    *,
    max_episode_steps: int | None = None,
    can_be_restored: bool = True,
    keeps_terminal_obs: bool = False,
    device: torch.device | str = "cpu",
    info_keys: Sequence[str] = (),
) -> MazeVectorEnv:
    """Build vector environments on the backend of the run's workers.

    Args:
        factory: Settings of the environments, and whether they are used for training. Wrappers
            that change rewards or episode ends are applied only in training.
        backend: Backend of the workers.
        on_non_finite: Reaction to non-finite values, see `algorithm.on_non_finite`.
        num_envs: Number of environments, >= 1.
        first_env: Index of the first environment, for error messages.
        total_envs: See `MazeVectorEnv`.
        max_episode_steps: Maximum episode length in evaluations, see `BoundedEnvFactory`.
        can_be_restored: Whether the environments must support saving and restoring their state.
        keeps_terminal_obs: Whether final observations of terminated episodes are stored.
        device: Device of a simulator.
        info_keys: Keys of final infos to report.
    """
    training = factory.training
    if factory.config.backend != "gymnasium":
        from maze_train.envs.third_party import make_third_party_env

        limit = 0 if training else cap_on_episodes(factory.config, max_episode_steps)
        env = make_third_party_env(
            factory.config,
            num_envs,
            training=training,
            num_threads=backend.num_workers(num_envs),
            max_episode_steps=limit or None,
            device=device,
            info_keys=info_keys,
        )
        env.first_env, env.keeps_terminal_obs = first_env, keeps_terminal_obs
        return env
    make_env = factory if training else BoundedEnvFactory(factory, max_episode_steps)
    return PooledVectorEnv(
        [make_env] * num_envs,
        backend,
        copy=False,
        step_infos=False,
        on_non_finite=on_non_finite,
        keeps_terminal_obs=keeps_terminal_obs,
        can_be_restored=can_be_restored,
        autoreset=training,  # Evaluations begin each of their episodes.
        first_env=first_env,
        total_envs=total_envs,
        info_keys=info_keys,
    )
