"""Template network: encoder, hidden layers, linear output."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from maze_train.nets.blocks import MLP
from maze_train.nets.encoders import DictEncoder, encoder_for

if TYPE_CHECKING:
    from gymnasium import spaces

    from maze_train.nets.blocks import InputGradient
    from maze_train.nets.config import ModelConfig
    from maze_train.types import Tensor, TensorTree

__all__ = ["TemplateNet"]


class TemplateNet(nn.Module):
    """Reads any flat observation space; one branch per key of a Dict.

    Maps observations `[..., *obs shape]` to `[..., output_size]`.

    Args:
        space: Flat observation space.
        config: Sizes, nonlinearity and initialisation.
        hidden_sizes: Units of each hidden layer.
        output_size: Units of the linear output layer; 0: the last hidden layer is the output.
        output_gain: Gain of the orthogonal initialisation of the output layer.
    """

    def __init__(
        self,
        space: spaces.Space[object],
        config: ModelConfig,
        hidden_sizes: list[int],
        output_size: int = 0,
        output_gain: float = 1.0,
    ) -> None:
        super().__init__()
        orthogonal = config.orthogonal_init
        encoder = encoder_for(space, config.branch_size, config.activation, orthogonal)
        self.encoder = encoder
        self.layers = MLP(
            encoder.output_size,
            hidden_sizes,
            config.activation,
            output_size=output_size,
            orthogonal=orthogonal,
            output_gain=output_gain,
        )
        self.output_size = self.layers.output_size

    def forward(self, obs: TensorTree) -> Tensor:
        """Outputs, `[..., output_size]`."""
        features: Tensor = self.layers(self.encoder(obs))
        return features

    def vjp(self, obs: TensorTree) -> tuple[Tensor, InputGradient]:
        """Outputs `[N, output_size]` without a graph, and the function that writes gradients.

        See `MLP.vjp`; there is no gradient of observations.
        """
        if not isinstance(self.encoder, DictEncoder):
            with torch.no_grad():
                inputs = self.encoder(obs)
            return self.layers.vjp(inputs)
        features, encoder_gradient = self.encoder.vjp(obs)
        outputs, layers_gradient = self.layers.vjp(features)

        def gradient(grad: Tensor, of_input: bool) -> Tensor | None:
            features_gradient = layers_gradient(grad, True)
            assert features_gradient is not None
            return encoder_gradient(features_gradient, False)

        return outputs, gradient
