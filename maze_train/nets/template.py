"""Template network: encoder, hidden layers, linear output."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from maze_train.nets.blocks import MLP
from maze_train.nets.encoders import encoder_for
from maze_train.spaces.images import holds_images

if TYPE_CHECKING:
    from gymnasium import spaces

    from maze_train.nets.config import ModelConfig
    from maze_train.types import Tensor, TensorTree

__all__ = ["TemplateNet", "resolve"]


def resolve(config: ModelConfig, space: spaces.Space[object]) -> ModelConfig:
    """The same settings with those filled in that depend on the space.

    Images that are read as vectors (`image_encoder: flat`) count as vectors. Policy and critic have
    nothing in common where the settings describe two networks (own ones, sizes of the critic, no
    hidden layers), images or not.

    Args:
        config: Model settings; resolved ones stay as they are.
        space: Flat observation space.
    """
    images = config.image_encoder != "flat" and holds_images(space)
    are_two = (
        config.policy is not None
        or config.critic is not None
        or config.critic_hidden_sizes is not None
        or config.hidden_sizes == []
    )
    hidden_sizes, shared_trunk = config.hidden_sizes, config.shared_trunk
    if hidden_sizes is None:
        hidden_sizes = [512] if images else [64, 64]
    if shared_trunk is None:
        shared_trunk = config.memory is not None or (images and not are_two)
    return replace(
        config,
        hidden_sizes=hidden_sizes,
        activation=config.activation or ("relu" if images else "tanh"),
        shared_trunk=shared_trunk,
        orthogonal_init=config.orthogonal_init is not False,
    )


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
        config = resolve(config, space)
        assert config.activation is not None
        self.encoder = encoder_for(space, config)
        self.layers = MLP(
            self.encoder.output_size,
            hidden_sizes,
            config.activation,
            output_size=output_size,
            orthogonal=bool(config.orthogonal_init),
            output_gain=output_gain,
        )
        self.output_size = self.layers.output_size

    def forward(self, obs: TensorTree) -> Tensor:
        """Outputs, `[..., output_size]`."""
        features: Tensor = self.layers(self.encoder(obs))
        return features
