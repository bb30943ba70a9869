"""Gradients derived by hand equal those of automatic differentiation."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from cases import sweep
from gymnasium import spaces

from maze_train import ModelConfig, build_actor_critic
from maze_train.distributions.mapping import distribution_for
from maze_train.nets.blocks import MLP
from maze_train.nets.config import ACTIVATIONS

VECTOR = spaces.Box(-1, 1, (5,))
DICT = spaces.Dict({"a": VECTOR, "b": spaces.Discrete(3)})
SPACES = {
    "box": spaces.Box(-2, 2, (3,)),
    "discrete": spaces.Discrete(4),
    "multi": spaces.MultiDiscrete([2, 3]),
    "tuple": spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,))]),
}


@pytest.fixture(autouse=True)
def _double_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def observations(space: spaces.Space, n: int = 7):
    """Random observations of the two spaces above."""
    if isinstance(space, spaces.Dict):
        return {"a": torch.randn(n, 5), "b": torch.randint(0, 3, (n,))}
    return torch.randn(n, 5)


def gradients(module: torch.nn.Module) -> list[torch.Tensor]:
    """Copies of all gradients; zeros where there is none."""
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in module.parameters()]


@pytest.mark.parametrize("nonlinearity", ACTIVATIONS)
def test_mlp(nonlinearity):
    """Outputs and gradients of an MLP are those of autograd for every nonlinearity."""
    torch.manual_seed(0)
    net = MLP(5, [8, 6], nonlinearity, output_size=3)
    x, weights = torch.randn(7, 5, requires_grad=True), torch.randn(7, 3)
    (net(x) * weights).sum().backward()
    expected, expected_input = gradients(net), x.grad
    net.zero_grad()
    outputs, gradient = net.vjp(x.detach())
    torch.testing.assert_close(outputs, net(x))
    torch.testing.assert_close(gradient(weights, True), expected_input)
    torch.testing.assert_close(gradients(net), expected)


@pytest.mark.parametrize("nonlinearity", ACTIVATIONS)
def test_forward_without_graph(nonlinearity):
    """The forward pass gives the same numbers with and without a graph."""
    net = MLP(5, [8], nonlinearity, output_size=3)
    x = torch.randn(2, 7, 5)
    with torch.no_grad():
        without = net(x)
    torch.testing.assert_close(without, net(x).detach())


@pytest.mark.parametrize("action", list(SPACES))
@pytest.mark.parametrize("space", [VECTOR, DICT], ids=["vector", "dict"])
@sweep("shared", [False, True])
def test_actor_critic(space, action, shared):
    """The gradients of a loss on both heads are those of autograd, for every kind of model."""
    config = ModelConfig(hidden_sizes=[8, 6], shared_trunk=shared)
    model = build_actor_critic(config, space, SPACES[action], seed=1).double()
    obs = observations(space)
    params, raw = model(obs)
    w_params, w_raw = torch.randn_like(params), torch.randn_like(raw)
    ((params * w_params).sum() + (raw * w_raw).sum()).backward()
    expected = gradients(model)
    model.zero_grad()
    params_by_hand, raw_by_hand, gradient = model.vjp(obs)
    gradient(w_params, w_raw)
    torch.testing.assert_close((params_by_hand, raw_by_hand), (params.detach(), raw.detach()))
    torch.testing.assert_close(gradients(model), expected)


def test_frozen_parameters_get_no_gradient():
    """A parameter that is frozen keeps its gradient untouched."""
    model = build_actor_critic(ModelConfig(), VECTOR, SPACES["box"], seed=1).double()
    frozen = next(model.policy.parameters())
    frozen.requires_grad_(False)
    params, raw, gradient = model.vjp(observations(VECTOR))
    gradient(torch.ones_like(params), torch.ones_like(raw))
    assert frozen.grad is None
    assert all(p.grad is not None for p in model.parameters() if p is not frozen)


def test_one_head_only():
    """Without a gradient of the policy head, only critic and trunk get gradients."""
    model = build_actor_critic(
        ModelConfig(shared_trunk=True), VECTOR, SPACES["box"], seed=1
    ).double()
    _, raw, gradient = model.vjp(observations(VECTOR))
    gradient(None, torch.ones_like(raw))
    assert all(p.grad is None for p in model.policy.parameters())
    assert all(p.grad is not None for p in model.critic.parameters())
    assert all(p.grad is not None for p in model.trunk.parameters())


@pytest.mark.parametrize("h", [0.0, 0.3])
@pytest.mark.parametrize("action", list(SPACES))
def test_distributions(action, h):
    """The gradient of log-probability and entropy by hand is that of autograd."""
    torch.manual_seed(2)
    family = distribution_for(SPACES[action])
    params = torch.randn(6, family.param_size)
    actions = family.sample(params, family.draw_noise((6,)).double())
    g = torch.randn(6)
    leaf = params.clone().requires_grad_()
    log_prob, entropy = family.log_prob_and_entropy(leaf, actions)
    ((log_prob * g).sum() + h * entropy.sum()).backward()
    by_hand = family.log_prob_and_entropy_vjp(params, actions)
    torch.testing.assert_close(by_hand[:2], (log_prob.detach(), entropy.detach()))
    torch.testing.assert_close(by_hand[2](g, h), leaf.grad)


def test_copies():
    """Deep copies and pickles of an MLP compute the same."""
    net = MLP(5, [8], "tanh", output_size=3)
    x = torch.randn(4, 5)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        torch.testing.assert_close(other.vjp(x)[0], net.vjp(x)[0])
