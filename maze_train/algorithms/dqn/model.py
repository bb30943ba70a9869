"""DQN model: Q-network, target network and epsilon-greedy policy."""

from __future__ import annotations

import math
from typing import Any

import torch
from gymnasium import spaces
from gymnasium.spaces import Discrete
from torch import nn

from maze_train.algorithms.dqn import quantiles
from maze_train.core.errors import ConfigError, SpaceError
from maze_train.core.types import Tensor, TensorTree
from maze_train.distributions.categorical import Categorical, impossible_logit
from maze_train.nets.blocks import MLP
from maze_train.nets.config import ModelConfig
from maze_train.nets.normalization import ObservationNormalizer
from maze_train.nets.policy_model import (
    ActionMasking,
    build_masking,
    build_network,
    build_normalizer,
    input_space,
)
from maze_train.nets.target_networks import ModelWithTargets, refuse_settings, resolve_with_targets
from maze_train.nets.template import TemplateNet
from maze_train.spaces.describe import flat_space
from maze_train.spaces.masks import mask_layout

UNUSED = {
    "critic": "the Q-network is model.policy",
    "critic_hidden_sizes": "the Q-network uses hidden_sizes",
    "shared_trunk": "there is only one network",
    "trunk": "there is only one network",
    "rnn": "recurrent policies are only supported by on-policy algorithms (a2c, ppo)",
    "distributions": "dqn uses an epsilon-greedy policy",
    "critic_obs": "policy and Q-functions have the same inputs; choose a2c, ppo or impala",
    "value_transform": "Q-values are not transformed",
    "value_support": "use algorithm.num_quantiles for distributional Q-values",
}
"""Unsupported model settings, with the reason."""

MIN_LEAD, MAX_LEAD = 1e-6, 1e4
"""Limits of the logit of the greedy action. The lower limit makes the greedy action the mode for
epsilon 1; with the upper limit, all other actions have probability 0 for epsilon 0."""


class DuelingNet(nn.Module):
    """Dueling network: Q(s, a) = V(s) + A(s, a) - mean_b A(s, b).

    Both streams share all hidden layers except the last. Maps observations `[..., *obs shape]` to
    `[..., num_actions * size]`.

    Source: Wang et al. (2016), arXiv:1511.06581, eq. 9.

    Args:
        space: Flat observation space, without masks.
        config: Resolved settings of the model.
        num_actions: Number of actions.
        size: Number of outputs per action.
    """

    def __init__(
        self, space: spaces.Space[Any], config: ModelConfig, num_actions: int, size: int = 1
    ) -> None:
        super().__init__()
        self.size = size
        sizes = config.hidden_sizes or []
        self.shared = TemplateNet(space, config, sizes[:-1])

        def stream(output_size: int) -> MLP:
            return MLP(
                self.shared.output_size,
                sizes[-1:],
                str(config.activation),
                output_size=output_size,
                orthogonal=bool(config.orthogonal_init),
            )

        self.value, self.advantages = stream(size), stream(num_actions * size)

    def forward(self, obs: TensorTree) -> Tensor:
        """Q-values (or quantiles) of all actions, `[..., num_actions * size]`."""
        features = self.shared(obs)
        value: Tensor = self.value(features)
        advantages: Tensor = self.advantages(features)
        if self.size == 1:
            return value + advantages - advantages.mean(-1, keepdim=True)
        parts = quantiles.of_actions(advantages, self.size)
        return (value.unsqueeze(-2) + parts - parts.mean(-2, keepdim=True)).flatten(-2)


class DQNModel(ModelWithTargets):
    """Q-network with an epsilon-greedy policy, and its target network.

    Args:
        policy: Maps observations to the Q-values of all actions, `[..., n]`, or to M quantiles of
            each action, `[..., n * M]`. The target network is initialised as a copy.
        distribution: Distribution of the actions.
        num_quantiles: M; 0: outputs are Q-values.
        normalizer: Observation normalizer, or None.
        masking: Action masking, or None.

    Attributes:
        epsilon: Probability of a random action, 0-d; saved with the weights.
    """

    epsilon: Tensor

    def __init__(
        self,
        policy: nn.Module,
        distribution: Categorical,
        *,
        num_quantiles: int = 0,
        normalizer: ObservationNormalizer | None = None,
        masking: ActionMasking | None = None,
    ) -> None:
        super().__init__(normalizer, masking)
        self.policy = policy
        self.target_policy = self.target_of(policy)
        self._distribution = distribution
        self.num_quantiles = num_quantiles
        self.register_buffer("epsilon", torch.ones(()))

    @property
    def distribution(self) -> Categorical:
        """Distribution of the actions."""
        return self._distribution

    def set_exploration(self, value: float) -> None:
        """Set epsilon."""
        self.epsilon.fill_(value)

    def action_values(self, outputs: Tensor) -> Tensor:
        """Return the Q-values of all actions, `[..., n]`, from network outputs."""
        if not self.num_quantiles:
            return outputs
        return quantiles.of_actions(outputs, self.num_quantiles).mean(-1)

    def legal(self, values: Tensor, obs: TensorTree) -> Tensor:
        """Set the values `[..., n]` of illegal actions to half the minimum of the dtype."""
        return values if self.masking is None else self.masking.apply(values, obs)

    def values(self, obs: TensorTree) -> Tensor:
        """Return the Q-values of the best legal actions, `[...]`."""
        return self.legal(self.action_values(self.policy(self.inputs(obs))), obs).amax(-1)

    def policy_params(self, obs: TensorTree) -> Tensor:
        """Return the logits of the epsilon-greedy policy, `[..., n]`; the mode is greedy.

        With m legal actions, the logits are log(1 + m (1 - ε) / ε) for the greedy action and 0 for
        all other legal actions. The probabilities are 1 - ε + ε / m and ε / m.
        """
        values: Tensor = self.legal(self.action_values(self.policy(self.inputs(obs))), obs)
        logits, best = torch.zeros_like(values), values.argmax(-1, keepdim=True)
        # Arithmetic with a Python float is much faster than with a one-element tensor.
        epsilon = float(self.epsilon)
        odds = (1.0 - epsilon) / epsilon if epsilon > 0.0 else math.inf
        if self.masking is None:
            lead = math.log1p(odds * values.shape[-1])
            return logits.scatter_(-1, best, min(max(lead, MIN_LEAD), MAX_LEAD))
        lowest = impossible_logit(values.dtype)
        is_legal = values > lowest
        leads = torch.log1p(is_legal.sum(-1, keepdim=True) * odds).clamp(MIN_LEAD, MAX_LEAD)
        return logits.masked_fill_(~is_legal, lowest).scatter_(-1, best, leads)


def build_dqn(
    config: ModelConfig,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    seed: int,
    dueling: bool = False,
    num_quantiles: int = 0,
) -> DQNModel:
    """Build the networks of DQN.

    Defaults of null settings: two hidden layers of 64 units (one of 512 for images), ReLU, and
    PyTorch's weight initialisation.

    Args:
        config: Model settings; `policy` is the Q-network.
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
        seed: Seed of the initial weights; the global generator is not affected.
        dueling: Whether the network is a `DuelingNet`.
        num_quantiles: Number of quantiles of the return per action; 0: network outputs are
            Q-values.

    Raises:
        ConfigError: If a setting is not supported, or a custom network cannot be found, does not
            accept its arguments, or has an invalid output.
        SpaceError: If the action space is not Discrete, or an observation is not supported.
    """
    if not isinstance(action_space, Discrete):
        raise SpaceError(
            f"dqn requires one Discrete action, the action space is {action_space}: choose "
            "algorithm=sac or algorithm=ppo"
        )
    refuse_settings(config, UNUSED)
    if dueling and config.policy is not None:
        raise ConfigError(
            "algorithm.dueling",
            "only for template networks: remove this setting or model.policy",
            dueling,
        )
    masks = mask_layout(observation_space, action_space)
    space = input_space(flat_space(observation_space))
    config = resolve_dqn(config, space)
    distribution = Categorical(action_space)
    n, sizes = distribution.param_size, config.hidden_sizes or []
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        net: nn.Module
        size = num_quantiles or 1
        if dueling:
            net = DuelingNet(space, config, n, size)
        else:
            net = build_network(config, "policy", space, sizes, n * size, 1.0)
        normalizer, masking = build_normalizer(config, space), build_masking(distribution, masks)
        model = DQNModel(
            net,
            distribution,
            num_quantiles=num_quantiles,
            normalizer=normalizer,
            masking=masking,
        )
    model.eval()
    return model


def resolve_dqn(config: ModelConfig, space: spaces.Space[Any]) -> ModelConfig:
    """Fill in the defaults of DQN.

    Args:
        config: Model settings; resolved settings are returned unchanged.
        space: Flat observation space.
    """
    return resolve_with_targets(config, space, [64, 64])
