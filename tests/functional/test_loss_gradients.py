"""Losses that come with their gradient agree with automatic differentiation."""

from __future__ import annotations

import pytest
import torch

from maze_train.functional.gradients import loss_by_hand, value_and_gradient, walk_back
from maze_train.functional.policy_loss import (
    clipped_surrogate_loss,
    clipped_surrogate_loss_and_gradient,
    policy_gradient_loss,
    policy_gradient_loss_and_gradient,
)
from maze_train.functional.value_loss import (
    squared_value_loss,
    squared_value_loss_and_gradient,
)


def inputs(n: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    """Random float64 arguments, the first around 0 with a few extreme values."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, generator=generator, dtype=torch.float64)
    x[:4] = torch.tensor([70.0, -70.0, 0.0, 800.0], dtype=torch.float64)
    return x, torch.randn(n, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("clip_range", [0.1, 0.2, 1.5])
def test_clipped_surrogate(clip_range):
    """Loss and gradient of the clipped surrogate, also for ratios that overflow."""
    x, advantages = inputs()
    expected = value_and_gradient(lambda y: clipped_surrogate_loss(y, advantages, clip_range), x)
    actual = clipped_surrogate_loss_and_gradient(x, advantages, clip_range)
    torch.testing.assert_close(actual, expected)


def test_policy_gradient():
    """Loss and gradient of the policy gradient loss."""
    x, advantages = inputs()
    expected = value_and_gradient(lambda y: policy_gradient_loss(y, advantages), x)
    torch.testing.assert_close(policy_gradient_loss_and_gradient(x, advantages), expected)


def test_squared_value_loss():
    """Loss and gradient of the squared error."""
    x, targets = inputs()
    expected = value_and_gradient(lambda y: squared_value_loss(y, targets), x)
    torch.testing.assert_close(squared_value_loss_and_gradient(x, targets), expected)


def test_arguments_stay_as_they_are():
    """No argument is overwritten."""
    x, y = inputs()
    before = x.clone(), y.clone()
    clipped_surrogate_loss_and_gradient(x, y, 0.2)
    policy_gradient_loss_and_gradient(x, y)
    squared_value_loss_and_gradient(x, y)
    torch.testing.assert_close((x, y), before)


@pytest.mark.parametrize("scale", [None, 2.5])
def test_losses_by_hand_behave_like_losses(scale):
    """Walked as they are, or scaled and added to another loss, they give the right gradients."""
    x = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    x.grad = torch.zeros(3)
    loss = loss_by_hand(x.detach().square().sum(), (2 * x.detach(),), x.grad.add_)
    assert loss.item() == 14.0
    walk_back(loss if scale is None else scale * loss + x.sum())
    factor, added = (1.0, 0.0) if scale is None else (scale, 1.0)
    torch.testing.assert_close(x.grad, factor * 2 * x.detach() + added)
