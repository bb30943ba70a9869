"""Critics of states and actions, several of them side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import nn

from maze_train.functional.gradients import outputs_and_vjp
from maze_train.nets.building import build_own
from maze_train.nets.encoders import encoder_for, encoder_vjp
from maze_train.nets.ensemble import EnsembleMLP

if TYPE_CHECKING:
    from collections.abc import Callable

    from gymnasium import spaces

    from maze_train.nets.blocks import InputGradient
    from maze_train.nets.config import ModelConfig
    from maze_train.types import Tensor, TensorTree

__all__ = ["Critics", "EncodedObservations", "OwnCritics", "TemplateCritics", "build_critics"]

WriteGradients: TypeAlias = "Callable[[Tensor], None]"
ActionGradient: TypeAlias = "Callable[[Tensor], Tensor]"


class EncodedObservations(NamedTuple):
    """Observations as critics read them; images are encoded once for all that is asked of them."""

    features: Any
    """Features `[N, F]`, or the observations."""

    gradient: InputGradient | None
    """Writes the gradients of what made them; None: it has no weights of its own."""


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
        outputs: Tensor = self.layers(torch.cat([self.encoder(obs), actions], dim=-1))
        return outputs

    def encode(self, obs: TensorTree) -> EncodedObservations:
        """Encode observations, for `vjp` and `action_vjp`."""
        return EncodedObservations(*encoder_vjp(self.encoder, obs))

    def vjp(self, encoded: EncodedObservations, actions: Tensor) -> tuple[Tensor, WriteGradients]:
        """Values without a graph, and a function that writes the gradients of the parameters.

        Call that once only for what `encode` gave.
        """
        features, encoder_gradient = encoded
        values, layers_gradient = self.layers.vjp(torch.cat([features, actions], dim=-1))
        columns = None if encoder_gradient is None else slice(features.shape[1])

        def gradient(grad: Tensor) -> None:
            d_features = layers_gradient(grad, True, columns)
            if encoder_gradient is not None and d_features is not None:
                encoder_gradient(d_features, False)

        return values, gradient

    def action_vjp(
        self, encoded: EncodedObservations, actions: Tensor
    ) -> tuple[Tensor, ActionGradient]:
        """Values without a graph, and a function that gives the gradient of the actions.

        No gradient of a parameter is computed.
        """
        features = encoded.features
        values, layers_gradient = self.layers.vjp(torch.cat([features, actions], dim=-1))
        columns = slice(features.shape[1], None)

        def gradient(grad: Tensor) -> Tensor:
            d_actions = layers_gradient(grad, False, columns)
            assert d_actions is not None
            return d_actions

        return values, gradient


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
        return torch.stack([member(obs, actions) for member in self.members])

    def encode(self, obs: TensorTree) -> EncodedObservations:
        """The observations themselves: each network reads them in its own way."""
        return EncodedObservations(obs, None)

    def vjp(self, encoded: EncodedObservations, actions: Tensor) -> tuple[Tensor, WriteGradients]:
        """Values without a graph, and a function that writes the gradients of the parameters."""
        return outputs_and_vjp(lambda: self(encoded.features, actions))

    def action_vjp(
        self, encoded: EncodedObservations, actions: Tensor
    ) -> tuple[Tensor, ActionGradient]:
        """Values without a graph, and a function that gives the gradient of the actions."""
        with torch.enable_grad():
            leaf = actions.detach().requires_grad_()
            values = self(encoded.features, leaf)

        def gradient(grad: Tensor) -> Tensor:
            found = torch.autograd.grad(values, leaf, grad, allow_unused=True)[0]
            return torch.zeros_like(actions) if found is None else found

        return values.detach(), gradient


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
