from __future__ import annotations

import pytest
import torch
from torch import nn

from maze_train.errors import ConfigError
from maze_train.learner.config import Progress, Schedule
from maze_train.learner.optimizers import ModuleOptimizer

OWN = "test_module_optimizer"


class HalfStep(torch.optim.Optimizer):
    """An optimizer of a user that depends on the shape of each parameter."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.shapes = [tuple(p.shape) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * param.grad / param.numel())


def make_params():
    """Two parameters with known values."""
    return [nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]])), nn.Parameter(torch.ones(3))]


def step(optimizer, params, scale=1.0):
    """One step on a loss whose gradient is `scale` everywhere."""
    optimizer.zero_grad()
    (scale * sum(p.sum() for p in params)).backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "Adagrad", "NAdam"])
def test_epsilon_is_that_of_the_field_unless_given(name):
    """Trap 17: eps is 1e-5 where the class has one, and what the user says if he does."""
    node = {"_target_": f"torch.optim.{name}"}
    assert ModuleOptimizer(make_params(), node, 0.1).optimizer.defaults["eps"] == 1e-5
    chosen = ModuleOptimizer(make_params(), {**node, "eps": 1e-8}, 0.1)
    assert chosen.optimizer.defaults["eps"] == 1e-8


def test_epsilon_matters():
    """A first step of Adam on a gradient of 1e-5 is half as long as with a tiny epsilon."""
    for settings, length in (({}, 0.05), ({"eps": 1e-12}, 0.1)):
        params = make_params()
        optimizer = ModuleOptimizer(params, {"_target_": "torch.optim.Adam", **settings}, lr=0.1)
        step(optimizer, params, scale=1e-5)
        torch.testing.assert_close(
            params[1].detach(), torch.full((3,), 1 - length), rtol=0, atol=1e-6
        )


def test_classes_without_epsilon_are_fine():
    """Nothing is passed that the class does not take."""
    node = {"_target_": "torch.optim.SGD", "momentum": 0.5}
    optimizer = ModuleOptimizer(make_params(), node, 0.1).optimizer
    assert "eps" not in optimizer.defaults
    assert optimizer.defaults["momentum"] == 0.5


@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": False}, {"capturable": False}])
def test_the_implementation_is_the_users_choice(settings):
    """A kernel that is asked for is not joined by the fused one, which excludes it."""
    node = {"_target_": "torch.optim.Adam", **settings}
    optimizer = ModuleOptimizer(make_params(), node, 0.1).optimizer
    assert not optimizer.defaults["fused"]


@pytest.mark.parametrize(
    "target",
    [
        f"{OWN}.HalfStep",
        "torch.optim.Rprop",
        pytest.param("torch.optim.Adafactor"),
    ],
)
def test_other_optimizers_see_the_parameters_as_they_are(target):
    """An optimizer that may look at shapes gets the parameters, not a flat vector."""
    params, reference = make_params(), make_params()
    optimizer = ModuleOptimizer(params, {"_target_": target}, lr=0.1)
    owned = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(owned, params, strict=True))
    classes = {"HalfStep": HalfStep}
    name = target.rsplit(".", 1)[1]
    plain = (classes.get(name) or getattr(torch.optim, name))(reference, lr=0.1)
    for _ in range(3):
        step(optimizer, params)
        plain.zero_grad()
        sum(p.sum() for p in reference).backward()
        plain.step()
    for ours, theirs in zip(params, reference, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        assert not torch.equal(ours, torch.ones_like(ours))


def test_the_learning_rate_is_set_for_the_next_step():
    """The step after `set_lr` uses the rate of that moment."""
    params = make_params()
    schedule = Schedule(start=0.5, end=0.0)
    optimizer = ModuleOptimizer(params, {"_target_": "torch.optim.SGD"}, schedule)
    for fraction, expected in ((0.0, 0.5), (0.75, 0.125)):
        before = params[1].detach().clone()
        assert optimizer.set_lr(Progress(fraction=fraction)) == expected
        step(optimizer, params)
        assert (before - params[1].detach()).tolist() == [expected] * 3


def test_frozen_parameters_are_left_out():
    """A parameter without gradient is not moved, not even by weight decay."""
    params = make_params()
    params[0].requires_grad_(False)
    node = {"_target_": "torch.optim.AdamW", "weight_decay": 0.5}
    optimizer = ModuleOptimizer(params, node, lr=0.1)
    step(optimizer, params[1:])
    assert params[0].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert not torch.equal(params[1].detach(), torch.ones(3))


def test_nothing_to_optimize_is_fine():
    """A module whose parameters are all frozen has an optimizer that does nothing."""
    params = make_params()
    for param in params:
        param.requires_grad_(False)
    optimizer = ModuleOptimizer(params, {"_target_": "torch.optim.Adam"}, lr=0.1)
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.set_lr(Progress()) == 0.1
    assert float(optimizer.clip(0.5, "global_norm")) == 0.0
    assert optimizer.state_dict() == {}
    optimizer.load_state_dict({})


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": "torch.optim.Adma"}, r"algorithm.optimizer._target_ = .*did you mean Adam"),
        ({"_target_": "torch.nn.Linear"}, r"_target_ = .*: expected a torch.optim.Optimizer"),
        ({"_target_": "torch.optim.lr_scheduler"}, r"expected a torch.optim.Optimizer"),
        (
            {"_target_": "torch.optim.Adam", "momentun": 0.9},
            r"algorithm.optimizer: calling torch.optim.Adam failed: .*'momentun'",
        ),
    ],
)
def test_wrong_optimizers_are_named(node, message):
    """The message names the key and what was wrong."""
    with pytest.raises(ConfigError, match=message):
        ModuleOptimizer(make_params(), node, lr=0.1)


def test_values_that_the_optimizer_refuses_are_named():
    """A value out of the optimizer's range is an error of the configuration."""
    node = {"_target_": "torch.optim.Adam", "weight_decay": -1.0}
    with pytest.raises(ConfigError, match=r"algorithm.optimizer: .*weight_decay"):
        ModuleOptimizer(make_params(), node, lr=0.1)


def test_state_continues():
    """Two steps, saved and loaded elsewhere, then one: as three steps in a row."""
    node = {"_target_": "torch.optim.Adam"}
    straight, first, second = make_params(), make_params(), make_params()
    whole = ModuleOptimizer(straight, node, lr=0.1)
    for scale in (1.0, 5.0, -2.0):
        step(whole, straight, scale)
    half = ModuleOptimizer(first, node, lr=0.1)
    for scale in (1.0, 5.0):
        step(half, first, scale)
    rest = ModuleOptimizer(second, node, lr=0.1)
    with torch.no_grad():
        for a, b in zip(second, first, strict=True):
            a.copy_(b)
    rest.load_state_dict(half.state_dict())
    step(rest, second, -2.0)
    for a, b in zip(second, straight, strict=True):
        assert torch.equal(a, b)
