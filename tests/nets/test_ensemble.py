"""Networks computed as one batch match separate linear layers."""

from __future__ import annotations

import math

import pytest
import torch
from cases import sweep
from torch import nn

from maze_train.nets.config import ACTIVATIONS
from maze_train.nets.critics import EnsembleMLP

pytestmark = pytest.mark.usefixtures("float64")

N, INPUTS = 6, 5
TORCH = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "leaky_relu": nn.LeakyReLU,
}
SHAPES = {
    "one net": (1, [4], 3),
    "two critics": (2, [7, 4], 1),
    "five": (5, [3], 4),
    "no hidden layer": (2, [], 4),
    "no hidden layer, one output": (5, [], 1),
    "hidden layer of one unit": (2, [1, 3], 4),
    "units of one everywhere": (1, [1, 1], 1),
}


def build(shape, nonlinearity="tanh", **settings):
    """Return an ensemble with one of the shapes above."""
    size, hidden_sizes, output_size = SHAPES[shape]
    return EnsembleMLP(size, INPUTS, hidden_sizes, nonlinearity, output_size, **settings)


def layers_of(net):
    """Return weights `[E, inputs, outputs]` and biases `[E, 1, outputs]` of each layer."""
    params = dict(net.named_parameters())
    return [(params[f"weight_{i}"], params[f"bias_{i}"]) for i in range(len(params) // 2)]


def slow(net, nonlinearity):
    """Return the members as separate networks with the same weights."""
    members = []
    for e in range(net.size):
        member = nn.Sequential()
        for weight, bias in layers_of(net):
            if len(member):
                member.append(TORCH[nonlinearity]())
            layer = nn.Linear(*weight.shape[1:])
            with torch.no_grad():
                layer.weight.copy_(weight[e].t())
                layer.bias.copy_(bias[e, 0])
            member.append(layer)
        members.append(member)
    return members


def slow_results(net, nonlinearity, x, grad):
    """Return outputs, gradients of the parameters, and the gradient of the inputs."""
    members, x = slow(net, nonlinearity), x.clone().requires_grad_()
    outputs = torch.stack([member(x) for member in members])
    (outputs * grad).sum().backward()
    linear = [[layer for layer in m if isinstance(layer, nn.Linear)] for m in members]
    gradients = []
    for same in zip(*linear, strict=True):
        gradients.append(torch.stack([layer.weight.grad.t() for layer in same]))
        gradients.append(torch.stack([layer.bias.grad[None] for layer in same]))
    return outputs.detach(), gradients, x.grad


def gradients_of(net):
    """Return the gradients of all parameters."""
    return [param.grad for param in net.parameters()]


def some_gradient(net, output_size):
    """Return a gradient of the outputs in which some entries are 0, as for a minimum."""
    return torch.randn(net.size, N, output_size) * (torch.rand(net.size, N, output_size) < 0.7)


@pytest.mark.parametrize("shape", SHAPES)
@sweep("nonlinearity", ACTIVATIONS)
def test_ensemble_members_match_linear_layers(shape, nonlinearity):
    """Outputs and all gradients match separate networks."""
    net = build(shape, nonlinearity)
    x = torch.randn(N, INPUTS)
    grad = some_gradient(net, SHAPES[shape][2])
    outputs, gradients, d_x = slow_results(net, nonlinearity, x, grad)

    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(net(leaf), outputs)
    (net(leaf) * grad).sum().backward()
    torch.testing.assert_close(gradients_of(net), gradients)
    torch.testing.assert_close(leaf.grad, d_x)
    with torch.no_grad():
        torch.testing.assert_close(net(x), outputs)
    assert torch.equal(x, leaf)


def test_ensemble_default_initialization_matches_linear():
    """Weights and biases are uniform within 1/sqrt(inputs) and differ between members."""
    net = EnsembleMLP(4, 100, [400], "relu", 25)
    twin = nn.Linear(100, 400), nn.Linear(400, 25)
    for (weight, bias), layer in zip(layers_of(net), twin, strict=True):
        bound = 1 / math.sqrt(layer.in_features)
        for ours, theirs in ((weight, layer.weight), (bias, layer.bias)):
            ours, theirs = ours.detach(), theirs.detach()
            assert float(ours.abs().max()) <= bound
            assert float(theirs.abs().max()) <= bound, "PyTorch has changed its initialisation"
            assert float(ours.std()) == pytest.approx(bound / math.sqrt(3), rel=0.15)
            assert float(ours.mean()) == pytest.approx(0.0, abs=0.15 * bound)
            assert len(torch.unique(ours)) == ours.numel()


@pytest.mark.parametrize("shape", ["one net", "two critics", "five", "no hidden layer"])
def test_ensemble_orthogonal_initialization_has_gain_sqrt_2(shape):
    """Weights are orthogonal with gain sqrt(2), gain 1 in the output layer; biases are 0."""
    net = build(shape, orthogonal=True)
    layers = layers_of(net)
    for i, (weight, bias) in enumerate(layers):
        gain = 1.0 if i == len(layers) - 1 else math.sqrt(2)
        for member in weight:
            short = member if member.shape[0] <= member.shape[1] else member.t()
            expected = gain**2 * torch.eye(len(short))
            torch.testing.assert_close((short @ short.t()).detach(), expected)
        assert not bias.any()
    if net.size > 1:
        assert not torch.equal(layers[0][0][0], layers[0][0][1])
