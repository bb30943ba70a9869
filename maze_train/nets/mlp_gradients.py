"""Analytic gradients of multilayer perceptrons for vectors and discrete observations.

For small networks, the autograd graph takes more time than the arithmetic. Analytic gradients are
equal to autograd gradients, see `tests/nets/test_mlp_gradients.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

from maze_train.core.types import Tensor, TensorTree
from maze_train.nets.blocks import MLP
from maze_train.nets.template import DictEncoder, TemplateNet, is_plain

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


def supports_analytic_gradients(net: nn.Module) -> bool:
    """Return whether `forward_and_backward` supports a network.

    Supported are MLPs whose inputs are vectors, discrete observations, or Dicts of these.
    """
    return type(net) in (TemplateNet, MLP) and is_plain(net)


@torch.no_grad()
def forward_and_backward(net: nn.Module, obs: TensorTree) -> tuple[Tensor, Backward]:
    """Compute the outputs of a network, and return a function that computes the gradients.

    Args:
        net: The network, see `supports_analytic_gradients`.
        obs: Observations, `[N, ...]`.

    Returns:
        Outputs `[N, output_size]` without a graph, and the backward function. Gradients of Dict
        observations are not supported.
    """
    if isinstance(net, MLP):
        assert isinstance(obs, torch.Tensor)
        return _mlp(net, obs)
    assert isinstance(net, TemplateNet)
    if not isinstance(net.encoder, DictEncoder):
        return _mlp(net.layers, net.encoder(obs))
    assert isinstance(obs, dict)
    parts = zip(net.encoder.keys, net.encoder.encoders, net.encoder.branches, strict=True)
    branches = [forward_and_backward(branch, leaf(obs[key])) for key, leaf, branch in parts]
    outputs, layers_backward = _mlp(net.layers, torch.cat([x for x, _ in branches], dim=-1))
    sizes = net.encoder.sizes

    def backward(grad: Tensor, of_input: bool) -> Tensor | None:
        d_features = layers_backward(grad, True)
        assert d_features is not None
        pieces = torch.split(d_features, sizes, dim=-1)
        for piece, (_, branch_backward) in zip(pieces, branches, strict=True):
            branch_backward(piece.contiguous(), False)
        return None

    return outputs, backward


def _mlp(net: MLP, x: Tensor) -> tuple[Tensor, Backward]:
    """Implement `forward_and_backward` for an MLP, in chunks that fit into the cache."""
    if x.shape[0] <= net.cached_rows or not x.is_cpu:
        return _mlp_of_piece(net, x)
    pieces = torch.split(x, net.cached_rows)
    outputs, backwards = zip(*(_mlp_of_piece(net, piece) for piece in pieces), strict=True)

    def backward(grad: Tensor, of_input: bool) -> Tensor | None:
        parts = zip(backwards, torch.split(grad, net.cached_rows), strict=True)
        of_inputs = [piece_backward(part, of_input) for piece_backward, part in parts]
        return torch.cat(of_inputs) if of_input else None

    return torch.cat(outputs), backward


def _mlp_of_piece(net: MLP, x: Tensor) -> tuple[Tensor, Backward]:
    """Implement `_mlp` for one chunk of rows."""
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
