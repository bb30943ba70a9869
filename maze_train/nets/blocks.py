"""Building blocks of template networks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import nn
from torch.nn import functional as F

from maze_train.nets.activations import activation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maze_train.types import Tensor

__all__ = ["MLP", "linear"]


def linear(inputs: int, outputs: int, gain: float | None) -> nn.Linear:
    """A linear layer; with a gain its weights are orthogonal and its biases zero.

    Args:
        inputs: Size of the input.
        outputs: Size of the output.
        gain: Factor of the orthogonal matrix; None keeps PyTorch's own initialisation.
    """
    layer = nn.Linear(inputs, outputs)
    if gain is not None:
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return layer


class MLP(nn.Module):
    """Linear layers, each hidden one followed by a nonlinearity.

    Maps `[..., inputs]` to `[..., output_size]`.

    Args:
        inputs: Size of the input.
        hidden_sizes: Units of each hidden layer.
        nonlinearity: Name of the nonlinearity.
        output_size: Units of the linear output layer; 0: the last hidden layer is the output.
        orthogonal: Orthogonal weights (gain sqrt(2) for hidden layers) and zero biases.
        output_gain: Gain of the output layer.
    """

    def __init__(
        self,
        inputs: int,
        hidden_sizes: Sequence[int],
        nonlinearity: str,
        *,
        output_size: int = 0,
        orthogonal: bool = True,
        output_gain: float = 1.0,
    ) -> None:
        super().__init__()
        layers = []
        for size in hidden_sizes:
            layers.append(linear(inputs, size, math.sqrt(2) if orthogonal else None))
            inputs = size
        if output_size:
            layers.append(linear(inputs, output_size, output_gain if orthogonal else None))
            inputs = output_size
        self.layers = nn.ModuleList(layers)
        self.output_size = inputs
        self.n_hidden = len(hidden_sizes)
        self.nonlinearity = nonlinearity
        self.activation = activation(nonlinearity)

    def weights(self) -> list[tuple[Tensor, Tensor]]:
        """Weights and biases of each layer."""
        # Reading `layer.weight` goes through a slow attribute look-up of nn.Module.
        return [(p["weight"], p["bias"]) for p in (layer._parameters for layer in self.layers)]  # type: ignore[misc]  # linear layers have both

    def forward(self, x: Tensor) -> Tensor:
        """Outputs, `[..., output_size]`."""
        for i, (weight, bias) in enumerate(self.weights()):
            x = F.linear(x, weight, bias)
            if i < self.n_hidden:
                x = self.activation(x)
        return x
