"""Models with Q-networks: construction, copies, and target networks."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from maze_train.algorithms.sac.model import SoftActorCriticModel, build_soft_actor_critic
from maze_train.distributions.gaussian import SquashedGaussian
from maze_train.nets.config import ModelConfig
from maze_train.nets.critics import CustomCritics, TemplateCritics
from maze_train.nets.policy_model import Policy
from maze_train.spaces.tensors import sampled_for

N = 5
BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (16, 16, 1), np.uint8)
PARTS = spaces.Dict({"at": BOX, "gear": spaces.Discrete(3)})
MASKED = spaces.Dict({"at": BOX, "action_mask": spaces.MultiBinary(4)})
REACH = spaces.Box(-2.0, 3.0, (2,), np.float32)
MIXED = spaces.Dict(
    {
        "aim": REACH,
        "fire": spaces.Discrete(2),
        "menu": spaces.MultiDiscrete([2, 3]),
        "turn": spaces.Box(-1.0, 1.0, (1,), np.float32),
    }
)
PROBLEMS = {
    "box": (BOX, REACH),
    "discrete": (BOX, spaces.Discrete(4)),
    "image": (IMAGE, REACH),
    "parts": (PARTS, MIXED),
    "masked": (MASKED, spaces.Discrete(4)),
}


class OwnCritic(nn.Module):
    """User-defined critic with batch norm and a counter as buffers."""

    def __init__(self, observation_space, action_size, output_size):
        super().__init__()
        self.norm = nn.BatchNorm1d(3 + action_size)
        self.last = nn.Linear(3 + action_size, output_size)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, obs, actions):
        if self.training:
            self.calls = self.calls + 1  # a new tensor in each call
        return self.last(self.norm(torch.cat([obs, actions], -1)))


def own(name, **settings):
    """Return the configuration of a network above."""
    return {"_target_": f"{__name__}.{name}", **settings}


def build(name="box", seed=0, num_critics=2, **settings):
    """Return a small model of a problem above."""
    config = ModelConfig(**{"hidden_sizes": [6, 5], "branch_size": 3, **settings})
    return build_soft_actor_critic(config, *PROBLEMS[name], seed, num_critics)


def observations(name):
    """Return observations of a problem; if there is a mask, every second action is illegal."""
    obs = sampled_for(PROBLEMS[name][0], N)
    if name == "masked":
        obs["action_mask"] = torch.tensor([[1, 0, 1, 0]]).expand(N, 4)
    return obs


def results(model, name):
    """Return distribution parameters, and the values of critics and targets for fixed actions."""
    obs = observations(name)
    inputs, actions = model.inputs(obs), torch.full((N, model.actions.critic_input_size), 0.3)
    with torch.no_grad():
        critics = [c(inputs, actions) for c in (model.critics, model.target_critics)]
        return [model.policy_params(obs), *critics]


@pytest.fixture(autouse=True)
def _as_before():
    """Seed the random numbers of each test."""
    torch.manual_seed(0)


def shift(module, by=1.0):
    """Add a constant to all parameters of a module."""
    with torch.no_grad():
        for param in module.parameters():
            param.add_(by)


# -- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROBLEMS)
def test_loaded_soft_actor_critic_is_identical(name):
    """A loaded state gives identical results, including target networks."""
    first, second = build(name, seed=1), build(name, seed=2)
    twin = copy.deepcopy(second)
    shift(first.target_critics)
    with torch.no_grad():
        first.log_temperatures.fill_(0.7)
    state = copy.deepcopy(first.state_dict())
    for model in (second, twin):
        model.load_state_dict(state)
        torch.testing.assert_close(results(model, name), results(first, name), rtol=0, atol=0)
        assert torch.equal(model.log_temperatures, first.log_temperatures)
        assert model.state_dict().keys() == state.keys()
        model.update_targets(1.0)  # updates the loaded targets
        torch.testing.assert_close(*results(model, name)[1:], rtol=0, atol=0)


@pytest.mark.parametrize("critic", [None, "OwnCritic"])
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "pickle"],
)
def test_copied_models_have_independent_targets(copied, critic):
    """Targets of a copy, including buffers, are independent of the original."""
    model = build(critic=critic and own(critic))
    twin = copied(model)
    for part in (model.critics, twin.critics):
        shift(part)
        for buffer in part.buffers():
            buffer.add_(1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    twin.update_targets(1.0)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    targets, sources = twin.target_critics.state_dict(), twin.critics.state_dict()
    for key, value in targets.items():
        assert torch.equal(value, sources[key]), key
    assert not torch.equal(results(model, "box")[2], results(twin, "box")[2])
    model.update_targets(1.0)
    torch.testing.assert_close(results(model, "box"), results(twin, "box"), rtol=0, atol=0)


# -- targets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("critic", [None, "OwnCritic"])
def test_target_networks_are_never_trained(critic):
    """Targets require no gradient and are always in evaluation mode."""
    model = build(critic=critic and own(critic))
    assert not any(p.requires_grad for p in model.target_critics.parameters())
    assert all(p.requires_grad for p in model.critics.parameters())
    assert all(p.requires_grad for p in model.policy.parameters())
    for mode in (True, False, True):
        assert model.train(mode) is model
        assert model.critics.training is mode
        assert model.policy.training is mode
        assert not any(module.training for module in model.target_critics.modules())
    if critic:
        before = copy.deepcopy(dict(model.target_critics.named_buffers()))
        model.target_critics(torch.randn(N, 3), torch.randn(N, 2))
        for key, buffer in model.target_critics.named_buffers():
            assert torch.equal(buffer, before[key])
        first = copy.deepcopy(model.critics.members[0].norm.running_mean)
        model.critics(torch.randn(N, 3), torch.randn(N, 2))
        assert not torch.equal(model.critics.members[0].norm.running_mean, first)


def test_target_networks_stay_in_evaluation_mode():
    """Targets are in evaluation mode, also in a model built from components."""
    built = build(critic=own("OwnCritic"))
    critics = CustomCritics([OwnCritic(BOX, 2, 1)]).train()
    model = SoftActorCriticModel(Policy(built.policy.net, built.distribution), critics)
    assert critics.members[0].training
    assert not any(module.training for module in model.target_critics.modules())


@pytest.mark.parametrize("tau", [0.0, 0.005, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("name", ["box", "parts", "image"])
def test_soft_update_moves_targets_by_tau(name, tau):
    """θ' <- (1 - τ) θ' + τ θ in float64, twice; τ = 1 copies the critics."""
    model = build(name).double()
    shift(model.target_critics, 0.5)
    targets = [p.clone() for p in model.target_critics.parameters()]
    sources = [p.detach().clone() for p in model.critics.parameters()]
    for _ in range(2):
        model.update_targets(tau)
        targets = [(1 - tau) * t + tau * s for t, s in zip(targets, sources, strict=True)]
    found = list(model.target_critics.parameters())
    exactly = {"rtol": 0, "atol": 0} if tau in (0.0, 1.0) else {"rtol": 1e-13, "atol": 1e-15}
    torch.testing.assert_close([p.detach() for p in found], targets, **exactly)
    torch.testing.assert_close(
        [p.detach() for p in model.critics.parameters()], sources, rtol=0, atol=0
    )
    assert not any(p.requires_grad for p in found)


@pytest.mark.parametrize("converted", [False, True])
def test_target_buffers_are_copied(converted):
    """Buffers are copied completely, also if the model was converted or replaced its buffers."""
    model = build(critic=own("OwnCritic"))
    if converted:
        model = model.double()
    dtype = model.log_temperatures.dtype
    model.train()
    for _ in range(3):
        model.critics(torch.randn(N, 3, dtype=dtype) + 4, torch.randn(N, 2, dtype=dtype))
        model.update_targets(0.01)
        sources = dict(model.critics.named_buffers())
        for key, buffer in model.target_critics.named_buffers():
            assert torch.equal(buffer, sources[key]), key
    assert float(sources["members.1.calls"]) == 3
    assert float(model.target_critics.members[0].norm.running_mean[0]) > 0.5


# -- Soft actor-critics as a configuration describes them ------------------------------------------


def build_by_default(name):
    """Return a model with default settings."""
    return build_soft_actor_critic(ModelConfig(), *PROBLEMS[name], 0)


def test_defaults():
    """Two hidden layers of 256 units, relu, PyTorch initialization, two critics."""
    model = build_by_default("box")
    layers = list(model.policy.net.layers.layers)
    assert [layer.out_features for layer in layers] == [256, 256, 4]
    shapes = {key: tuple(p.shape) for key, p in model.critics.layers.named_parameters()}
    weights = {"weight_0": (2, 5, 256), "weight_1": (2, 256, 256), "weight_2": (2, 256, 1)}
    assert {key: shape for key, shape in shapes.items() if "weight" in key} == weights
    assert model.policy.net.layers.nonlinearity == "relu"
    assert type(model.distribution) is SquashedGaussian
    assert model.policy.free_params is None
    assert model.normalizer is None
    assert model.masking is None
    biases = [layer.bias.detach() for layer in layers]
    biases += [model.critics.layers.get_parameter(f"bias_{i}").detach() for i in range(3)]
    for bias, inputs in zip(biases, (3, 256, 256, 5, 256, 256), strict=True):
        assert bias.all(), "orthogonal weights come with biases of 0"
        assert float(bias.abs().max()) <= inputs**-0.5
    assert not model.training


@pytest.mark.parametrize("num_critics", [1, 2, 5])
@pytest.mark.parametrize("critic", [None, "OwnCritic"])
def test_any_number_of_critics_has_targets(num_critics, critic):
    """Critics have different weights, and the targets contain all of them."""
    model = build(num_critics=num_critics, critic=critic and own(critic))
    assert isinstance(model.critics, CustomCritics if critic else TemplateCritics)
    _, q, target_q = results(model, "box")
    assert q.shape == (num_critics, N, 1)
    assert torch.equal(q, target_q)
    assert len(torch.unique(q[:, 0])) == num_critics
