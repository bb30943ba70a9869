"""A policy with critics of its actions, as soft actor-critics have them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from maze_train.functional.soft_actor_critic import EntropyTerms
from maze_train.nets.policy_and_critics import (
    PolicyAndCritics,
    build_policy_and_critics,
    resolve_policy_and_critics,
)

if TYPE_CHECKING:
    from gymnasium import spaces

    from maze_train.distributions.soft import SoftSample
    from maze_train.nets.config import ModelConfig
    from maze_train.types import Tensor


CRITICS = 2


class SoftActorCriticModel(PolicyAndCritics):
    """A policy, critics of observations and actions, their targets, and temperatures.

    Args:
        *parts: As for `PolicyAndCritics`.
        **others: Likewise.
    """

    _continuous: Tensor
    _choices: Tensor

    def __init__(self, *parts: Any, **others: Any) -> None:
        super().__init__(*parts, **others)
        self.log_temperatures = nn.Parameter(torch.zeros(len(self.actions.part_keys)))
        """Logarithm of the temperature of each part of the action."""

        kinds = list(zip(self.actions.parts, self.actions.is_discrete, strict=True))
        continuous = [i for i, (_, is_discrete) in enumerate(kinds) if not is_discrete]
        choices = [i for i, (part, _) in enumerate(kinds) for _ in range(part.num_choices)]
        self.register_buffer("_continuous", torch.tensor(continuous).long(), persistent=False)
        self.register_buffer("_choices", torch.tensor(choices).long(), persistent=False)

    def entropy_terms(self, sample: SoftSample, temperatures: Tensor) -> EntropyTerms:
        """Return the terms of the policy in the value of a state.

        Args:
            sample: Actions of the policy.
            temperatures: Those of the parts of the action, `[P]`.
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


def build_soft_actor_critic(
    config: ModelConfig,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    seed: int,
    num_critics: int = CRITICS,
) -> SoftActorCriticModel:
    """Build the networks that a configuration asks for.

    Where settings are null: those of `build_policy_and_critics`, and a squashed Gaussian for Box
    actions.

    Args:
        config: Model settings.
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
        seed: Seed of the initial weights; the global generator is left as it was.
        num_critics: Number of critics.

    Raises:
        ConfigError: If a setting makes no sense here, or a named network is missing, refuses its
            arguments, or has a wrong output.
        SpaceError: If no network or distribution exists for a space.
    """
    config = _with_family(config)
    return build_policy_and_critics(
        SoftActorCriticModel, config, observation_space, action_space, seed, num_critics
    )


def resolve_soft_actor_critic(config: ModelConfig, space: spaces.Space[Any]) -> ModelConfig:
    """The same settings with the defaults of soft actor-critics filled in.

    Args:
        config: Model settings; resolved ones stay as they are.
        space: Flat observation space.
    """
    return resolve_policy_and_critics(_with_family(config), space)


def _with_family(config: ModelConfig) -> ModelConfig:
    """The same settings with the family of Box actions."""
    return replace(config, distributions={"Box": "squashed_gaussian", **config.distributions})
