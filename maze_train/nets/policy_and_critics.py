"""A policy with critics of its actions, as algorithms with a replay buffer learn them."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from maze_train.distributions.mapping import distribution_for
from maze_train.distributions.soft import SoftActions
from maze_train.errors import ConfigError
from maze_train.nets.critics import build_critics
from maze_train.nets.policy_model import (
    POLICY_GAIN,
    Policy,
    build_masking,
    build_network,
    build_normalizer,
    input_space,
    readable,
)
from maze_train.nets.template import resolve
from maze_train.spaces.describe import flat_space, holds_images
from maze_train.spaces.masks import mask_layout

if TYPE_CHECKING:
    from gymnasium import spaces

    from maze_train.distributions.base import Distribution
    from maze_train.nets.config import ModelConfig
    from maze_train.nets.critics import Critics
    from maze_train.nets.masking import ActionMasking
    from maze_train.nets.normalization import ObservationNormalizer
    from maze_train.types import Tensor, TensorTree

__all__ = [
    "PolicyAndCritics",
    "TargetNetwork",
    "build_policy_and_critics",
    "resolve_policy_and_critics",
]

Model = TypeVar("Model", bound="PolicyAndCritics")


class TargetNetwork:
    """Moves the copy of a network towards it.

    Args:
        target: The copy.
        source: The network that is trained.
    """

    def __init__(self, target: nn.Module, source: nn.Module) -> None:
        self.network = target
        # Looking for the parameters of a module takes longer than moving them.
        self._params = tuple(zip(target.parameters(), source.parameters(), strict=True))
        # Of buffers, the owners: another device or dtype replaces the buffers themselves.
        owners = zip(target.modules(), source.modules(), strict=True)
        self._owners = tuple((t, s) for t, s in owners if [*s.buffers(recurse=False)])

    @torch.no_grad()
    def update(self, tau: float) -> None:
        """Move the copy: θ' <- (1 - τ) θ' + τ θ; what is no parameter is copied."""
        for param, source in self._params:
            param.lerp_(source, tau)
        for target, current in self._owners:
            pairs = zip(target.buffers(recurse=False), current.buffers(recurse=False), strict=True)
            for buffer, value in pairs:
                buffer.copy_(value)


class PolicyAndCritics(nn.Module):
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
        super().__init__()
        self.normalizer = normalizer
        self.policy = policy
        self.critics = critics
        self._targets: list[TargetNetwork] = []
        self.target_critics = self.target_of(critics)
        self.masking = masking
        self.actions = SoftActions(policy.distribution)

    @property
    def distribution(self) -> Distribution:
        """The family of action distributions."""
        return self.policy.distribution

    def target_of(self, network: Any) -> Any:
        """A copy of a network, without gradients, which `update_targets` moves towards it."""
        copy = deepcopy(network).requires_grad_(False).eval()
        self._targets.append(TargetNetwork(copy, network))
        return copy

    def train(self, mode: bool = True) -> PolicyAndCritics:
        """Switch between training and evaluation; targets are always evaluated."""
        super().train(mode)
        for target in self._targets:
            target.network.eval()
        return self

    def policy_params(self, obs: TensorTree) -> Tensor:
        """Distribution parameters, `[..., param_size]`."""
        return self.params_of(self.inputs(obs), obs)

    def inputs(self, obs: TensorTree) -> TensorTree:
        """Inputs of the networks: no masks, normalised."""
        return readable(obs, self.normalizer, self.masking is not None)

    def params_of(self, inputs: TensorTree, obs: TensorTree) -> Tensor:
        """Distribution parameters, `[..., param_size]`, of the `inputs` of observations."""
        params: Tensor = self.policy(inputs)
        return params if self.masking is None else self.masking.apply(params, obs)

    def update_targets(self, tau: float) -> None:
        """Move the targets: θ' <- (1 - τ) θ' + τ θ; what is no parameter is copied."""
        for target in self._targets:
            target.update(tau)


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
    _check_settings(config)
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
    images = config.image_encoder != "flat" and holds_images(space)
    sizes = config.hidden_sizes
    own = replace(
        config,
        hidden_sizes=[256, 256] if sizes is None and not images else sizes,
        activation=config.activation or "relu",
        shared_trunk=False,
        orthogonal_init=bool(config.orthogonal_init),
    )
    return resolve(own, space)


def _check_settings(config: ModelConfig) -> None:
    """Refuse settings of networks that are built differently here."""
    reasons = {
        "shared_trunk": "policy and critics share no layers here",
        "trunk": "policy and critics share no layers here",
        "memory": "policies with a memory learn from rollouts (a2c, ppo), not from single steps",
        "value_transform": "critics of actions are not transformed",
        "value_support": "critics of actions are scalars",
    }
    for key, reason in reasons.items():
        if getattr(config, key):
            raise ConfigError(f"model.{key}", f"{reason}; leave it out", getattr(config, key))
