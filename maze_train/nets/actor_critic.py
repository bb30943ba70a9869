"""Policy and critic in one module, and how they are built from spaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from maze_train.distributions.mapping import distribution_for
from maze_train.errors import ConfigError
from maze_train.nets.blocks import linear
from maze_train.nets.template import TemplateNet
from maze_train.nets.value_head import ValueHead
from maze_train.spaces.describe import flat_space
from maze_train.spaces.tensors import zeros_for
from maze_train.targets import build_target

if TYPE_CHECKING:
    from typing import Any

    from gymnasium import spaces

    from maze_train.distributions.base import Distribution
    from maze_train.nets.config import ModelConfig
    from maze_train.types import Tensor, TensorTree

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
        torch.manual_seed(seed)
        distribution = distribution_for(action_space, config.distributions)
        head = ValueHead.from_config(config)
        net_size = distribution.param_size - distribution.free_param_size
        if config.shared_trunk:
            size = config.hidden_sizes[-1]
            trunk = _network(config, "trunk", space, config.hidden_sizes, size, 0.0)
            gains = (POLICY_GAIN, VALUE_GAIN) if config.orthogonal_init else (None, None)
            policy_net: nn.Module = linear(size, net_size, gains[0])
            critic: nn.Module = linear(size, head.output_size, gains[1])
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
    obs = zeros_for(space, (2,))
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
