"""Policy and critic in one module, and how they are built from spaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch import nn

from maze_train.distributions.mapping import distribution_for
from maze_train.errors import ConfigError
from maze_train.nets.blocks import MLP, add_row_sum
from maze_train.nets.template import TemplateNet
from maze_train.nets.value_head import ValueHead
from maze_train.spaces.describe import flat_space
from maze_train.spaces.tensors import sampled_for
from maze_train.targets import build_target

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gymnasium import spaces

    from maze_train.distributions.base import Distribution
    from maze_train.nets.blocks import HasVJP, InputGradient
    from maze_train.nets.config import ModelConfig
    from maze_train.types import Tensor, TensorTree

OutputGradients: TypeAlias = "Callable[[Tensor | None, Tensor | None], None]"

__all__ = ["ActorCriticModel", "Policy", "build_actor_critic"]

POLICY_GAIN = 0.01
VALUE_GAIN = 1.0


class Policy(nn.Module):
    """Maps observations to the parameters of an action distribution.

    Args:
        net: Maps observations (or features of a shared trunk) to
            `[..., param_size - free_param_size]`.
        distribution: The family of distributions; it says how many parameters it needs and which
            of them do not depend on the state.
    """

    def __init__(self, net: nn.Module, distribution: Distribution) -> None:
        super().__init__()
        self.net = net
        self.distribution = distribution
        self.free_params: nn.Parameter | None = None
        if distribution.free_param_size:
            self.free_params = nn.Parameter(distribution.initial_free_params())

    def forward(self, obs: TensorTree) -> Tensor:
        """Distribution parameters, `[..., param_size]`."""
        params: Tensor = self.net(obs)
        if self.free_params is None:
            return params
        free = self.free_params.expand(*params.shape[:-1], -1)
        return torch.cat([params, free], dim=-1)

    def vjp(self, obs: TensorTree) -> tuple[Tensor, InputGradient]:
        """Like `forward`, without a graph, and with a function that writes gradients."""
        net_outputs, net_gradient = cast("HasVJP", self.net).vjp(obs)
        free_params = self.free_params
        if free_params is None:
            return net_outputs, net_gradient
        free = free_params.detach().expand(*net_outputs.shape[:-1], -1)

        def gradient(grad: Tensor, of_input: bool) -> Tensor | None:
            size = net_outputs.shape[-1]
            add_row_sum(free_params, grad[..., size:])
            return net_gradient(grad[..., :size], of_input)

        return torch.cat([net_outputs, free], dim=-1), gradient


class ActorCriticModel(nn.Module):
    """A policy and a state-value critic, with or without shared hidden layers.

    Args:
        policy: The policy; reads features when there is a trunk.
        critic: Maps observations (or features) to raw values `[..., value_head.output_size]`.
        value_head: Meaning of the critic's output.
        trunk: Hidden layers that both share, or None.
    """

    def __init__(
        self,
        policy: Policy,
        critic: nn.Module,
        value_head: ValueHead,
        trunk: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.trunk = trunk
        self.policy = policy
        self.critic = critic
        self.value_head = value_head

    @property
    def distribution(self) -> Distribution:
        """The family of action distributions."""
        return self.policy.distribution

    def forward(self, obs: TensorTree) -> tuple[Tensor, Tensor]:
        """Distribution parameters `[..., param_size]` and raw values `[..., output_size]`."""
        features = obs if self.trunk is None else self.trunk(obs)
        return self.policy(features), self.critic(features)

    def policy_params(self, obs: TensorTree) -> Tensor:
        """Distribution parameters, `[..., param_size]`."""
        params: Tensor = self.policy(obs if self.trunk is None else self.trunk(obs))
        return params

    def values(self, obs: TensorTree) -> Tensor:
        """State values in units of returns, `[...]`."""
        return self.value_head.values(self.critic(obs if self.trunk is None else self.trunk(obs)))

    def vjp(self, obs: TensorTree) -> tuple[Tensor, Tensor, OutputGradients]:
        """Like `forward`, without a graph, and with a function that writes gradients.

        Template networks have gradients by hand; with any other network among them the whole model
        is differentiated automatically.

        Args:
            obs: Observations, `[N, ...]`.

        Returns:
            Distribution parameters `[N, param_size]`, raw values `[N, output_size]`, and a function
            of the gradients of a loss with respect to the two (None: no gradient) that adds those
            of the parameters to their `.grad`.
        """
        nets = [self.policy.net, self.critic, *([self.trunk] if self.trunk is not None else [])]
        # The exact type: a subclass may compute something else than its parent's gradients are for.
        if not all(type(net) in (MLP, TemplateNet) for net in nets):
            return self._automatic_vjp(obs)
        features: TensorTree = obs
        trunk_gradient: InputGradient | None = None
        if self.trunk is not None:
            features, trunk_gradient = cast("HasVJP", self.trunk).vjp(obs)
        params, policy_gradient = self.policy.vjp(features)
        raw_values, critic_gradient = cast("HasVJP", self.critic).vjp(features)
        has_trunk = trunk_gradient is not None

        def gradient(d_params: Tensor | None, d_raw_values: Tensor | None) -> None:
            d_features = []
            if d_params is not None:
                d_features.append(policy_gradient(d_params, has_trunk))
            if d_raw_values is not None:
                d_features.append(critic_gradient(d_raw_values, has_trunk))
            if trunk_gradient is not None:
                total = sum(part for part in d_features if part is not None)
                assert isinstance(total, torch.Tensor)
                trunk_gradient(total, False)

        return params, raw_values, gradient

    def _automatic_vjp(self, obs: TensorTree) -> tuple[Tensor, Tensor, OutputGradients]:
        with torch.enable_grad():
            outputs = self(obs)

        def gradient(*gradients: Tensor | None) -> None:
            with torch.enable_grad():
                terms = [
                    (x * g).sum() for x, g in zip(outputs, gradients, strict=True) if g is not None
                ]
                total = sum(terms)
            if isinstance(total, torch.Tensor) and total.requires_grad:
                total.backward()  # type: ignore[no-untyped-call]  # untyped in torch

        return outputs[0].detach(), outputs[1].detach(), gradient


def build_actor_critic(
    config: ModelConfig,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    seed: int,
) -> ActorCriticModel:
    """Build the networks that a configuration asks for.

    Args:
        config: Model settings.
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
        seed: Seed of the initial weights; the global generator is left as it was.

    Raises:
        ConfigError: If a named network is missing, refuses its arguments, or has a wrong output.
        SpaceError: If no network or distribution exists for a space.
    """
    space = flat_space(observation_space)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        distribution = distribution_for(action_space, config.distributions)
        head = ValueHead.from_config(config)
        net_size = distribution.param_size - distribution.free_param_size
        if config.shared_trunk:
            size = config.hidden_sizes[-1]
            trunk = _network(config, "trunk", space, config.hidden_sizes, size, 0.0)
            policy_net: nn.Module = _head(config, size, net_size, POLICY_GAIN)
            critic: nn.Module = _head(config, size, head.output_size, VALUE_GAIN)
        else:
            trunk = None
            sizes = config.hidden_sizes
            critic_sizes = (
                sizes if config.critic_hidden_sizes is None else config.critic_hidden_sizes
            )
            policy_net = _network(config, "policy", space, sizes, net_size, POLICY_GAIN)
            critic = _network(config, "critic", space, critic_sizes, head.output_size, VALUE_GAIN)
        model = ActorCriticModel(Policy(policy_net, distribution), critic, head, trunk)
    return model.eval()


def _head(config: ModelConfig, inputs: int, output_size: int, gain: float) -> MLP:
    """A linear head of a shared trunk."""
    return MLP(
        inputs,
        [],
        config.activation,
        output_size=output_size,
        orthogonal=config.orthogonal_init,
        output_gain=gain,
    )


def _network(
    config: ModelConfig,
    role: str,
    space: spaces.Space[Any],
    hidden_sizes: list[int],
    output_size: int,
    gain: float,
) -> nn.Module:
    """The network named in `config` for this role, or the template."""
    node = getattr(config, role)
    if node is None:
        if role == "trunk":
            return TemplateNet(space, config, hidden_sizes)
        return TemplateNet(space, config, hidden_sizes, output_size, gain)
    key = f"model.{role}"
    net = build_target(node, key=key, observation_space=space, output_size=output_size)
    if not isinstance(net, nn.Module):
        raise ConfigError(key, "expected a torch.nn.Module", type(net).__name__)
    _check_output(net, space, output_size, key)
    return net


def _check_output(net: nn.Module, space: spaces.Space[Any], output_size: int, key: str) -> None:
    """Run a user's network once, so that a wrong output size is told before training."""
    obs = sampled_for(space, 2)
    net.eval()
    with torch.no_grad():
        try:
            output = net(obs)
        except Exception as error:
            raise ConfigError(
                key, f"a forward pass on observations of {space} failed: {error}"
            ) from error
    if not isinstance(output, torch.Tensor) or output.shape != (2, output_size):
        got = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise ConfigError(
            key, f"expected outputs of shape [batch, {output_size}] (argument output_size)", got
        )
