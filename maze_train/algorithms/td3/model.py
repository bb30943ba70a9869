"""Deterministic policies with critics of their actions, and targets of both."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from gymnasium.spaces import Box

from maze_train.errors import ConfigError, SpaceError
from maze_train.learner.config import Progress, Schedule, scheduled_value
from maze_train.nets.policy_and_critics import (
    PolicyAndCritics,
    build_policy_and_critics,
    resolve_policy_and_critics,
)
from maze_train.spaces.describe import flat_spaces
from maze_train.targets import TARGET

if TYPE_CHECKING:
    from gymnasium import spaces

    from maze_train.nets.config import ModelConfig
    from maze_train.nets.policy_model import Policy
    from maze_train.types import Tensor, TensorTree


FAMILY = "maze_train.algorithms.td3.actions.NoisyActions"
"""The family of actions."""

STDDEV = "exploration_noise_stddev"


class TD3Model(PolicyAndCritics):
    """A deterministic policy, critics of observations and actions, and targets of both.

    Args:
        *parts: As for `PolicyAndCritics`.
        **others: Likewise.

    Attributes:
        exploration_noise_stddev: Standard deviation of the noise of actions, 0-d; saved with the
            weights where it changes.
    """

    exploration_noise_stddev: Tensor

    def __init__(self, *parts: Any, **others: Any) -> None:
        super().__init__(*parts, **others)
        self.target_policy = self.target_of(self.policy)

    def policy_params(self, obs: TensorTree) -> Tensor:
        """Distribution parameters, `[..., param_size]`; the family gets the noise of the moment."""
        stddev = float(self.exploration_noise_stddev)
        for family in self.distribution.parts.values():
            family.noise_stddev = stddev  # type: ignore[attr-defined]  # NoisyActions
        return super().policy_params(obs)

    def actions_of(self, policy: Policy, inputs: TensorTree) -> Tensor:
        """Actions of a policy, scaled to [-1, 1], `[n, D]`, for the `inputs` of observations."""
        return self.actions.critic_input(self.distribution.mode(policy(inputs)))


def build_td3(
    config: ModelConfig,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    seed: int,
    num_critics: int = 2,
    noise_stddev: float | Schedule = 0.1,
) -> TD3Model:
    """Build the networks that a configuration asks for.

    Args:
        config: Model settings; null ones as for `build_policy_and_critics`.
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
        seed: Seed of the initial weights; the global generator is left as it was.
        num_critics: Number of critics.
        noise_stddev: Standard deviation of the noise that explores.

    Raises:
        ConfigError: If a setting makes no sense here, or a named network is missing, refuses its
            arguments, or has a wrong output.
        SpaceError: If an action is no Box with finite bounds, or no network exists for a space.
    """
    for key, space in flat_spaces(action_space).items():
        if not isinstance(space, Box):
            named = f"part {key!r} of the action space" if key else "the action space"
            raise SpaceError(
                f"td3 needs Box actions, {named} is {space}: choose algorithm=sac, which takes "
                "discrete actions too"
            )
    for key, family in config.distributions.items():
        if family != {TARGET: FAMILY}:
            problem = "td3 has a deterministic policy of its own: leave it out"
            raise ConfigError(f"model.distributions.{key}", problem, family)
    at_first = scheduled_value(noise_stddev, Progress())
    noisy = {TARGET: FAMILY, "noise_stddev": at_first}
    config = replace(config, distributions={"Box": noisy})
    model = build_policy_and_critics(
        TD3Model, config, observation_space, action_space, seed, num_critics
    )
    changes = isinstance(noise_stddev, Schedule)
    model.register_buffer(STDDEV, torch.tensor(at_first), persistent=changes)
    return model


def resolve_td3(config: ModelConfig, space: spaces.Space[Any]) -> ModelConfig:
    """The same settings with the defaults of TD3 filled in.

    Args:
        config: Model settings; resolved ones stay as they are.
        space: Flat observation space.
    """
    families = {"Box": {TARGET: FAMILY}, **config.distributions}
    return resolve_policy_and_critics(replace(config, distributions=families), space)
