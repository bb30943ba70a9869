"""State-value critics and Q-networks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from own_networks import own

from maze_train.core.types import tree_map
from maze_train.nets.blocks import MLP
from maze_train.nets.config import ModelConfig
from maze_train.nets.critics import build_critics
from maze_train.nets.template import resolve
from maze_train.spaces.tensors import sampled_for

pytestmark = pytest.mark.usefixtures("float64")

N = 4
BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (12, 12, 2), np.uint8)
SPACES = {
    "box": BOX,
    "matrix": spaces.Box(-1.0, 1.0, (2, 2), np.float64),
    "discrete": spaces.Discrete(4, start=2),
    "multi_binary": spaces.MultiBinary(3),
    "image": IMAGE,
    "dict": spaces.Dict({"at": BOX, "gear": spaces.Discrete(3)}),
    "dict with image": spaces.Dict({"at": BOX, "eye": IMAGE}),
}
HAVE_WEIGHTS = ("image", "dict", "dict with image")
"""Spaces whose encoder has weights."""


OWN = own("OwnNet", width=5)


def observations(name):
    """Return observations of a space, with floats as float64."""
    return tree_map(
        lambda leaf: leaf.double() if leaf.is_floating_point() else leaf,
        sampled_for(SPACES[name], N),
    )


def build(name, size=2, action_size=2, output_size=3, **settings):
    """Return critics with different random weights."""
    config = ModelConfig(**{"hidden_sizes": [6, 5], "branch_size": 3, **settings})
    config = resolve(config, SPACES[name])
    torch.manual_seed(1)
    return build_critics(config, SPACES[name], size, action_size, output_size)


@pytest.mark.parametrize("name", SPACES)
def test_critics_share_the_encoder_only(name):
    """Each critic is a separate network on the shared features and the actions."""
    critics = build(name, size=3, output_size=2)
    obs, actions = observations(name), torch.randn(N, 2)
    x = torch.cat([critics.encoder(obs), actions], -1).detach()
    params = dict(critics.layers.named_parameters())
    values = critics(obs, actions)
    for e in range(3):
        net = MLP(x.shape[1], [6, 5], "relu" if "image" in name else "tanh", output_size=2)
        with torch.no_grad():
            for i, layer in enumerate(net.layers):
                layer.weight.copy_(params[f"weight_{i}"][e].t())
                layer.bias.copy_(params[f"bias_{i}"][e, 0])
        torch.testing.assert_close(values[e], net(x))
        critics.zero_grad()
        critics(obs, actions)[e].sum().backward()
        for param in params.values():
            reached = [bool(part.any()) for part in param.grad]
            assert reached == [k == e for k in range(3)]
        assert all(bool(p.grad.any()) for p in critics.encoder.parameters())
        assert bool(list(critics.encoder.parameters())) == (name in HAVE_WEIGHTS)


@pytest.mark.parametrize("name", ["dict with image", "own"])
def test_critic_values_of_encoded_observations_match(name):
    """Encoding observations first and adding actions later gives the same values."""
    is_own = name == "own"
    critics = build("box", critic=OWN) if is_own else build(name)
    obs, actions = observations("box" if is_own else name), torch.randn(N, 2)
    values = critics(obs, actions)
    assert values.shape == (2, N, 3)
    features = critics.encode(obs)
    torch.testing.assert_close(critics.values(features, actions), values)
    torch.testing.assert_close(critics.values(features, actions, first=1), values[:1])


def test_critic_hidden_sizes_default_to_the_policy():
    """Critics use the policy's hidden sizes unless they have a setting, which may be `[]`."""
    for settings, sizes in (
        ({}, [6, 5]),
        ({"critic_hidden_sizes": [4]}, [4]),
        ({"critic_hidden_sizes": []}, []),
        ({"hidden_sizes": []}, []),
    ):
        params = dict(build("box", **settings).layers.named_parameters())
        assert [p.shape[2] for key, p in params.items() if "weight" in key] == [*sizes, 3]
