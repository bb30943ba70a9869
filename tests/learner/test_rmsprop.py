"""RMSpropTF computes what TensorFlow 1 does, alone and inside of ModuleOptimizer."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from torch import nn

from maze_train.errors import ConfigError
from maze_train.learner.optimizers import ModuleOptimizer
from maze_train.learner.rmsprop import RMSpropTF

TARGET = "maze_train.learner.rmsprop.RMSpropTF"


def reference(start, gradients, lrs, alpha, eps, momentum):
    """Entry by entry in plain Python: eps under the root, a mean square that starts at 1."""
    moved = []
    for entry, p in enumerate(start):
        mean_square, step = 1.0, 0.0
        for gradient, lr in zip(gradients, lrs, strict=True):
            g = float(gradient[entry])
            mean_square = alpha * mean_square + (1.0 - alpha) * g * g
            step = momentum * step + lr * g / math.sqrt(mean_square + eps)
            p -= step
        moved.append(p)
    return moved


def make_gradients(num_steps=6, size=5):
    """Gradients from tiny to large, zeros included."""
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(num_steps, size)) * 10.0 ** np.arange(-3, size - 3)
    gradients[2, 1] = 0.0
    return gradients


def apply(optimizer, param, gradients, lrs):
    """Steps with given gradients and learning rates."""
    for gradient, lr in zip(gradients, lrs, strict=True):
        param.grad = torch.from_numpy(gradient).to(param.dtype)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("alpha", [0.0, 0.9, 0.99])
@pytest.mark.parametrize("eps", [1e-8, 0.1])
def test_steps_are_those_of_tensorflow(momentum, alpha, eps):
    """Under changing learning rates, which the momentum keeps as they were."""
    gradients, lrs = make_gradients(), [0.1, 0.1, 0.05, 0.0, 0.2, 0.01]
    gradients[gradients == 0.0] = 1e-4 if eps < 1e-4 else 0.0
    start = [1.0, -2.0, 0.5, 0.0, 3.0]
    param = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    optimizer = RMSpropTF([param], lr=1.0, alpha=alpha, eps=eps, momentum=momentum)
    apply(optimizer, param, gradients, lrs)
    expected = reference(start, gradients, lrs, alpha, eps, momentum)
    np.testing.assert_allclose(param.detach(), expected, rtol=1e-12, atol=1e-14)


def test_defaults_are_the_published_ones():
    """IMPALA: decay 0.99, epsilon 0.1, no momentum; the first step by hand."""
    param = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = RMSpropTF([param], lr=0.5)
    apply(optimizer, param, np.array([[3.0]]), [0.5])
    assert param.item() == pytest.approx(1.0 - 0.5 * 3.0 / math.sqrt(0.99 + 0.09 + 0.1), rel=1e-12)


def test_parameters_without_gradient_stay():
    """What has no gradient is neither moved nor remembered; groups have rates of their own."""
    first, frozen, second = (nn.Parameter(torch.ones(2)) for _ in range(3))
    groups = [{"params": [first, frozen]}, {"params": [second], "lr": 0.2}]
    optimizer = RMSpropTF(groups, lr=0.1)
    first.grad, second.grad = torch.ones(2), torch.ones(2)
    optimizer.step()
    assert torch.equal(frozen, torch.ones(2))
    assert set(optimizer.state) == {first, second}
    torch.testing.assert_close(1.0 - second.detach(), 2.0 * (1.0 - first.detach()))


def test_closure_is_evaluated_with_gradients():
    """Its loss is returned, and the gradients that it makes are those of the step."""
    param = nn.Parameter(torch.tensor([2.0]))
    optimizer = RMSpropTF([param], lr=0.1)

    def closure():
        loss = param.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 4.0
    assert param.item() == pytest.approx(2.0 - 0.4 / math.sqrt(0.99 + 0.16 + 0.1))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_state_continues(momentum):
    """Three steps, written to a file and read elsewhere, three more: as six in a row."""
    gradients, lrs = make_gradients(), [0.1] * 6
    straight, halved = (nn.Parameter(torch.ones(5)) for _ in range(2))
    apply(RMSpropTF([straight], lr=0.1, momentum=momentum), straight, gradients, lrs)
    first = RMSpropTF([halved], lr=0.1, momentum=momentum)
    apply(first, halved, gradients[:3], lrs[:3])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    moved = nn.Parameter(halved.detach().clone())
    second = RMSpropTF([moved], lr=0.7, alpha=0.5, momentum=momentum)
    second.load_state_dict(torch.load(file, weights_only=True))
    apply(second, moved, gradients[3:], lrs[3:])
    assert torch.equal(moved, straight)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("lr", -0.1, "a number >= 0"),
        ("lr", math.nan, "a finite number"),
        ("alpha", 1.5, r"a number in \[0, 1\]"),
        ("eps", 0.0, "a number > 0"),
        ("momentum", -0.5, r"a number in \[0, 1\]"),
    ],
)
def test_arguments_out_of_range_are_refused(key, value, expected):
    """The message names the argument, also below the key of the configuration."""
    params = [nn.Parameter(torch.ones(1))]
    with pytest.raises(ConfigError, match=rf"^{key} = .*: expected {expected}"):
        RMSpropTF(params, **{"lr": 0.1, key: value})
    if key != "lr":
        with pytest.raises(ConfigError, match=rf"^algorithm.optimizer.{key} = "):
            ModuleOptimizer(params, {"_target_": TARGET, key: value}, lr=0.1)


@pytest.mark.parametrize(
    ("settings", "eps"), [({}, 0.1), ({"eps": 0.1}, 0.1), ({"eps": 1e-3}, 1e-3)]
)
def test_module_optimizer_keeps_epsilon(settings, eps):
    """What is given holds, and else the default of the class, not the 1e-5 of other optimizers."""
    node = {"_target_": TARGET, **settings}
    optimizer = ModuleOptimizer([nn.Parameter(torch.ones(2))], node, lr=0.1).optimizer
    assert optimizer.defaults["eps"] == eps


def test_module_optimizer_steps_one_flat_vector():
    """All parameters of a module move as one vector, by the steps that they would make apart."""
    torch.manual_seed(0)
    nets = [nn.Linear(3, 2).double() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    node = {"_target_": TARGET, "eps": 0.1, "momentum": 0.5}
    ours = ModuleOptimizer(list(nets[0].parameters()), node, lr=0.05)
    apart = RMSpropTF(nets[1].parameters(), lr=0.05, eps=0.1, momentum=0.5)
    (owned,) = ours.optimizer.param_groups[0]["params"]
    assert owned.shape == (8,)
    start = nets[0].weight.detach().clone()
    for step in range(1, 4):
        for net, optimizer in zip(nets, (ours, apart), strict=True):
            optimizer.zero_grad()
            (net(torch.ones(3).double()) - step).square().sum().backward()
            optimizer.step()
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert (nets[0].weight.detach() - start).abs().min() > 1e-3


def test_reset_starts_the_mean_square_at_one_again():
    """After `reset` a step has the length of the first one."""
    param = nn.Parameter(torch.zeros(1))
    optimizer = ModuleOptimizer([param], {"_target_": TARGET}, lr=0.1)
    steps = []
    for number in range(3):
        if number == 2:
            optimizer.reset()
        before = param.item()
        optimizer.zero_grad()
        (10.0 * param).sum().backward()
        optimizer.step()
        steps.append(before - param.item())
    assert steps[1] < 0.9 * steps[0]
    assert steps[2] == pytest.approx(steps[0], rel=1e-6)
