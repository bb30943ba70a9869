"""Actor-critic model, value head, and their builders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from maze_train.core.types import Sequences, Tensor, TensorTree
from maze_train.functional.losses import clipped_value_loss, squared_value_loss
from maze_train.functional.value_transforms import ValueTransform, support_to_scalar, two_hot_loss
from maze_train.nets.config import ModelConfig
from maze_train.nets.custom import build_value_transform
from maze_train.nets.policy_model import (
    Policy,
    PolicyModel,
    build_network,
    compose_policy,
    head_of_trunk,
    input_space,
    readable,
)
from maze_train.nets.template import resolve
from maze_train.spaces.describe import flat_space


class ValueHead:
    """Converts outputs of a critic to values, and computes the value loss.

    Args:
        transform: Transform h of the targets (Pohlen et al., 2018, arXiv:1805.11593); None:
            identity.
        support: `(low, high)`: the output is a categorical distribution over these integers
            (Schrittwieser et al., 2020, arXiv:1911.08265, appendix F); None: a scalar.
    """

    def __init__(
        self, transform: ValueTransform | None = None, support: tuple[int, int] | None = None
    ) -> None:
        self.transform = transform
        self.support = support
        self.output_size = 1
        if support is not None:
            self.output_size = support[1] - support[0] + 1

    @classmethod
    def from_config(cls, config: ModelConfig) -> ValueHead:
        """Build the head from model settings."""
        transform = None
        if config.value_transform is not None:
            transform = build_value_transform(config.value_transform)
        low_and_high = config.value_support
        return cls(transform, None if low_and_high is None else (low_and_high[0], low_and_high[1]))

    def values(self, raw: Tensor) -> Tensor:
        """State values in units of returns, `[...]`, from critic outputs `[..., output_size]`."""
        values = raw.squeeze(-1)
        if self.support is not None:
            values = support_to_scalar(raw, self.support)
        return values if self.transform is None else self.transform.transform_value_inv(values)

    def targets(self, returns: Tensor) -> Tensor:
        """Convert returns to targets for `loss`, `[...]`."""
        return returns if self.transform is None else self.transform.transform_value(returns)

    def loss(
        self, raw: Tensor, targets: Tensor, old_values: Tensor, clip_range: float = 0.0
    ) -> Tensor:
        """Value loss, 0-d, of critic outputs `[..., output_size]`.

        Args:
            raw: Outputs of the critic.
            targets: Result of `targets`, `[...]`.
            old_values: Values at collection, on the same scale as `targets`, `[...]`.
            clip_range: Half-width of the clipping interval around `old_values`; 0: no clipping.
        """
        if self.support is not None:
            return two_hot_loss(raw, targets, self.support)
        if clip_range > 0:
            return clipped_value_loss(raw.squeeze(-1), old_values, targets, clip_range)
        return squared_value_loss(raw.squeeze(-1), targets)


VALUE_GAIN = 1.0


class ActorCriticModel(PolicyModel):
    """Policy and state-value critic, with optional shared and recurrent layers.

    Observations pass through normalizer, trunk and recurrent layers, if present, to the policy and
    the critic.

    Args:
        policy: The policy; takes features if there is a trunk.
        critic: Maps observations (or features) to outputs `[..., value_head.output_size]`.
        value_head: Converts critic outputs to values.
        **around: All other arguments of `PolicyModel`. The policy and the critic share the trunk
            and the recurrent layers, unless `critic_keys` is set.
    """

    learner_only = ("critic", "value_head")

    is_centralized: bool = False
    """Whether the critic uses the observations of all agents."""

    def __init__(
        self,
        policy: Policy,
        critic: nn.Module,
        value_head: ValueHead,
        **around: Any,
    ) -> None:
        super().__init__(policy, **around)
        self.critic = critic
        self.value_head = value_head

    def forward(  # type: ignore[override]  # a policy alone only returns parameters
        self, obs: TensorTree, sequences: Sequences | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return distribution parameters `[..., param_size]` and critic outputs.

        Args:
            obs: Observations, `[..., *obs shape]`; `[L * n, ...]` if recurrent.
            sequences: Time layout of the observations; only for recurrent models.
        """
        features: TensorTree = self._trunk_features(obs)
        if self.rnn is not None:
            assert sequences is not None
            assert isinstance(features, torch.Tensor)
            x = features.view(*sequences.resets.shape, -1)
            features = self.rnn.sequence(
                x, sequences.hidden_state, sequences.resets, sequences.max_resets
            ).flatten(0, 1)
        return self._masked(self.policy(features), obs), self.raw_values(features, obs)

    def raw_values(self, features: TensorTree, obs: TensorTree) -> Tensor:
        """Return outputs of the critic, `[..., output_size]`."""
        values: Tensor = self.critic(self.critic_inputs(features, obs))
        return values

    def critic_inputs(self, features: TensorTree, obs: TensorTree) -> TensorTree:
        """Return the critic's input: features shared with the policy, or the full observations."""
        if not self.critic_keys:
            return features
        return readable(obs, self.normalizer, self.masking is not None)

    def values(self, obs: TensorTree, state: Tensor | None = None) -> Tensor:
        """State values in units of returns, `[...]`.

        Args:
            obs: Observations, `[..., *obs shape]`.
            state: Recurrent state before `obs`, `[n, S]`; only for recurrent models.
        """
        features = self._trunk_features(obs) if state is None else self._remembering(obs, state)[0]
        return self.value_head.values(self.raw_values(features, obs))

    def evaluate(
        self, obs: TensorTree, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return distribution parameters, values and the recurrent state after `obs`."""
        if state is None:
            features = self._trunk_features(obs)
        else:
            features, state = self._remembering(obs, state)
        params = self._masked(self.policy(features), obs)
        return params, self.value_head.values(self.raw_values(features, obs)), state


def build_actor_critic(
    config: ModelConfig,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    seed: int,
) -> ActorCriticModel:
    """Build an actor-critic from a model configuration.

    Args:
        config: Model settings.
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
        seed: Seed of the initial weights; the global generator is not affected.

    Raises:
        ConfigError: If a custom network cannot be found, rejects its arguments, or has a wrong
            output.
        SpaceError: If a space is not supported by any network or distribution.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        head = ValueHead.from_config(config)
        part = compose_policy(config, observation_space, action_space)
        if part.critic_keys:  # Trunk and recurrent layers belong to the policy only.
            config = replace(config, trunk=None, rnn=None, shared_trunk=False)
        critic = build_critic(config, input_space(flat_space(observation_space)), head)
    return ActorCriticModel(part.policy, critic, head, **part.around).eval()


def build_critic(config: ModelConfig, space: spaces.Space[Any], head: ValueHead) -> nn.Module:
    """Build a separate critic network, or a linear layer on the features shared with the policy."""
    config = resolve(config, space)
    if config.shared_trunk:
        return head_of_trunk(config, head.output_size, VALUE_GAIN)
    own_sizes = config.critic_hidden_sizes
    sizes = (config.hidden_sizes or []) if own_sizes is None else own_sizes
    return build_network(config, "critic", space, sizes, head.output_size, VALUE_GAIN)
