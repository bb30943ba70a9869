"""Building blocks of template networks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

from maze_train.nets.activations import activation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from maze_train.types import Tensor

__all__ = ["MLP", "HasVJP", "InputGradient", "add_gradient", "add_row_sum", "linear"]

InputGradient: TypeAlias = "Callable[[Tensor, bool], Tensor | None]"
"""Takes dL/d output, adds dL/d parameters to their `.grad`, and returns dL/d input if asked."""


class HasVJP(Protocol):
    """A network with gradients by hand."""

    def vjp(self, inputs: Any) -> tuple[Tensor, InputGradient]:
        """Outputs without a graph, and the function that writes gradients; see `MLP.vjp`."""
        ...


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

    Maps `[..., inputs]` to `[..., output_size]`. Besides the ordinary `forward` it has `vjp`, whose
    gradients are derived by hand: for the small networks of reinforcement learning, building and
    walking an automatic graph costs more than the arithmetic.

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
        self._activation = activation(nonlinearity)

    def __getstate__(self) -> dict[str, object]:
        # The functions of the activation table can not be pickled; its name can.
        return {key: value for key, value in self.__dict__.items() if key != "_activation"}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # untyped in torch
        self._activation = activation(self.nonlinearity)

    def _weights(self) -> list[tuple[Tensor, Tensor]]:
        # Reading `layer.weight` goes through a slow attribute look-up of nn.Module.
        return [(p["weight"], p["bias"]) for p in (layer._parameters for layer in self.layers)]  # type: ignore[misc]  # linear layers have both

    def forward(self, x: Tensor) -> Tensor:
        """Outputs, `[..., output_size]`."""
        needs_graph = torch.is_grad_enabled()
        nonlinearity = self._activation.function if needs_graph else self._activation.apply
        for i, (weight, bias) in enumerate(self._weights()):
            x = F.linear(x, weight, bias)
            if i < self.n_hidden:
                x = nonlinearity(x)
        return x

    def vjp(self, x: Tensor) -> tuple[Tensor, InputGradient]:
        """Outputs without a graph, and how to get gradients of them.

        Args:
            x: Inputs, `[N, inputs]`.

        Returns:
            Outputs, `[N, output_size]`, and a function that takes dL/d outputs `[N, output_size]`.
            It adds to `.grad` of the parameters and returns dL/d inputs `[N, inputs]`, or None if
            its second argument is false.
        """
        nonlinearity, weights = self._activation, self._weights()
        inputs, known = [], []
        with torch.no_grad():
            for i, (weight, bias) in enumerate(weights):
                inputs.append(x)
                x = F.linear(x, weight, bias)
                if i < self.n_hidden:
                    linear_output = x
                    x = nonlinearity.apply(x)
                    known.append(linear_output if nonlinearity.needs_input else x)

        def gradient(grad: Tensor, of_input: bool) -> Tensor | None:
            with torch.no_grad():
                for i in range(len(weights) - 1, -1, -1):
                    weight, bias = weights[i]
                    if i < self.n_hidden:
                        grad = nonlinearity.gradient(grad, known[i])
                    add_product(weight, grad.t(), inputs[i])
                    add_row_sum(bias, grad)
                    if i == 0 and not of_input:
                        return None
                    grad = grad.mm(weight)
            return grad

        return x, gradient


def add_product(param: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the matrix product of a and b to the gradient of a parameter, unless it is frozen."""
    if not param.requires_grad:
        return
    if param.grad is None:
        param.grad = a.mm(b)
    else:
        param.grad.addmm_(a, b)


def add_row_sum(param: Tensor, rows: Tensor) -> None:
    """Add the sum over rows `[N, D]` to the gradient of a parameter `[D]`, unless it is frozen."""
    add_gradient(param, rows.sum(0))


def add_gradient(param: Tensor, value: Tensor) -> None:
    """Add a new tensor to the gradient of a parameter, unless it is frozen."""
    if not param.requires_grad:
        return
    if param.grad is None:
        param.grad = value
    else:
        param.grad.add_(value)
