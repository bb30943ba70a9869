"""Template network: encoder, hidden layers, linear output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from maze_train.nets.blocks import linear, mlp
from maze_train.nets.encoders import encoder_for

if TYPE_CHECKING:
    from gymnasium import spaces

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
        self.layers = mlp(encoder.output_size, hidden_sizes, config.activation, orthogonal)
        self.output_size = hidden_sizes[-1] if hidden_sizes else encoder.output_size
        if output_size:
            gain = output_gain if orthogonal else None
            self.layers.append(linear(self.output_size, output_size, gain))
            self.output_size = output_size

    def forward(self, obs: TensorTree) -> Tensor:
        """Outputs, `[..., output_size]`."""
        features: Tensor = self.layers(self.encoder(obs))
        return features
