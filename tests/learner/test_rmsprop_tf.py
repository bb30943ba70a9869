"""RMSprop of TensorFlow matches its formula."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from maze_train import ConfigError, RMSpropTF
from maze_train.learner.optimizers import ModuleOptimizer

LRS = [0.1, 0.1, 0.05, 0.0, 0.2, 0.01]
GRADIENTS = np.random.default_rng(0).normal(size=(6, 11)) * 10.0 ** (np.arange(11) % 6 - 3)


def slow_steps(gradients: list[float], alpha: float, eps: float) -> list[float]:
    """Return the steps of TensorFlow 1: eps inside the root, mean square initialized to 1."""
    mean_square, steps = 1.0, []
    for g in gradients:
        mean_square = alpha * mean_square + (1.0 - alpha) * g * g
        steps.append(g / math.sqrt(mean_square + eps))
    return steps


def apply(optimizer: RMSpropTF, numbers: range) -> None:
    """Take steps with the gradients and learning rates of the given numbers."""
    (param,) = optimizer.param_groups[0]["params"]
    for i in numbers:
        param.grad = torch.from_numpy(GRADIENTS[i])
        optimizer.param_groups[0]["lr"] = LRS[i]
        optimizer.step()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("alpha", [0.0, 0.9, 0.99])
@pytest.mark.parametrize("eps", [1e-8, 0.1])
def test_steps_match_the_formula(alpha: float, eps: float, momentum: float) -> None:
    """Steps match entry by entry, with changing learning rates and after pickling."""
    start = np.arange(11.0)
    directions = np.array([slow_steps(column.tolist(), alpha, eps) for column in GRADIENTS.T]).T
    steps = np.array(LRS)[:, None] * directions
    summed = [sum(momentum**age * s for age, s in enumerate(steps[t::-1])) for t in range(6)]
    param = nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = RMSpropTF([param], lr=1.0, alpha=alpha, eps=eps, momentum=momentum)
    apply(optimizer, range(3))
    optimizer = pickle.loads(pickle.dumps(optimizer))
    apply(optimizer, range(3, 6))
    moved = optimizer.param_groups[0]["params"][0].detach()
    np.testing.assert_allclose(moved, start - sum(summed), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("lr", -0.1, "a number >= 0"),
        ("alpha", 1.5, r"a number in \[0, 1\]"),
        ("eps", 0.0, "a number > 0"),
        ("momentum", -0.5, r"a number in \[0, 1\]"),
    ],
)
def test_arguments_out_of_range_raise(key: str, value: float, expected: str) -> None:
    """The error contains the argument, with the configuration key if there is one."""
    params = [nn.Parameter(torch.ones(1))]
    with pytest.raises(ConfigError, match=rf"^{key} = .*: expected {expected}"):
        RMSpropTF(params, **{key: value})
    if key != "lr":
        node = {"_target_": "maze_train.RMSpropTF", key: value}
        with pytest.raises(ConfigError, match=rf"^algorithm.optimizer.{key} = "):
            ModuleOptimizer(params, node, lr=0.1)


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_removed_optimizers_raise_with_their_replacement(name: str) -> None:
    """Runs of version 0.3 with the removed optimizers are refused with the reason."""
    params, node = [nn.Parameter(torch.ones(1))], {"_target_": f"maze_train.{name}"}
    with pytest.raises(
        ConfigError, match=rf"removed; use torch\.optim\.{name} .*cannot be resumed"
    ):
        ModuleOptimizer(params, node, lr=0.1)
