"""Building blocks of template networks: linear layers, MLP and image encoders."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from maze_train.core.checks import check_one_of
from maze_train.core.torch_private import is_hooked, is_replaced
from maze_train.core.types import Tensor
from maze_train.nets.config import ACTIVATIONS
from maze_train.spaces.describe import image_layout

TENSORS = (torch.Tensor, torch.nn.Parameter)


def is_traced(x: Tensor) -> bool:
    """Return whether operations on x are traced or replaced, so that NumPy cannot be used.

    Operations are traced or replaced under `torch.jit.trace`, `torch.export`, `torch.compile`,
    `torch.func` transforms, forward-mode differentiation, and dispatch modes such as fake tensors.
    """
    # The compiler evaluates only the first condition. Checking all conditions takes 0.3 us.
    return is_compiling() or type(x) not in TENSORS or is_replaced()


def is_stock(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a layer is exactly of class `kind` and has no hooks.

    The weights of unmodified layers can be used directly. Hooks, parametrizations, spectral norm,
    pruning and adapters (LoRA) change the class of a layer or add hooks; modified layers must be
    called.
    """
    return type(layer) is kind and not is_hooked(layer)


def _tanh(x: Tensor) -> Tensor:
    if x.requires_grad or not x.is_cpu or x.dtype == torch.bfloat16 or is_traced(x):
        return x.tanh_()
    # NumPy's vectorised tanh is several times faster than PyTorch's (1 us instead of 9 us for 4096
    # values).
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
    """Return an activation function by name. The function may overwrite its argument.

    Allocating a tensor for each result would take several times longer than the arithmetic.
    Autograd remains correct, because the gradients of these functions do not depend on the
    argument.

    Raises:
        ConfigError: If the name is unknown.
    """
    check_one_of("activation", name, ACTIVATIONS)
    return FUNCTIONS[name]


def linear(inputs: int, outputs: int, gain: float | None) -> nn.Linear:
    """Build a linear layer; if a gain is given, weights are orthogonal and biases are zero.

    Args:
        inputs: Size of the input.
        outputs: Size of the output.
        gain: Gain of the orthogonal initialisation; None: PyTorch's initialisation.
    """
    layer = nn.Linear(inputs, outputs)
    if gain is not None:
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return layer


CACHED = 2**18
"""Number of layer outputs (1 MB) that fit in the cache of a core."""


class MLP(nn.Module):
    """Multilayer perceptron with a nonlinearity after each hidden layer.

    Maps `[..., inputs]` to `[..., output_size]`.

    Args:
        inputs: Size of the input.
        hidden_sizes: Units of each hidden layer.
        nonlinearity: Name of the nonlinearity.
        output_size: Units of the linear output layer; 0: the last hidden layer is the output.
        orthogonal: Whether weights are orthogonal (gain sqrt(2) for hidden layers) and biases zero.
        output_gain: Gain of the output layer.

    Attributes:
        cached_rows: Largest batch size for which activations stay in the CPU cache. Such batches
            take half the time per row.
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
        self.cached_rows = max(CACHED // max([*hidden_sizes, self.output_size]), 64)
        self.nonlinearity = nonlinearity
        self.activation = activation(nonlinearity)

    def weights(self) -> list[tuple[Tensor, Tensor]]:
        """Return weights and biases of each layer; all layers must be of class `nn.Linear`."""
        layers: Any = self._modules["layers"]
        return [(p["weight"], p["bias"]) for p in (x._parameters for x in layers._modules.values())]

    def forward(self, x: Tensor) -> Tensor:
        """Outputs, `[..., output_size]`."""
        layers: Any = self._modules["layers"]
        for i, layer in enumerate(layers._modules.values()):
            if is_stock(layer, nn.Linear):
                # Avoids the slow attribute lookup of nn.Linear, which takes 1.4 times as long.
                parameters = layer._parameters
                x = F.linear(x, parameters["weight"], parameters["bias"])
            else:
                x = layer(x).clone()  # Hooks may have stored x, which activations overwrite.
            if i < self.n_hidden:
                x = self.activation(x)
        return x


Backward: TypeAlias = "Callable[[Tensor, bool], Tensor | None]"
"""Backward function: takes dL/d outputs, adds dL/d parameters to `.grad`, and returns dL/d inputs
if requested."""

aten = torch.ops.aten

DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tanh": aten.tanh_backward,
    "relu": lambda grad, y: aten.threshold_backward(grad, y, 0),
    "elu": lambda grad, y: aten.elu_backward(grad, 1.0, 1.0, 1.0, True, y),
    "leaky_relu": lambda grad, y: aten.leaky_relu_backward(grad, y, 0.01, True),
    "gelu": aten.gelu_backward,
    "silu": aten.silu_backward,
}
"""Computes dL/dx from dL/dy and y = f(x); for functions in `OF_INPUT`, from dL/dy and x."""

OF_INPUT = ("gelu", "silu")


def mlp_forward_and_backward(net: MLP, x: Tensor) -> tuple[Tensor, Backward]:
    """Return outputs and backward function of a plain MLP, in chunks that fit into the cache."""
    if x.shape[0] <= net.cached_rows or not x.is_cpu:
        return _forward_and_backward(net, x)
    pieces = torch.split(x, net.cached_rows)
    outputs, backwards = zip(*(_forward_and_backward(net, piece) for piece in pieces), strict=True)

    def backward(grad: Tensor, of_input: bool) -> Tensor | None:
        parts = zip(backwards, torch.split(grad, net.cached_rows), strict=True)
        of_inputs = [piece_backward(part, of_input) for piece_backward, part in parts]
        return torch.cat(of_inputs) if of_input else None

    return torch.cat(outputs), backward


def _forward_and_backward(net: MLP, x: Tensor) -> tuple[Tensor, Backward]:
    """Implement `mlp_forward_and_backward` for one chunk of rows."""
    weights, keeps_inputs = net.weights(), net.nonlinearity in OF_INPUT
    derivative = DERIVATIVES[net.nonlinearity]
    inputs, known = [], []
    for i, (weight, bias) in enumerate(weights):
        inputs.append(x)
        x = F.linear(x, weight, bias)
        if i < net.n_hidden:
            linear_output = x
            x = net.activation(x)
            known.append(linear_output if keeps_inputs else x)

    def backward(grad: Tensor, of_input: bool) -> Tensor | None:
        for i in range(len(weights) - 1, -1, -1):
            weight, bias = weights[i]
            if i < net.n_hidden:
                grad = derivative(grad, known[i])
            _add_product(weight, grad, inputs[i])
            add_row_sum(bias, grad)
            if i == 0 and not of_input:
                return None
            grad = grad.mm(weight.detach())
        return grad

    return x, backward


NARROW = range(2, 13)
"""Input sizes for which computing the transposed weight gradient is 1.5 to 8 times faster on a CPU
(MKL, at least 128 rows)."""


def _add_product(param: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add the product of grad^T `[D, N]` and x `[N, I]` to a parameter gradient, unless frozen."""
    if not param.requires_grad:
        return
    rows, size = x.shape
    if param.grad is None:
        param.grad = grad.t().mm(x)
    elif rows >= 128 and size in NARROW and x.is_cpu:
        param.grad.add_(x.t().mm(grad).t())
    else:
        param.grad.addmm_(grad.t(), x)


def add_row_sum(param: Tensor, rows: Tensor) -> None:
    """Add the sum over rows `[N, D]` to the gradient of a parameter `[D]`, unless frozen."""
    if not param.requires_grad:
        return
    total = rows.sum(0)
    if param.grad is None:
        param.grad = total
    else:
        param.grad.add_(total)


SMALLEST_NATURE_SIDE = 36
"""Minimum side in pixels for which the `nature` convolutions have at least one output position."""

STRIDED_SIDE = 12
"""Minimum side in pixels for stride 2 in the convolutions for small images."""

CHUNK = 64
"""Number of images per forward pass on a CPU. The allocator reuses memory of this size; for 1024
images, it requests memory from the OS in each layer, which doubles the time."""


class ImageEncoder(nn.Module):
    """Convolutional encoder of images.

    Maps uint8 images `[..., *space.shape]` to nonnegative features `[..., output_size]`, ordered by
    row, column and filter. Pixels are scaled to [0, 1] by the upper bound of the space; stacked
    frames become channels. The dense layer that follows the convolutions in both papers is not part
    of the encoder, but one of the hidden layers.

    - `nature`: 32 filters 8x8 with stride 4, 64 4x4 with stride 2, 64 3x3 with stride 1, each
      followed by ReLU (Mnih et al., "Human-level control through deep reinforcement learning",
      2015, Methods). If a side of the image is below 36 pixels, the layers have 32, 64 and 64
      filters of size 3x3 instead. The stride is 2 along sides of at least 12 positions, otherwise
      1. Sides of 7 to 91 pixels are reduced to 1 to 7 positions.
    - `impala`: three stages with 16, 32 and 32 filters: a 3x3 convolution, 3x3 max pooling with
      stride 2, two residual blocks; ReLU at the end (Espeholt et al., "IMPALA: Scalable Distributed
      Deep-RL with Importance Weighted Actor-Learner Architectures", 2018, Figure 3, right).

    Args:
        space: An image space, see `is_image`.
        kind: `nature` or `impala`.
        orthogonal: Whether weights are orthogonal and biases zero (gain sqrt(2) for `nature`; 1 for
            `impala`, because residual sums grow); otherwise PyTorch's initialisation.
    """

    def __init__(self, space: spaces.Box, kind: str, orthogonal: bool = True) -> None:
        super().__init__()
        channels, height, width, self.channels_last = image_layout(space)
        self.shape = space.shape
        self.image_shape = (channels, height, width)
        self.scale = 1 / max(float(space.high.max()), 1.0)
        if kind == "impala":
            layers = _impala_layers(channels)
        elif min(height, width) >= SMALLEST_NATURE_SIDE:
            layers = _nature_layers(channels)
        else:
            layers = _small_layers(channels, height, width)
        self.first = cast("nn.Conv2d", layers[0])
        self.others = nn.Sequential(*layers[1:])
        if orthogonal:
            _make_orthogonal(self, 1.0 if kind == "impala" else math.sqrt(2))
        with torch.no_grad():
            one = torch.zeros(1, *self.image_shape)
            self.output_size: int = self.others(self.first(one)).numel()

    def forward(self, obs: Tensor) -> Tensor:
        """Features, `[..., output_size]`."""
        lead = obs.shape[: obs.ndim - len(self.shape)]
        images = self._images(obs.reshape(-1, *self.shape))
        if images.is_cpu and not is_traced(images) and len(images) > CHUNK:
            features = torch.cat([self._features(chunk) for chunk in torch.split(images, CHUNK)])
        else:
            features = self._features(images)
        return features.view(*lead, self.output_size)

    def _images(self, obs: Tensor) -> Tensor:
        """Reshape `[N, *space.shape]` to `[N, channels, height, width]`, if possible as a view."""
        channels, height, width = self.image_shape
        if self.channels_last and obs.ndim == 5:
            obs = obs.permute(0, 2, 3, 1, 4)
        # With one channel, only the strides can mark the channel dimension as innermost.
        if self.channels_last or channels == 1:
            return obs.reshape(-1, height, width, channels).permute(0, 3, 1, 2)
        return obs.reshape(-1, channels, height, width)

    def _features(self, images: Tensor) -> Tensor:
        """Return the features `[N, output_size]` of images `[N, channels, height, width]`."""
        # Convolutions are fastest in channels-last layout. Copying uint8 is faster than float32.
        if not is_traced(images):  # The layout does not affect results; vmap does not support it.
            images = images.contiguous(memory_format=torch.channels_last)
        first = self.first
        if is_stock(first, nn.Conv2d):
            # Scale the weights (thousands) instead of the pixels (millions).
            weight = first.weight * self.scale
            x = F.conv2d(images.to(weight.dtype), weight, first.bias, first.stride, first.padding)
        else:
            x = first(images.to(next(first.parameters()).dtype) * self.scale).clone()
        positions: Tensor = self.others(x)
        return positions.permute(0, 2, 3, 1).flatten(1)


class ResidualBlock(nn.Module):
    """Residual block x + conv(relu(conv(relu(x)))) with 3x3 convolutions that keep the shape.

    Maps `[N, filters, height, width]` to the same shape.

    Args:
        filters: Channels of input and output.
    """

    def __init__(self, filters: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(filters, filters, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(filters, filters, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The sum, `[N, filters, height, width]`."""
        change: Tensor = self.layers(x)
        return change.add_(x)


def _nature_layers(channels: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for filters, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        layers += [nn.Conv2d(channels, filters, size, stride), nn.ReLU(inplace=True)]
        channels = filters
    return layers


def _small_layers(channels: int, height: int, width: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for filters in (32, 64, 64):
        stride = (2 if height >= STRIDED_SIDE else 1, 2 if width >= STRIDED_SIDE else 1)
        layers += [nn.Conv2d(channels, filters, 3, stride), nn.ReLU(inplace=True)]
        height, width = (height - 3) // stride[0] + 1, (width - 3) // stride[1] + 1
        channels = filters
    return layers


def _impala_layers(channels: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for filters in (16, 32, 32):
        layers += [
            nn.Conv2d(channels, filters, 3, padding=1),
            nn.MaxPool2d(3, stride=2, padding=1),
            ResidualBlock(filters),
            ResidualBlock(filters),
        ]
        channels = filters
    return [*layers, nn.ReLU(inplace=True)]


def _make_orthogonal(module: nn.Module, gain: float) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.orthogonal_(layer.weight, gain)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
