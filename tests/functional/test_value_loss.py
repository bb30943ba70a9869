from __future__ import annotations

import math

import pytest
import torch
from reference_losses import slow_clipped_value_loss, slow_two_hot_loss

from maze_train.errors import ConfigError, ShapeError
from maze_train.functional.value_loss import clipped_value_loss, squared_value_loss, two_hot_loss

RTOL = 1e-9


def samples(*shape: int) -> torch.Tensor:
    """Standard normal float64 numbers, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def test_squared_loss_has_no_factor_one_half() -> None:
    """Errors of 1 and 3 cost (1 + 9) / 2."""
    assert squared_value_loss(torch.tensor([1.0, 5.0]), torch.tensor([2.0, 2.0])).item() == 5.0


@pytest.mark.parametrize("clip_range", [0.05, 0.5, 100.0])
@pytest.mark.parametrize("shape", [(1,), (20,), (4, 5)])
def test_clipped_loss_follows_its_definition(shape: tuple[int, ...], clip_range: float) -> None:
    """Each sample costs the larger of both squared errors."""
    values, old_values, targets = samples(3, *shape)
    loss = clipped_value_loss(values, old_values, targets, clip_range)
    expected = slow_clipped_value_loss(
        values.numpy(), old_values.numpy(), targets.numpy(), clip_range
    )
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected, rel=RTOL)


def test_clipped_loss_inside_of_the_band_is_the_squared_loss() -> None:
    """Value and gradient agree bit for bit while no value moved further than the band."""
    old_values, targets = samples(2, 10)
    values = (old_values + 0.05).requires_grad_()
    clipped = clipped_value_loss(values, old_values, targets, 0.1)
    plain = squared_value_loss(values, targets)
    assert torch.equal(clipped, plain)
    assert torch.equal(*(torch.autograd.grad(loss, values)[0] for loss in (clipped, plain)))


def test_clipped_loss_does_not_pull_beyond_the_band() -> None:
    """A value that moved past the band towards its target gets no gradient."""
    values = torch.tensor([1.5], requires_grad=True)
    loss = clipped_value_loss(values, torch.tensor([1.0]), torch.tensor([3.0]), 0.2)
    torch.autograd.backward(loss)
    assert values.grad is not None
    assert values.grad.item() == 0.0


def test_two_hot_loss_follows_its_definition() -> None:
    """Cross-entropy against the two-hot target, also for targets outside of the support."""
    logits = samples(6, 5)
    targets = torch.tensor([-3.0, -2.0, -0.4, 0.7, 2.0, 9.0], dtype=torch.float64)
    loss = two_hot_loss(logits, targets, (-2, 2))
    expected = slow_two_hot_loss(logits.numpy(), targets.numpy(), -2, 2)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected, rel=RTOL)


def test_two_hot_loss_of_uniform_logits() -> None:
    """Whatever the target, a uniform distribution over K integers costs log K."""
    loss = two_hot_loss(torch.zeros(2, 3, 7), torch.randn(2, 3), (-3, 3))
    assert loss.item() == pytest.approx(math.log(7.0), rel=1e-6)


def test_two_hot_loss_stays_finite_for_extreme_logits() -> None:
    """Logits of a thousand do not overflow, although their softmax is 0 or 1."""
    logits = torch.tensor([[1000.0, -1000.0, 0.0]], requires_grad=True)
    loss = two_hot_loss(logits, torch.tensor([2.0]), (0, 2))
    torch.autograd.backward(loss)
    assert loss.item() == 1000.0
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_gradients_are_correct() -> None:
    """Finite differences confirm all three losses."""
    values, old_values, targets = samples(3, 9)
    values.requires_grad_()
    logits = samples(9, 5).requires_grad_()
    check = torch.autograd.gradcheck
    assert check(lambda v: squared_value_loss(v, targets), values)
    assert check(lambda v: clipped_value_loss(v, old_values, targets, 0.3), values)
    assert check(lambda x: two_hot_loss(x, targets, (-2, 2)), logits)


def test_targets_get_no_gradient() -> None:
    """Targets and old values are constants of all losses."""
    values, old_values, targets = (row.clone().requires_grad_() for row in samples(3, 6))
    logits = samples(6, 5).requires_grad_()
    loss = squared_value_loss(values, targets)
    loss = loss + clipped_value_loss(values, old_values, targets, 0.3)
    torch.autograd.backward(loss + two_hot_loss(logits, targets, (-2, 2)))
    assert values.grad is not None
    assert logits.grad is not None
    assert targets.grad is None
    assert old_values.grad is None


def test_order_of_the_samples_does_not_matter() -> None:
    """All three losses are means over samples."""
    values, old_values, targets = samples(3, 12)
    logits = samples(12, 5)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    moved = values[order], old_values[order], targets[order]
    for left, right in (
        (squared_value_loss(values, targets), squared_value_loss(moved[0], moved[2])),
        (clipped_value_loss(values, old_values, targets, 0.3), clipped_value_loss(*moved, 0.3)),
        (
            two_hot_loss(logits, targets, (-2, 2)),
            two_hot_loss(logits[order], moved[2], (-2, 2)),
        ),
    ):
        torch.testing.assert_close(left, right, rtol=RTOL, atol=0.0)


def test_losses_refuse_wrong_shapes() -> None:
    """Nothing broadcasts, and the logits must match support and targets."""
    row, column = torch.ones(4), torch.ones(4, 1)
    with pytest.raises(ShapeError, match=r"targets has shape \[4\], expected \[4, 1\] like values"):
        squared_value_loss(column, row)
    with pytest.raises(ShapeError, match="old_values has shape"):
        clipped_value_loss(row, column, row, 0.2)
    with pytest.raises(ShapeError, match=r"expected \[\.\.\., 5\] for the integers -2 to 2"):
        two_hot_loss(torch.zeros(4, 6), row, (-2, 2))
    with pytest.raises(ShapeError, match=r"targets has shape \[4, 1\], expected \[4\]"):
        two_hot_loss(torch.zeros(4, 5), column, (-2, 2))
    with pytest.raises(ConfigError, match="low < high"):
        two_hot_loss(torch.zeros(4, 5), row, (2, -2))
