"""Critics of states and actions, several of them side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from maze_train.nets.ensemble import EnsembleMLP
from maze_train.nets.own import build_own
from maze_train.nets.template import encoder_for

if TYPE_CHECKING:
    from gymnasium import spaces

    from maze_train.nets.config import ModelConfig
    from maze_train.types import Tensor, TensorTree


class TemplateCritics(nn.Module):
    """E critics that share what reads images and Dict observations, and nothing else.

    Maps observations and numbers that describe an action to `[E, N, output_size]`.

    Args:
        space: Flat observation space, without masks.
        config: Resolved settings of the model.
        size: Number E of critics.
        action_size: Numbers that describe an action; may be 0.
        output_size: Values that a critic gives.
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
        """Values, `[E, N, output_size]`, of observations and actions `[N, action_size]`."""
        return self.values(self.encode(obs), actions)

    def encode(self, obs: TensorTree) -> Tensor:
        """Features `[N, F]` of observations; images are encoded once for all uses."""
        features: Tensor = self.encoder(obs)
        return features

    def values(self, features: Tensor, actions: Tensor, first: int | None = None) -> Tensor:
        """Values, `[E, N, output_size]`, of what `encode` gave and actions.

        Args:
            features: What `encode` gave.
            actions: Numbers that describe an action, `[N, action_size]`.
            first: Critics to ask, from the first one on; None: all E.
        """
        outputs: Tensor = self.layers(torch.cat([features, actions], dim=-1), first)
        return outputs


class OwnCritics(nn.Module):
    """E critics that a user wrote, each with weights of its own.

    Args:
        members: Networks that map observations and `[N, action_size]` to `[N, output_size]`.
    """

    def __init__(self, members: list[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, obs: TensorTree, actions: Tensor) -> Tensor:
        """Values, `[E, N, output_size]`, of observations and actions `[N, action_size]`."""
        return self.values(self.encode(obs), actions)

    def encode(self, obs: TensorTree) -> TensorTree:
        """The observations themselves: each network reads them in its own way."""
        return obs

    def values(self, features: TensorTree, actions: Tensor, first: int | None = None) -> Tensor:
        """Values, `[E, N, output_size]`, as `TemplateCritics.values` gives them."""
        return torch.stack([member(features, actions) for member in self.members[:first]])


Critics: TypeAlias = TemplateCritics | OwnCritics


def build_critics(
    config: ModelConfig,
    space: spaces.Space[Any],
    size: int,
    action_size: int,
    output_size: int,
) -> Critics:
    """The critics that a configuration asks for.

    Args:
        config: Resolved settings of the model.
        space: Flat observation space, without masks.
        size: Number of critics.
        action_size: Numbers that describe an action; may be 0.
        output_size: Values that a critic gives.

    Raises:
        ConfigError: If a network of one's own does not fit.
    """
    if config.critic is None:
        return TemplateCritics(space, config, size, action_size, output_size)
    members = [
        build_own(config.critic, "model.critic", space, output_size, action_size)
        for _ in range(size)
    ]
    return OwnCritics(members)
