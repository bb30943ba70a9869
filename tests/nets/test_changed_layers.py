"""Hooks, parametrizations and adapters on layers of template networks take effect."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torch.nn.utils import parametrizations, prune

from maze_train.nets.blocks import ImageEncoder
from maze_train.nets.config import ModelConfig, RecurrentConfig
from maze_train.nets.critics import EnsembleMLP
from maze_train.nets.policy_model import build_policy
from maze_train.nets.population import is_batchable
from maze_train.nets.recurrent import RecurrentNetwork
from maze_train.nets.template import supports_analytic_gradients

BOX = spaces.Box(-1.0, 1.0, (5,), np.float32)
IMAGE = spaces.Box(0, 255, (12, 12, 3), np.uint8)


class Adapter(nn.Module):
    """Layer plus a low-rank addition, as in LoRA."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Doubled(nn.Module):
    """Parametrization that doubles the weight."""

    def forward(self, weight):
        return 2 * weight


def replace_by_adapter(layers, i):
    """Replace a layer by an adapter."""
    layers[i] = Adapter(layers[i])


def double_forward(layers, i):
    """Replace the `forward` of a layer."""
    layer = layers[i]
    layer.forward = lambda x: 2 * type(layer).forward(layer, x)


CHANGES = {
    "forward hook": lambda layers, i: layers[i].register_forward_hook(lambda m, x, y: 2 * y),
    "pre hook": lambda layers, i: layers[i].register_forward_pre_hook(lambda m, x: (2 * x[0],)),
    "spectral norm": lambda layers, i: parametrizations.spectral_norm(layers[i]).eval(),
    "old spectral norm": lambda layers, i: nn.utils.spectral_norm(layers[i]).eval(),
    "parametrization": lambda layers, i: nn.utils.parametrize.register_parametrization(
        layers[i], "weight", Doubled()
    ),
    "pruning": lambda layers, i: prune.l1_unstructured(layers[i], "weight", 0.5),
    "adapter": replace_by_adapter,
    "another forward": double_forward,
}


def reference(mlp, x):
    """Return the result of calling the layers one after another."""
    for i, layer in enumerate(mlp.layers):
        x = layer(x)
        if i < mlp.n_hidden:
            x = torch.tanh(x)
    return x


@pytest.mark.filterwarnings("ignore:.*weight_norm.*|.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("i", [0, 2])
def test_hooked_or_changed_layers_are_called(change, i):
    """The changed layers are called, and fast paths for plain networks are disabled."""
    model = build_policy(ModelConfig(), BOX, spaces.Discrete(3), 0)
    obs, net = torch.randn(7, 5), model.policy.net
    before = model.policy_params(obs)
    assert supports_analytic_gradients(net)
    change(net.layers.layers, i)
    params = model.policy_params(obs)
    assert not torch.allclose(params, before)
    torch.testing.assert_close(params, reference(net.layers, obs))
    assert not supports_analytic_gradients(net)
    assert not is_batchable(model)


def test_hooks_receive_unmodified_outputs():
    """Stored outputs are not overwritten by activations, and backward hooks are called."""
    model = build_policy(ModelConfig(), BOX, spaces.Discrete(3), 0)
    layer, kept, gradients = model.policy.net.layers.layers[1], [], []
    layer.register_forward_hook(lambda m, x, y: kept.append((x[0], y)))
    layer.register_full_backward_hook(lambda m, of_x, of_y: gradients.append(of_y[0]))
    model.policy_params(torch.randn(7, 5)).sum().backward()
    ((x, y),) = kept
    torch.testing.assert_close(y, nn.functional.linear(x, layer.weight, layer.bias))
    assert gradients[0].shape == (7, 64)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("layers", [1, 2])
def test_changed_recurrent_layers_are_called(cell, layers):
    """Layers with hooks are called step by step with the same result; changes have an effect."""
    net = RecurrentNetwork(3, RecurrentConfig(cell=cell, size=4, layers=layers), True)
    x, state = torch.randn(6, 2, 3), torch.randn(2, net.state_size)
    resets = torch.zeros(6, 2, dtype=torch.bool)
    resets[0, 0] = resets[3, 1] = True
    step, sequence = net.step(x[0], state), net.sequence(x, state, resets)
    seen = []
    net.layers.register_forward_hook(lambda m, inputs, outputs: seen.append(inputs[0].shape))
    for found, expected in zip(net.step(x[0], state), step, strict=True):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(net.sequence(x, state, resets), sequence)
    assert seen == [(1, 2, 3)] * 7
    nn.utils.parametrize.register_parametrization(net.layers, "weight_hh_l0", Doubled())
    assert not torch.allclose(net.sequence(x, state, resets), sequence)


@pytest.mark.parametrize("change", ["forward hook", "spectral norm", "parametrization"])
@pytest.mark.parametrize("kind", ["nature", "impala"])
def test_hooked_first_convolution_is_called(kind, change):
    """A hook or change on the first convolution, which has a fast path, takes effect."""
    encoder = ImageEncoder(IMAGE, kind)
    images = torch.randint(0, 256, (3, 12, 12, 3), dtype=torch.uint8)
    before = encoder(images)
    encoder.first.register_forward_hook(lambda m, x, y: None)
    torch.testing.assert_close(encoder(images), before, rtol=1e-4, atol=1e-5)
    CHANGES[change]([encoder.first], 0)
    assert not torch.allclose(encoder(images), before)


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
def test_batched_critic_weights_can_be_parametrized():
    """Batched weights can be parametrized by name."""
    net = EnsembleMLP(2, 3, [8], "relu", 1).eval()
    x = torch.randn(4, 3)
    doubled = copy.deepcopy(net)
    with torch.no_grad():
        doubled.weight_0.mul_(2)
    nn.utils.parametrize.register_parametrization(net, "weight_0", Doubled())
    torch.testing.assert_close(net(x), doubled(x))
    torch.testing.assert_close(net(x, 1), doubled(x, 1))
    nn.utils.spectral_norm(doubled, "weight_0").eval()
    assert not torch.allclose(net(x), doubled(x))
