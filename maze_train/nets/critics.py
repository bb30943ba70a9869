"""Q-functions, and models that combine them with a policy and target networks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar, cast

import torch
from gymnasium import spaces
from torch import nn
from torch.compiler import is_compiling

from maze_train.core.types import Tensor, TensorTree
from maze_train.distributions.base import Distribution
from maze_train.distributions.mapping import distribution_for
from maze_train.distributions.soft import SoftActions
from maze_train.nets.blocks import activation
from maze_train.nets.config import ModelConfig
from maze_train.nets.custom import build_own
from maze_train.nets.normalization import ObservationNormalizer
from maze_train.nets.policy_model import (
    POLICY_GAIN,
    ActionMasking,
    Policy,
    build_masking,
    build_network,
    build_normalizer,
    input_space,
)
from maze_train.nets.target_networks import ModelWithTargets, refuse_settings, resolve_with_targets
from maze_train.nets.template import encoder_for
from maze_train.spaces.describe import flat_space
from maze_train.spaces.masks import mask_layout


class EnsembleMLP(nn.Module):
    """Ensemble of E multilayer perceptrons with shared inputs, computed by batched matrix products.

    Maps `[N, inputs]` to `[E, N, output_size]`. A layer has weights `[E, inputs, outputs]` and
    biases `[E, 1, outputs]`.

    Args:
        size: Number E of networks.
        inputs: Size of the input.
        hidden_sizes: Units of each hidden layer.
        nonlinearity: Name of the nonlinearity.
        output_size: Units of the linear output layer.
        orthogonal: Whether weights are orthogonal (gain sqrt(2) for hidden layers, 1 for the
            output) and biases zero; otherwise the initialisation of `nn.Linear`.
    """

    def __init__(
        self,
        size: int,
        inputs: int,
        hidden_sizes: Sequence[int],
        nonlinearity: str,
        output_size: int,
        *,
        orthogonal: bool = False,
    ) -> None:
        super().__init__()
        self.size = size
        self._activation = activation(nonlinearity)
        self._n_hidden = len(hidden_sizes)
        for i, outputs in enumerate((*hidden_sizes, output_size)):
            weight = nn.Parameter(torch.empty(size, inputs, outputs))
            bias = nn.Parameter(torch.zeros(size, 1, outputs))
            if orthogonal:
                gain = math.sqrt(2) if i < self._n_hidden else 1.0
                for member in weight:
                    nn.init.orthogonal_(member, gain)
            else:  # Use the initialisation of `nn.Linear`.
                bound = 1.0 / math.sqrt(inputs)
                nn.init.uniform_(weight, -bound, bound)
                nn.init.uniform_(bias, -bound, bound)
            self.register_parameter(f"weight_{i}", weight)
            self.register_parameter(f"bias_{i}", bias)
            inputs = outputs

    def _layers(self) -> list[tuple[Tensor, Tensor]]:
        return [
            (self._parameter(f"weight_{i}"), self._parameter(f"bias_{i}"))
            for i in range(self._n_hidden + 1)
        ]

    def _parameter(self, name: str) -> Tensor:
        # Avoids the slow attribute lookup of nn.Module, except for parametrized weights.
        found: Tensor | None = self._parameters.get(name)
        if found is None:
            found = getattr(self, name)
        assert found is not None
        return found

    def forward(self, x: Tensor, first: int | None = None) -> Tensor:
        """Return outputs `[E, N, output_size]` of all (or the first) networks for `[N, inputs]`."""
        count = self.size if first is None else first
        x = x.expand(count, *x.shape)
        for i, (weight, bias) in enumerate(self._layers()):
            if first is not None:
                weight, bias = weight[:count], bias[:count]
            x = _layer(x, weight, bias)
            if i < self._n_hidden:
                x = self._activation(x)
        return x


def _layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if weight.shape[2] == 1:  # A sum is much faster than a batched matrix product.
        return (x * weight.transpose(1, 2)).sum(2, keepdim=True) + bias
    return torch.baddbmm(bias, x, weight)


class TemplateCritics(nn.Module):
    """Ensemble of E Q-functions with a shared encoder for images and Dict observations.

    Maps observations and action features to `[E, N, output_size]`.

    Args:
        space: Flat observation space, without masks.
        config: Resolved settings of the model.
        size: Number E of critics.
        action_size: Number of action features; may be 0.
        output_size: Number of outputs per critic.
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        config: ModelConfig,
        size: int,
        action_size: int,
        output_size: int,
    ) -> None:
        super().__init__()
        self.encoder = encoder_for(space, config)
        sizes = config.critic_hidden_sizes
        if sizes is None:
            sizes = config.hidden_sizes or []
        self.layers = EnsembleMLP(
            size,
            self.encoder.output_size + action_size,
            sizes,
            str(config.activation),
            output_size,
            orthogonal=bool(config.orthogonal_init),
        )

    def forward(self, obs: TensorTree, actions: Tensor) -> Tensor:
        """Return Q-values `[E, N, output_size]` of observations and actions `[N, action_size]`."""
        return self.values(self.encode(obs), actions)

    def encode(self, obs: TensorTree) -> TensorTree:
        """Return features `[N, F]` of observations, so that images are encoded only once."""
        features: Tensor = self.encoder(obs)
        return features

    def values(self, features: TensorTree, actions: Tensor, first: int | None = None) -> Tensor:
        """Return Q-values `[E, N, output_size]` of encoded observations.

        Args:
            features: Result of `encode`.
            actions: Action features, `[N, action_size]`.
            first: Number of critics to evaluate, starting with the first; None: all E.
        """
        assert isinstance(features, torch.Tensor)
        outputs: Tensor = self.layers(torch.cat([features, actions], dim=-1), first)
        return outputs


class CustomCritics(nn.Module):
    """Ensemble of E custom Q-functions with separate weights.

    Args:
        members: Networks that map observations and `[N, action_size]` to `[N, output_size]`.
    """

    def __init__(self, members: list[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, obs: TensorTree, actions: Tensor) -> Tensor:
        """Return Q-values `[E, N, output_size]` of observations and actions `[N, action_size]`."""
        return self.values(self.encode(obs), actions)

    def encode(self, obs: TensorTree) -> TensorTree:
        """Return the observations unchanged; each custom network encodes them itself."""
        return obs

    def values(self, features: TensorTree, actions: Tensor, first: int | None = None) -> Tensor:
        """Return Q-values `[E, N, output_size]`; see `TemplateCritics.values`."""
        return torch.stack([member(features, actions) for member in self.members[:first]])


Critics: TypeAlias = TemplateCritics | CustomCritics


def build_critics(
    config: ModelConfig,
    space: spaces.Space[Any],
    size: int,
    action_size: int,
    output_size: int,
) -> Critics:
    """Build the Q-functions from a configuration.

    Args:
        config: Resolved settings of the model.
        space: Flat observation space, without masks.
        size: Number of critics.
        action_size: Number of action features; may be 0.
        output_size: Number of outputs per critic.

    Raises:
        ConfigError: If a custom network has wrong inputs or outputs.
    """
    if config.critic is None:
        return TemplateCritics(space, config, size, action_size, output_size)
    members = [
        build_own(config.critic, "model.critic", space, output_size, action_size)
        for _ in range(size)
    ]
    return CustomCritics(members)


@contextmanager
def constant(module: nn.Module) -> Iterator[None]:
    """Treat the weights of a module as constants; gradients still flow to the module's inputs."""
    if is_compiling():  # The compiler does not support `requires_grad_`.
        with _without_gradients(module):
            yield
        return
    trained = [param for param in module.parameters() if param.requires_grad]
    for param in trained:
        param.requires_grad_(False)
    try:
        yield
    finally:
        for param in trained:
            param.requires_grad_(True)


@contextmanager
def _without_gradients(module: nn.Module) -> Iterator[None]:
    """Temporarily replace the parameters of a module by detached copies."""
    parts = [(part._parameters, dict(part._parameters)) for part in module.modules()]
    for parameters, trained in parts:
        constants = {name: own.detach() for name, own in trained.items() if own is not None}
        parameters.update(cast("dict[str, nn.Parameter]", constants))
    try:
        yield
    finally:
        for parameters, trained in parts:
            parameters.update(trained)


Model = TypeVar("Model", bound="PolicyAndCritics")

UNUSED = {
    "shared_trunk": "policy and critics do not share layers",
    "trunk": "policy and critics do not share layers",
    "rnn": "recurrent policies are only supported by on-policy algorithms (a2c, ppo)",
    "critic_obs": "policy and Q-functions have the same inputs; choose a2c, ppo or impala",
    "value_transform": "Q-values are not transformed",
    "value_support": "Q-values are scalars",
}
"""Unsupported model settings, each with the reason."""


class PolicyAndCritics(ModelWithTargets):
    """Policy, Q-functions and target networks.

    The inputs of a Q-function are the observation and the continuous action components, scaled to
    [-1, 1]. A Q-function outputs one value per category of each discrete component, or a single
    value if there are no discrete components. The Q-value of an action is the sum of the values of
    the selected categories. The sum is exact for a single Discrete space, and an additive
    decomposition for several discrete components.

    Args:
        policy: The policy.
        critics: The Q-functions; their target networks are initialised as copies.
        normalizer: Observation normalizer, or None.
        masking: Action masking, or None.
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
        """The action distribution."""
        return self.policy.distribution

    def policy_params(self, obs: TensorTree) -> Tensor:
        """Distribution parameters, `[..., param_size]`."""
        return self.params_of(self.inputs(obs), obs)

    def params_of(self, inputs: TensorTree, obs: TensorTree) -> Tensor:
        """Distribution parameters, `[..., param_size]`, for network inputs."""
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
    """Build a model with a policy and Q-functions.

    Defaults of null settings: two hidden layers of 256 units (512 for images), ReLU, and PyTorch's
    weight initialisation.

    Args:
        model_class: Class of the model.
        config: Model settings.
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
        seed: Seed of the initial weights; the global generator is not affected.
        num_critics: Number of critics.

    Raises:
        ConfigError: If a setting is not supported, or a custom network cannot be found, rejects its
            arguments, or has a wrong output.
        SpaceError: If a space is not supported by any network or distribution.
    """
    refuse_settings(config, UNUSED)
    masks = mask_layout(observation_space, action_space)
    space = input_space(flat_space(observation_space))
    config = resolve_with_targets(config, space)
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
