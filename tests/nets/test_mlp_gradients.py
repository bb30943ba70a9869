"""Analytic gradients of template networks match autograd."""

from __future__ import annotations

import copy

import pytest
import torch
from gymnasium import spaces
from torch import nn

from maze_train.core.types import tree_map
from maze_train.nets.blocks import MLP
from maze_train.nets.config import ACTIVATIONS, ModelConfig
from maze_train.nets.template import TemplateNet, forward_and_backward, supports_analytic_gradients

pytestmark = pytest.mark.usefixtures("float64")

BOX = spaces.Box(-1, 1, (5,))
IMAGE = spaces.Box(0, 255, (12, 12, 3), "uint8")


def template(space, **settings):
    """Return a template network with one hidden layer."""
    return TemplateNet(space, ModelConfig(**settings), [6], 3)


def gradients_of(net):
    """Return the gradients of all parameters; None if a parameter has none."""
    return [param.grad for param in net.parameters()]


CASES = {
    **{name: (MLP(5, [8, 6], name, output_size=3), torch.randn(7, 5)) for name in ACTIVATIONS},
    "linear": (MLP(5, [], "tanh", output_size=3), torch.randn(7, 5)),
    "narrow": (MLP(5, [8], "tanh", output_size=3), torch.randn(200, 5)),
    "pieces": (MLP(5, [4096], "tanh", output_size=3), torch.randn(150, 5)),
    "box": (template(BOX), torch.randn(7, 5)),
    "discrete": (template(spaces.Discrete(4)), torch.randint(0, 4, (7,))),
    "dict": (
        template(spaces.Dict({"a": BOX, "b": spaces.MultiDiscrete([2, 3])})),
        {"a": torch.randn(7, 5), "b": torch.randint(0, 2, (7, 2))},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_analytic_mlp_gradients_match_autograd(name):
    """Gradients accumulate, and frozen parameters get none."""
    net, obs = copy.deepcopy(CASES[name])
    net = net.double()
    obs = tree_map(lambda x: x.double() if x.is_floating_point() else x, obs)
    assert supports_analytic_gradients(net)
    outputs = net(obs)
    weights = torch.randn_like(outputs)
    (outputs * weights).sum().backward()
    expected = [grad.clone() for grad in gradients_of(net)]
    with torch.no_grad():
        torch.testing.assert_close(net(obs), outputs)
    found, backward = forward_and_backward(net, obs)
    assert not found.requires_grad
    torch.testing.assert_close(found, outputs.detach())
    backward(weights, False)
    torch.testing.assert_close(gradients_of(net), [2.0 * grad for grad in expected])
    net.zero_grad()
    frozen = [*net.parameters()][:2]
    for param in frozen:
        param.requires_grad_(False)
    forward_and_backward(net, obs)[1](weights, False)
    assert gradients_of(net)[:2] == [None, None]
    torch.testing.assert_close(gradients_of(net)[2:], expected[2:])


@pytest.mark.parametrize(("units", "rows"), [(8, 7), (4096, 150)])
def test_analytic_input_gradients_match_autograd(units, rows):
    """Input gradients are optional; they match autograd, also for batches larger than the cache."""
    net, x = MLP(5, [units], "tanh", output_size=3), torch.randn(rows, 5, requires_grad=True)
    weights = torch.randn(rows, 3)
    (expected,) = torch.autograd.grad((net(x) * weights).sum(), x)
    torch.testing.assert_close(forward_and_backward(net, x.detach())[1](weights, True), expected)


def test_custom_networks_have_no_analytic_gradients():
    """Subclasses, changed layers and encoders with weights use autograd."""

    class Doubled(MLP):
        def forward(self, x):
            return 2.0 * super().forward(x)

    replaced = template(BOX)
    nn.utils.parametrizations.weight_norm(replaced.layers.layers[0])
    others = [
        Doubled(5, [8], "tanh"),
        nn.Sequential(nn.Linear(5, 3)),
        replaced,
        template(IMAGE),
        template(spaces.Dict({"a": BOX, "b": IMAGE})),
    ]
    assert [supports_analytic_gradients(net) for net in others] == [False] * len(others)
