"""Building blocks of template networks."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch._C import _is_tracing as is_tracing
from torch._C import _len_torch_dispatch_stack as num_modes
from torch._C._functorch import peek_interpreter_stack as innermost_transform
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import functional as F

from maze_train.checks import check_one_of
from maze_train.nets.config import ACTIVATIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from maze_train.types import Tensor


TENSORS = (torch.Tensor, torch.nn.Parameter)


def is_traced(x: Tensor) -> bool:
    """Whether the operations on x are recorded or replaced: then all must be PyTorch's.

    So it is under `torch.jit.trace`, `torch.export`, `torch.compile`, the transformations of
    `torch.func`, forward-mode differentiation, and modes such as that of fake tensors.
    """
    # The first of these is all that a compiler reads. They take 0.3 us together.
    return (
        is_compiling()
        or type(x) not in TENSORS
        or is_tracing()
        or num_modes() > 0
        or innermost_transform() is not None
        or forward_ad._current_level >= 0
    )


def _tanh(x: Tensor) -> Tensor:
    if x.requires_grad or not x.is_cpu or x.dtype == torch.bfloat16 or is_traced(x):
        return x.tanh_()
    # Numpy's vector loop is several times faster than PyTorch's (1 against 9 us for 4096 numbers).
    array = x.numpy()
    np.tanh(array, out=array)
    return x


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": _tanh,
    "relu": torch.relu_,
    "elu": partial(F.elu, inplace=True),
    "leaky_relu": partial(F.leaky_relu, inplace=True),
    "gelu": F.gelu,
    "silu": F.silu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The nonlinearity of a name in the configuration; it may overwrite its argument.

    Another tensor for each result would take several times longer than the arithmetic. Gradients
    are those of autograd: none of the functions that overwrite needs its argument for them.

    Raises:
        ConfigError: If there is none of that name.
    """
    check_one_of("activation", name, ACTIVATIONS)
    return FUNCTIONS[name]


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
        layers: Any = self._modules["layers"]
        return [(p["weight"], p["bias"]) for p in (x._parameters for x in layers._modules.values())]

    def forward(self, x: Tensor) -> Tensor:
        """Outputs, `[..., output_size]`."""
        for i, (weight, bias) in enumerate(self.weights()):
            x = F.linear(x, weight, bias)
            if i < self.n_hidden:
                x = self.activation(x)
        return x
