"""Several networks of one shape, computed together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from maze_train.nets.blocks import activation
from maze_train.nets.mlp_gradients import DERIVATIVES, OF_INPUT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maze_train.nets.mlp_gradients import Backward
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
        self._activation, self._nonlinearity = activation(nonlinearity), nonlinearity
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

    def _layers(self, first: int | None) -> list[tuple[Tensor, Tensor]]:
        """Weights and biases of each layer: of all networks or the first."""
        # Reading attributes goes through a slow look-up of nn.Module.
        parameters: list[Any] = list(self._parameters.values())
        if first is not None:
            parameters = [param[:first] for param in parameters]
        return list(zip(parameters[::2], parameters[1::2], strict=True))

    def forward(self, x: Tensor, first: int | None = None) -> Tensor:
        """Outputs, `[E, N, output_size]`, of inputs `[N, inputs]`: of all networks or the first."""
        layers = self._layers(first)
        x = x.expand(len(layers[0][0]), *x.shape)
        for i, (weight, bias) in enumerate(layers):
            x = _layer(x, weight, bias)
            if i < self._n_hidden:
                x = self._activation(x)
        return x

    @torch.no_grad()
    def forward_and_backward(self, x: Tensor, first: int | None = None) -> tuple[Tensor, Backward]:
        """What `forward` gives, without a graph, and its gradients by hand.

        Returns:
            Outputs, and a function of dL/d outputs `[E, N, output_size]`. It either adds dL/d
            parameters to their `.grad`, or, if asked for it, returns dL/d inputs `[N, inputs]`,
            with parameters as constants; of the first networks only this.
        """
        layers, derivative = self._layers(first), DERIVATIVES[self._nonlinearity]
        x = x.expand(len(layers[0][0]), *x.shape)
        inputs, known = [], []
        for i, (weight, bias) in enumerate(layers):
            inputs.append(x)
            x = linear_output = _layer(x, weight, bias)
            if i < self._n_hidden:
                x = self._activation(x)
                known.append(linear_output if self._nonlinearity in OF_INPUT else x)

        def backward(grad: Tensor, of_input: bool) -> Tensor | None:
            for i, (weight, bias) in reversed(list(enumerate(layers))):
                if i < self._n_hidden:
                    grad = derivative(grad, known[i])
                if not of_input:
                    _add_gradients(weight, bias, inputs[i], grad)
                    if i == 0:
                        return None
                columns = weight.detach().transpose(1, 2)
                grad = grad * columns if weight.shape[2] == 1 else grad.bmm(columns)
            return grad.sum(0)

        return x, backward


def _layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if weight.shape[2] == 1:  # a product of matrices is several times slower than this
        return (x * weight.transpose(1, 2)).sum(2, keepdim=True).add_(bias)
    return torch.baddbmm(bias, x, weight)


def _add_gradients(weight: Any, bias: Any, x: Tensor, grad: Tensor) -> None:
    """Add the gradients of a layer to those of its parameters, unless they are frozen."""
    for param in (weight, bias):
        if param.requires_grad and param.grad is None:
            param.grad = torch.zeros_like(param)
    if weight.requires_grad and weight.shape[2] == 1:
        weight.grad.add_((x * grad).sum(1).unsqueeze(2))
    elif weight.requires_grad:
        weight.grad.baddbmm_(x.transpose(1, 2), grad)
    if bias.requires_grad:
        bias.grad.add_(grad.sum(1, keepdim=True))
