"""Policies with critics of their actions: gradients, copies, and targets that follow."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from soft_models import BOX, PROBLEMS, N, OwnCritic, build, own, results

from maze_train.nets.critics import OwnCritics, SoftActorCriticModel
from maze_train.nets.policy_model import Policy


@pytest.fixture(autouse=True)
def _as_before():
    """The same random numbers for each test."""
    torch.manual_seed(0)


def shift(module, by=1.0):
    """Move all parameters of a module."""
    with torch.no_grad():
        for param in module.parameters():
            param.add_(by)


# -- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROBLEMS)
def test_states_go_from_model_to_model(name):
    """A state loaded into a copy or another model makes it the same, targets and all."""
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
        model.update_targets(1.0)  # which moves what was loaded
        torch.testing.assert_close(*results(model, name)[1:], rtol=0, atol=0)


@pytest.mark.parametrize("critic", [None, "OwnCritic"])
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "pickle"],
)
def test_copies_move_their_own_targets(copied, critic):
    """And those of the original stay; with buffers and all."""
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
def test_targets_are_never_trained(critic):
    """They need no gradient, and stay in evaluation mode whatever the model does."""
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


def test_targets_of_critics_in_training_mode_are_evaluated():
    """Also in a model that was put together from parts."""
    built = build(critic=own("OwnCritic"))
    critics = OwnCritics([OwnCritic(BOX, 2, 1)]).train()
    model = SoftActorCriticModel(Policy(built.policy.net, built.distribution), critics)
    assert critics.members[0].training
    assert not any(module.training for module in model.target_critics.modules())


@pytest.mark.parametrize("tau", [0.0, 0.005, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("name", ["box", "parts", "image"])
def test_targets_follow_the_critics(name, tau):
    """θ' <- (1 - τ) θ' + τ θ, in float64, twice; with τ = 1 they are copies."""
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
def test_buffers_of_targets_are_copied(converted):
    """Statistics and counters, whole; also of a model that was converted or made new buffers."""
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


def test_targets_are_always_evaluated():
    """Also while the networks that they follow are trained, with dropout for example."""
    model = build().train()
    assert model.critics.training
    assert not any(module.training for module in model.target_critics.modules())
