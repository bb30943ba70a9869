"""Critics of states and actions: values, and gradients by hand against autograd."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from cases import sweep
from gymnasium import spaces
from torch import nn

from maze_train.nets.blocks import MLP
from maze_train.nets.config import ModelConfig
from maze_train.nets.critics import OwnCritics, TemplateCritics, build_critics
from maze_train.nets.template import resolve
from maze_train.spaces.tensors import sampled_for
from maze_train.trees import tree_leaves, tree_map

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


@pytest.fixture(autouse=True)
def _double_precision():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


class OwnCritic(nn.Module):
    """A critic of a user for Box and Dict observations; it reads a choice as a number."""

    def __init__(self, observation_space, action_size, output_size):
        super().__init__()
        leaves = getattr(observation_space, "spaces", {"": observation_space}).values()
        size = sum(math.prod(leaf.shape) for leaf in leaves)
        self.first = nn.Linear(size + action_size, 5)
        self.last = nn.Linear(5, output_size)

    def forward(self, obs, actions):
        x = [leaf.to(actions.dtype).reshape(len(leaf), -1) for leaf in tree_leaves(obs)]
        return self.last(torch.sin(self.first(torch.cat([*x, actions], -1))))


class Blind(OwnCritic):
    """A critic that does not look at actions."""

    def forward(self, obs, actions):
        return super().forward(obs, torch.zeros_like(actions))


OWN = {"_target_": f"{__name__}.OwnCritic"}


def observations(name):
    """Observations of a space above, float64 where they are floats."""
    return tree_map(
        lambda leaf: leaf.double() if leaf.is_floating_point() else leaf,
        sampled_for(SPACES[name], N),
    )


def build(name, size=2, action_size=2, output_size=3, **settings):
    """Critics with weights that are not small, each with other ones."""
    config = ModelConfig(**{"hidden_sizes": [6, 5], "branch_size": 3, **settings})
    config = resolve(config, SPACES[name])
    torch.manual_seed(1)
    return build_critics(config, SPACES[name], size, action_size, output_size)


def own_critics(size, action_size, output_size, member=OwnCritic):
    """Critics of a user, for Box observations."""
    return OwnCritics([member(BOX, action_size, output_size) for _ in range(size)])


def gradients_of(module):
    """Copies of the gradients of all parameters."""
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def by_autograd(critics, obs, actions, grad):
    """Values, gradients of all parameters, and gradient of the actions."""
    twin, leaf = copy.deepcopy(critics), actions.clone().requires_grad_()
    values = twin(obs, leaf)
    (values * grad).sum().backward()
    d_actions = torch.zeros_like(actions) if leaf.grad is None else leaf.grad
    return values.detach(), gradients_of(twin), d_actions


def check_gradients(critics, obs, action_size, output_size, size):
    """`vjp` and `action_vjp` against autograd."""
    actions = torch.randn(N, action_size)
    grad = torch.randn(size, N, output_size)
    values, gradients, d_actions = by_autograd(critics, obs, actions, grad)
    assert values.shape == (size, N, output_size)

    found, action_gradient = critics.action_vjp(critics.encode(obs), actions)
    assert not found.requires_grad
    torch.testing.assert_close(found, values)
    torch.testing.assert_close(action_gradient(grad), d_actions)
    assert all(p.grad is None for p in critics.parameters()), "action_vjp writes no gradient"
    assert actions.grad is None
    assert not actions.requires_grad

    found, write_gradients = critics.vjp(critics.encode(obs), actions)
    assert not found.requires_grad
    torch.testing.assert_close(found, values)
    write_gradients(grad)
    torch.testing.assert_close(gradients_of(critics), gradients)


@pytest.mark.parametrize("action_size", [0, 2])
@pytest.mark.parametrize("name", SPACES)
def test_gradients_of_template_critics(name, action_size):
    """For every kind of observations, with and without actions to read."""
    critics = build(name, action_size=action_size)
    assert isinstance(critics, TemplateCritics)
    check_gradients(critics, observations(name), action_size, 3, 2)


@pytest.mark.parametrize(("size", "output_size"), [(1, 1), (3, 1), (2, 4)])
@sweep("settings", [{}, {"hidden_sizes": []}, {"critic_hidden_sizes": []}])
@sweep("name", ["box", "dict"])
def test_gradients_of_any_number_of_critics(name, size, output_size, settings):
    """One, several, one value or more, with and without hidden layers."""
    critics = build(name, size, output_size=output_size, **settings)
    check_gradients(critics, observations(name), 2, output_size, size)


@pytest.mark.parametrize("action_size", [0, 2])
@pytest.mark.parametrize(("size", "output_size"), [(1, 1), (3, 4)])
def test_gradients_of_own_critics(size, output_size, action_size):
    """Networks of a user are differentiated automatically."""
    critics = own_critics(size, action_size, output_size)
    check_gradients(critics, observations("box"), action_size, output_size, size)


def test_own_critics_read_dict_observations():
    """They get the mapping of tensors."""
    critics = build("dict", critic=OWN)
    check_gradients(critics, observations("dict"), 2, 3, 2)


def test_critics_that_do_not_look_at_actions():
    """The gradient of the actions is zero."""
    critics = own_critics(2, 3, 1, Blind)
    check_gradients(critics, observations("box"), 3, 1, 2)
    _, gradient = critics.action_vjp(critics.encode(observations("box")), torch.randn(N, 3))
    assert not gradient(torch.ones(2, N, 1)).any()


def test_gradients_add_up():
    """Those of parameters are added to what is there; `action_vjp` adds nothing."""
    for critics in (build("dict with image"), own_critics(2, 2, 3)):
        name = "box" if isinstance(critics, OwnCritics) else "dict with image"
        obs, actions, grad = observations(name), torch.randn(N, 2), torch.randn(2, N, 3)
        _, expected, _ = by_autograd(critics, obs, actions, grad)
        for times in (1, 2):
            critics.vjp(critics.encode(obs), actions)[1](grad)
            critics.action_vjp(critics.encode(obs), actions)[1](grad)
            torch.testing.assert_close(gradients_of(critics), [times * g for g in expected])


@pytest.mark.parametrize("own", [False, True])
def test_gradients_of_actions_without_a_graph_around(own):
    """Callers need not say whether gradients are on."""
    critics = own_critics(2, 2, 3) if own else build("box")
    obs, actions, grad = observations("box"), torch.randn(N, 2), torch.randn(2, N, 3)
    _, gradients, d_actions = by_autograd(critics, obs, actions, grad)
    with torch.no_grad():
        torch.testing.assert_close(
            critics.action_vjp(critics.encode(obs), actions)[1](grad), d_actions
        )
        critics.vjp(critics.encode(obs), actions)[1](grad)
    torch.testing.assert_close(gradients_of(critics), gradients)


@pytest.mark.parametrize("name", HAVE_WEIGHTS)
def test_frozen_encoders_get_no_gradient(name):
    """The layers above get theirs."""
    critics = build(name)
    obs, actions, grad = observations(name), torch.randn(N, 2), torch.randn(2, N, 3)
    _, gradients, _ = by_autograd(critics, obs, actions, grad)
    critics.encoder.requires_grad_(False)
    critics.vjp(critics.encode(obs), actions)[1](grad)
    n_frozen = len(list(critics.encoder.parameters()))
    assert n_frozen
    assert gradients_of(critics)[:n_frozen] == [None] * n_frozen
    torch.testing.assert_close(gradients_of(critics)[n_frozen:], gradients[n_frozen:])


@pytest.mark.parametrize("name", SPACES)
def test_critics_share_their_encoder_and_nothing_else(name):
    """Each is a network of its own on the features of the one encoder, followed by the actions."""
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
        critics.vjp(critics.encode(obs), actions)[1](torch.eye(3)[e].view(3, 1, 1).expand(3, N, 2))
        for param in params.values():
            reached = [bool(part.any()) for part in param.grad]
            assert reached == [k == e for k in range(3)]
        assert all(bool(p.grad.any()) for p in critics.encoder.parameters())
        assert bool(list(critics.encoder.parameters())) == (name in HAVE_WEIGHTS)


def test_sizes_of_hidden_layers():
    """Critics have the sizes of the policy unless they have their own, `[]` among them."""
    for settings, sizes in (
        ({}, [6, 5]),
        ({"critic_hidden_sizes": [4]}, [4]),
        ({"critic_hidden_sizes": []}, []),
        ({"hidden_sizes": []}, []),
    ):
        params = dict(build("box", **settings).layers.named_parameters())
        assert [p.shape[2] for key, p in params.items() if "weight" in key] == [*sizes, 3]


def test_settings_reach_the_layers():
    """Nonlinearity and initialisation are those of the configuration."""
    critics = build("box", activation="relu", orthogonal_init=True)
    weight = critics.layers.weight_0[0]
    torch.testing.assert_close((weight @ weight.t()).detach(), 2 * torch.eye(5))
    assert not critics.layers.bias_0.any()
    plain = build("box", activation="relu", orthogonal_init=False)
    assert plain.layers.bias_0.all()
    params = dict(plain.layers.named_parameters())
    with torch.no_grad():
        params["bias_0"].fill_(-1e6)
        expected = params["bias_1"].relu() @ params["weight_2"] + params["bias_2"]
        found = plain(observations("box"), torch.randn(N, 2))
    torch.testing.assert_close(found, expected.expand(2, N, 3))


def test_own_critics_have_weights_of_their_own():
    """One network per critic, built by the configuration."""
    critics = build("box", size=3, output_size=1, critic=OWN)
    assert isinstance(critics, OwnCritics)
    assert [type(member) for member in critics.members] == [OwnCritic] * 3
    weights = [member.first.weight for member in critics.members]
    assert weights[0].shape == (5, 5)
    assert not torch.equal(weights[0], weights[1])
    values = critics(observations("box"), torch.randn(N, 2))
    assert values.shape == (3, N, 1)
    assert not torch.equal(values[0], values[1])
