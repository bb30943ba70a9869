"""SAC model: policy, Q-functions, target networks and temperatures."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from maze_train.core.types import Tensor
from maze_train.distributions.soft import SoftSample
from maze_train.functional.losses import EntropyTerms
from maze_train.nets.config import ModelConfig
from maze_train.nets.critics import PolicyAndCritics, build_policy_and_critics
from maze_train.nets.target_networks import resolve_with_targets

CRITICS = 2


class SoftActorCriticModel(PolicyAndCritics):
    """Policy, Q-functions, target networks and temperatures.

    Args:
        *parts: See `PolicyAndCritics`.
        **others: See `PolicyAndCritics`.
    """

    has_temperatures: bool = False
    """Whether temperatures were set or loaded."""

    _continuous: Tensor
    _choices: Tensor

    def __init__(self, *parts: Any, **others: Any) -> None:
        super().__init__(*parts, **others)
        self.log_temperatures = nn.Parameter(torch.zeros(len(self.actions.part_keys)))
        """Logarithm of the temperature of each action component."""
        self.register_load_state_dict_post_hook(_note_temperatures)  # type: ignore[no-untyped-call]  # untyped in torch

        kinds = list(zip(self.actions.parts, self.actions.is_discrete, strict=True))
        continuous = [i for i, (_, is_discrete) in enumerate(kinds) if not is_discrete]
        choices = [i for i, (part, _) in enumerate(kinds) for _ in range(part.num_choices)]
        self.register_buffer("_continuous", torch.tensor(continuous).long(), persistent=False)
        self.register_buffer("_choices", torch.tensor(choices).long(), persistent=False)

    @torch.no_grad()
    def set_temperatures(self, temperature: float) -> None:
        """Set the temperature of every action component, > 0."""
        self.log_temperatures.fill_(math.log(temperature))
        self.has_temperatures = True

    def entropy_terms(self, sample: SoftSample, temperatures: Tensor) -> EntropyTerms:
        """Return the entropy terms of the soft state value.

        Args:
            sample: Actions of the policy.
            temperatures: Temperatures of the action components, `[P]`.
        """
        if not self.actions.num_choices:
            return EntropyTerms(sample.log_probs, temperatures)
        return EntropyTerms(
            sample.log_probs,
            temperatures[self._continuous],
            sample.probs,
            sample.choice_log_probs,
            temperatures[self._choices],
        )


def _note_temperatures(model: nn.Module, incompatible: object) -> None:
    """Record that a model has loaded temperatures."""
    assert isinstance(model, SoftActorCriticModel)
    model.has_temperatures = True


def build_soft_actor_critic(
    config: ModelConfig,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    seed: int,
    num_critics: int = CRITICS,
) -> SoftActorCriticModel:
    """Build the networks for SAC.

    Defaults of null settings: see `build_policy_and_critics`, and a squashed Gaussian for Box
    actions.

    Args:
        config: Model settings.
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
        seed: Seed of the initial weights; the global generator is not affected.
        num_critics: Number of critics.

    Raises:
        ConfigError: If a setting is not supported, or a custom network cannot be found, does not
            accept its arguments, or has an invalid output.
        SpaceError: If a space is not supported by any network or distribution.
    """
    config = _with_family(config)
    return build_policy_and_critics(
        SoftActorCriticModel, config, observation_space, action_space, seed, num_critics
    )


def resolve_soft_actor_critic(config: ModelConfig, space: spaces.Space[Any]) -> ModelConfig:
    """Fill in the defaults of SAC.

    Args:
        config: Model settings; resolved settings are returned unchanged.
        space: Flat observation space.
    """
    return resolve_with_targets(_with_family(config), space)


def _with_family(config: ModelConfig) -> ModelConfig:
    """Set the default distribution of Box actions."""
    return replace(config, distributions={"Box": "squashed_gaussian", **config.distributions})
