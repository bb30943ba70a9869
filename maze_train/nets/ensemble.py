"""Several networks of one shape, computed together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from maze_train.nets.blocks import activation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maze_train.types import Tensor


class EnsembleMLP(nn.Module):
    """E multi-layer perceptrons that read the same inputs, as batched matrix products.

    Maps `[N, inputs]` to `[E, N, output_size]`. The weights of a layer are one tensor
    `[E, inputs, outputs]`, its biases `[E, 1, outputs]`.

    Args:
        size: Number E of networks.
        inputs: Size of the input.
        hidden_sizes: Units of each hidden layer.
        nonlinearity: Name of the nonlinearity.
        output_size: Units of the linear output layer.
        orthogonal: Orthogonal weights (gain sqrt(2) for hidden layers, 1 for the output) and zero
            biases; else PyTorch's own initialisation of linear layers.
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
            else:  # that of nn.Linear
                bound = 1.0 / math.sqrt(inputs)
                nn.init.uniform_(weight, -bound, bound)
                nn.init.uniform_(bias, -bound, bound)
            self.register_parameter(f"weight_{i}", weight)
            self.register_parameter(f"bias_{i}", bias)
            inputs = outputs

    def _layers(self) -> list[tuple[Tensor, Tensor]]:
        # Reading attributes goes through a slow look-up of nn.Module.
        parameters = list(self._parameters.values())
        return list(zip(parameters[::2], parameters[1::2], strict=True))  # type: ignore[arg-type]  # none is None

    def forward(self, x: Tensor, first: int | None = None) -> Tensor:
        """Outputs, `[E, N, output_size]`, of inputs `[N, inputs]`: of all networks or the first."""
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
    if weight.shape[2] == 1:  # a product of matrices is several times slower than this
        return (x * weight.transpose(1, 2)).sum(2, keepdim=True) + bias
    return torch.baddbmm(bias, x, weight)
