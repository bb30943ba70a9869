"""Networks computed together are those of linear layers, one after the other."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from cases import sweep
from torch import nn

from maze_train.errors import ConfigError
from maze_train.nets.config import ACTIVATIONS
from maze_train.nets.ensemble import EnsembleMLP

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


@pytest.fixture(autouse=True)
def _double_precision():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def build(shape, nonlinearity="tanh", **settings):
    """An ensemble of one of the shapes above."""
    size, hidden_sizes, output_size = SHAPES[shape]
    return EnsembleMLP(size, INPUTS, hidden_sizes, nonlinearity, output_size, **settings)


def layers_of(net):
    """Weights `[E, inputs, outputs]` and biases `[E, 1, outputs]`, layer by layer."""
    params = dict(net.named_parameters())
    return [(params[f"weight_{i}"], params[f"bias_{i}"]) for i in range(len(params) // 2)]


def slow(net, nonlinearity):
    """The members as networks of their own, with the same weights."""
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
    """Outputs, gradients of parameters in the order of the ensemble, and gradient of the inputs."""
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
    """Gradients of all parameters."""
    return [param.grad for param in net.parameters()]


def some_gradient(net, output_size):
    """A gradient of the outputs with zeros in it, as that of a minimum has."""
    return torch.randn(net.size, N, output_size) * (torch.rand(net.size, N, output_size) < 0.7)


@pytest.mark.parametrize("shape", SHAPES)
@sweep("nonlinearity", ACTIVATIONS)
def test_members_are_networks_of_linear_layers(shape, nonlinearity):
    """Outputs and all gradients, by hand and by autograd."""
    net = build(shape, nonlinearity)
    x = torch.randn(N, INPUTS)
    grad = some_gradient(net, SHAPES[shape][2])
    outputs, gradients, d_x = slow_results(net, nonlinearity, x, grad)

    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(net(leaf), outputs)
    (net(leaf) * grad).sum().backward()
    torch.testing.assert_close(gradients_of(net), gradients)
    torch.testing.assert_close(leaf.grad, d_x)

    net.zero_grad()
    before = x.clone(), grad.clone()
    by_hand, gradient = net.vjp(x)
    assert not by_hand.requires_grad
    torch.testing.assert_close(by_hand, outputs)
    torch.testing.assert_close(gradient(grad, True, slice(None)), d_x)
    torch.testing.assert_close(gradients_of(net), gradients)
    torch.testing.assert_close((x, grad), before, rtol=0, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
@sweep("columns", [slice(2), slice(2, None), slice(1, 3), slice(5, None)])
def test_gradients_of_some_inputs(shape, columns):
    """Columns of the gradient of the inputs, without a gradient of any parameter."""
    net = build(shape)
    x, grad = torch.randn(N, INPUTS), some_gradient(net, SHAPES[shape][2])
    expected = slow_results(net, "tanh", x, grad)[2]
    _, gradient = net.vjp(x)
    torch.testing.assert_close(gradient(grad, False, columns), expected[:, columns])
    assert gradients_of(net) == [None] * len(gradients_of(net))


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_parameters_alone(shape):
    """Without columns there is no gradient of the inputs, and those of parameters are the same."""
    net = build(shape)
    x, grad = torch.randn(N, INPUTS), some_gradient(net, SHAPES[shape][2])
    _, gradient = net.vjp(x)
    assert gradient(grad, True, None) is None
    torch.testing.assert_close(gradients_of(net), slow_results(net, "tanh", x, grad)[1])


@pytest.mark.parametrize("shape", ["two critics", "five"])
def test_gradients_are_added_to_those_that_are_there(shape):
    """Of one parameter too, where the others have none yet."""
    net = build(shape)
    x, grad = torch.randn(N, INPUTS), some_gradient(net, SHAPES[shape][2])
    expected = slow_results(net, "tanh", x, grad)[1]
    net.weight_0.grad = torch.full_like(net.weight_0, 2.0)
    for times in (1, 2):
        net.vjp(x)[1](grad, True, None)
        for i, (found, once) in enumerate(zip(gradients_of(net), expected, strict=True)):
            torch.testing.assert_close(found, times * once + (2.0 if i == 0 else 0.0))


@pytest.mark.parametrize("frozen", ["weight_0", "bias_0", "weight_1", "bias_1"])
@pytest.mark.parametrize("shape", ["one net", "five"])
def test_frozen_parameters_get_no_gradient(shape, frozen):
    """And all others get theirs, weights and biases of one layer apart."""
    net = build(shape)
    x, grad = torch.randn(N, INPUTS), some_gradient(net, SHAPES[shape][2])
    names = [name for name, _ in net.named_parameters()]
    expected = dict(zip(names, slow_results(net, "tanh", x, grad)[1], strict=True))
    net.get_parameter(frozen).requires_grad_(False)
    _, gradient = net.vjp(x)
    gradient(grad, True, slice(None))
    assert net.get_parameter(frozen).grad is None
    for name in names:
        if name != frozen:
            torch.testing.assert_close(net.get_parameter(name).grad, expected[name])


@pytest.mark.parametrize("nonlinearity", ACTIVATIONS)
@pytest.mark.parametrize("shape", ["two critics", "no hidden layer"])
def test_forward_without_graph(shape, nonlinearity):
    """The same numbers, and inputs that stay as they are."""
    net = build(shape, nonlinearity)
    x = torch.randn(N, INPUTS)
    before = x.clone()
    with torch.no_grad():
        outputs = net(x)
    assert not outputs.requires_grad
    torch.testing.assert_close(outputs, net(x).detach())
    assert torch.equal(x, before)


def test_pytorchs_initialisation_is_that_of_linear_layers():
    """Weights and biases are uniform within 1/sqrt(inputs), different in each member."""
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
def test_orthogonal_initialisation(shape):
    """Orthogonal with gain sqrt(2), the output layer with gain 1, biases 0."""
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


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))],
    ids=["deepcopy", "pickle"],
)
def test_copies(copied):
    """Copies compute the same, with weights of their own."""
    net, x = build("two critics", "silu"), torch.randn(N, INPUTS)
    twin = copied(net)
    outputs = net(x).detach()
    torch.testing.assert_close(twin(x).detach(), outputs, rtol=0, atol=0)
    torch.testing.assert_close(twin.vjp(x)[0], outputs)
    with torch.no_grad():
        for param in net.parameters():
            param.add_(1.0)
    torch.testing.assert_close(twin(x).detach(), outputs, rtol=0, atol=0)
    twin.load_state_dict(net.state_dict())
    torch.testing.assert_close(twin(x), net(x), rtol=0, atol=0)


def test_an_unknown_nonlinearity_is_refused():
    """With the names that there are."""
    with pytest.raises(ConfigError, match=r"activation = 'sin'.*tanh"):
        EnsembleMLP(2, INPUTS, [4], "sin", 1)
