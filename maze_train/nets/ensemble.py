"""Several networks of one shape, computed together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

from maze_train.nets.activations import activation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from maze_train.types import Tensor

EnsembleGradient: TypeAlias = "Callable[[Tensor, bool, slice | None], Tensor | None]"

__all__ = ["EnsembleGradient", "EnsembleMLP"]


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
        self._nonlinearity = nonlinearity
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

    def __getstate__(self) -> dict[str, object]:
        # The functions of the activation table can not be pickled; its name can.
        return {key: value for key, value in self.__dict__.items() if key != "_activation"}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # untyped in torch
        self._activation = activation(self._nonlinearity)

    def _layers(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        # Reading attributes goes through a slow look-up of nn.Module.
        parameters = list(self._parameters.values())
        return list(zip(parameters[::2], parameters[1::2], strict=True))  # type: ignore[arg-type]  # none is None

    def forward(self, x: Tensor) -> Tensor:
        """Outputs, `[E, N, output_size]`, of inputs `[N, inputs]`."""
        needs_graph = torch.is_grad_enabled()
        nonlinearity = self._activation.function if needs_graph else self._activation.apply
        x = x.expand(self.size, *x.shape)
        for i, (weight, bias) in enumerate(self._layers()):
            x = _layer(x, weight, bias)
            if i < self._n_hidden:
                x = nonlinearity(x)
        return x

    def vjp(self, x: Tensor) -> tuple[Tensor, EnsembleGradient]:
        """Outputs without a graph, and how to get gradients of them.

        Args:
            x: Inputs, `[N, inputs]`.

        Returns:
            Outputs, `[E, N, output_size]`, and a function of dL/d outputs. It adds to `.grad` of
            the parameters if its second argument says so, and returns dL/d inputs of the columns
            that its third argument names, `[N, columns]`, or None.
        """
        nonlinearity, layers, last = self._activation, self._layers(), self._n_hidden
        inputs, known = [], []
        with torch.no_grad():
            x = x.expand(self.size, *x.shape)
            for i, (weight, bias) in enumerate(layers):
                inputs.append(x)
                x = _layer(x, weight, bias)
                if i < last:
                    linear_output = x
                    x = nonlinearity.apply(x)
                    known.append(linear_output if nonlinearity.needs_input else x)

        @torch.no_grad()
        def gradient(grad: Tensor, of_params: bool, columns: slice | None) -> Tensor | None:
            for i in range(last, -1, -1):
                if i < last:
                    grad = nonlinearity.gradient(grad, known[i])
                weight, bias = layers[i]
                if of_params:
                    _add_gradients(weight, bias, inputs[i], grad)
                if i == 0:
                    if columns is None:
                        return None
                    return torch.bmm(grad, weight[:, columns].transpose(1, 2)).sum(0)
                back = weight.transpose(1, 2)
                grad = grad * back if back.shape[1] == 1 else torch.bmm(grad, back)
            raise AssertionError("a network has at least one layer")

        return x, gradient


def _layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if weight.shape[2] == 1:  # a product of matrices is several times slower than this
        return (x * weight.transpose(1, 2)).sum(2, keepdim=True) + bias
    return torch.baddbmm(bias, x, weight)


def _add_gradients(weight: Tensor, bias: Tensor, x: Tensor, grad: Tensor) -> None:
    """Add the gradients of a layer to those of its parameters, unless they are frozen."""
    if weight.requires_grad:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        if weight.shape[2] == 1:
            weight.grad.add_((x * grad).sum(1).unsqueeze(2))
        else:
            weight.grad.baddbmm_(x.transpose(1, 2), grad)
    if bias.requires_grad:
        if bias.grad is None:
            bias.grad = torch.zeros_like(bias)
        bias.grad.add_(grad.sum(1, keepdim=True))
