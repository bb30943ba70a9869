"""A policy with critics of its actions, as algorithms with a replay buffer learn them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

from maze_train.distributions.mapping import distribution_for
from maze_train.distributions.soft import SoftActions
from maze_train.nets.critics import build_critics
from maze_train.nets.policy_model import (
    POLICY_GAIN,
    Policy,
    build_masking,
    build_network,
    build_normalizer,
    input_space,
)
from maze_train.nets.target_networks import (
    ModelWithTargets,
    refuse_settings,
    resolve_with_targets,
)
from maze_train.spaces.describe import flat_space
from maze_train.spaces.masks import mask_layout

if TYPE_CHECKING:
    from gymnasium import spaces

    from maze_train.distributions.base import Distribution
    from maze_train.nets.config import ModelConfig
    from maze_train.nets.critics import Critics
    from maze_train.nets.masking import ActionMasking
    from maze_train.nets.normalization import ObservationNormalizer
    from maze_train.types import Tensor, TensorTree


Model = TypeVar("Model", bound="PolicyAndCritics")

UNUSED = {
    "shared_trunk": "policy and critics share no layers here",
    "trunk": "policy and critics share no layers here",
    "memory": "policies with a memory learn from rollouts (a2c, ppo), not from single steps",
    "value_transform": "critics of actions are not transformed",
    "value_support": "critics of actions are scalars",
}
"""Settings of networks that are built differently here, and why."""


class PolicyAndCritics(ModelWithTargets):
    """A policy, critics of observations and actions, and their targets.

    A critic reads the continuous parts of an action, scaled to [-1, 1], and gives one value for
    each choice of the discrete parts (or a single one, if there is none): the value of an action is
    the sum over its choices. For one Discrete space that is exact; several discrete parts share
    the value among them.

    Args:
        policy: The policy.
        critics: The critics; their targets begin as a copy.
        normalizer: Normalises observations, or None.
        masking: Rules out illegal actions, which a part of the observations names, or None.
    """

    def __init__(
        self,
        policy: Policy,
        critics: Critics,
        *,
        normalizer: ObservationNormalizer | None = None,
        masking: ActionMasking | None = None,
    ) -> None:
        super().__init__(normalizer, masking)
        self.policy = policy
        self.critics = critics
        self.target_critics = self.target_of(critics)
        self.actions = SoftActions(policy.distribution)

    @property
    def distribution(self) -> Distribution:
        """The family of action distributions."""
        return self.policy.distribution

    def policy_params(self, obs: TensorTree) -> Tensor:
        """Distribution parameters, `[..., param_size]`."""
        return self.params_of(self.inputs(obs), obs)

    def params_of(self, inputs: TensorTree, obs: TensorTree) -> Tensor:
        """Distribution parameters, `[..., param_size]`, of the `inputs` of observations."""
        params: Tensor = self.policy(inputs)
        return params if self.masking is None else self.masking.apply(params, obs)


def build_policy_and_critics(
    model_class: type[Model],
    config: ModelConfig,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    seed: int,
    num_critics: int,
) -> Model:
    """Build the networks that a configuration asks for.

    Where settings are null: two hidden layers of 256 units (512 above images), relu, weights as
    PyTorch initialises them.

    Args:
        model_class: Class of the model.
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
    refuse_settings(config, UNUSED)
    masks = mask_layout(observation_space, action_space)
    space = input_space(flat_space(observation_space))
    config = resolve_policy_and_critics(config, space)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        distribution = distribution_for(action_space, config.distributions)
        actions = SoftActions(distribution)
        net_size = distribution.param_size - distribution.free_param_size
        sizes = config.hidden_sizes or []
        net = build_network(config, "policy", space, sizes, net_size, POLICY_GAIN)
        output_size = actions.num_choices or 1
        critics = build_critics(config, space, num_critics, actions.critic_input_size, output_size)
        model = model_class(
            Policy(net, distribution),
            critics,
            normalizer=build_normalizer(config, space),
            masking=build_masking(distribution, masks),
        )
    model.eval()
    return model


def resolve_policy_and_critics(config: ModelConfig, space: spaces.Space[Any]) -> ModelConfig:
    """The same settings with the defaults of policies and critics of actions filled in.

    Args:
        config: Model settings; resolved ones stay as they are.
        space: Flat observation space.
    """
    return resolve_with_targets(config, space, [256, 256])
