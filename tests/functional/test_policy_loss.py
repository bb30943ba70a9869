from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_losses import slow_surrogate

from maze_train.errors import ShapeError
from maze_train.functional.policy_loss import (
    approximate_kl,
    clip_fraction,
    clipped_surrogate_loss,
    policy_gradient_loss,
)

RTOL = 1e-9
floats = st.floats(-5.0, 5.0, width=32)


def samples(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log ratios on both sides of the band, and advantages of both signs."""
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5,
        torch.randn(shape, generator=generator, dtype=torch.float64),
    )


@pytest.mark.parametrize("shape", [(1,), (6,), (3, 2)])
def test_policy_gradient_loss_is_the_mean_product(shape: tuple[int, ...]) -> None:
    """The loss is the negative mean of log-probability times advantage."""
    log_probs, advantages = samples(*shape)
    expected = -sum(p * a for p, a in zip(log_probs.ravel(), advantages.ravel(), strict=True))
    loss = policy_gradient_loss(log_probs, advantages)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected.item() / log_probs.numel(), rel=RTOL)


@pytest.mark.parametrize("shape", [(1,), (50,), (7, 5)])
@pytest.mark.parametrize("clip_range", [0.05, 0.2, 1.5])
def test_surrogate_is_equation_7(shape: tuple[int, ...], clip_range: float) -> None:
    """The shorter formula gives the numbers of the published one."""
    log_ratios, advantages = samples(*shape)
    loss = clipped_surrogate_loss(log_ratios, advantages, clip_range)
    expected = slow_surrogate(log_ratios.numpy(), advantages.numpy(), clip_range)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected, rel=RTOL)


@settings(deadline=None)  # a busy machine is no failure
@given(floats, floats, st.floats(0.01, 2.0))
def test_surrogate_of_one_sample(log_ratio: float, advantage: float, clip_range: float) -> None:
    """Both formulas agree for every ratio, advantage and band."""
    ratio, value = np.array([log_ratio]), np.array([advantage])
    loss = clipped_surrogate_loss(torch.from_numpy(ratio), torch.from_numpy(value), clip_range)
    expected = slow_surrogate(ratio, value, clip_range)
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [(1.3, 1.0, False), (0.7, 1.0, True), (1.3, -1.0, True), (0.7, -1.0, False), (1.1, 1.0, True)],
)
def test_clipping_stops_gains_and_keeps_losses(ratio: float, advantage: float, moves: bool) -> None:
    """The gradient is zero where the policy already gained enough, and -ratio * A elsewhere."""
    log_ratio = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    torch.autograd.backward(clipped_surrogate_loss(log_ratio, advantages, 0.2))
    expected = -ratio * advantage if moves else 0.0
    assert log_ratio.grad is not None
    assert log_ratio.grad.item() == pytest.approx(expected, rel=RTOL)


def test_equal_policies_give_the_policy_gradient() -> None:
    """At ratio 1 the surrogate is the negative mean advantage, with the policy gradient."""
    log_probs, advantages = samples(8)
    log_probs.requires_grad_()
    surrogate = clipped_surrogate_loss(log_probs - log_probs.detach(), advantages, 0.2)
    (clipped,) = torch.autograd.grad(surrogate, log_probs)
    (plain,) = torch.autograd.grad(policy_gradient_loss(log_probs, advantages), log_probs)
    assert surrogate.item() == pytest.approx(-advantages.mean().item(), rel=RTOL)
    torch.testing.assert_close(clipped, plain, rtol=RTOL, atol=0.0)


def test_gradients_are_correct() -> None:
    """Finite differences confirm both losses."""
    log_ratios, advantages = samples(9)
    log_ratios.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: policy_gradient_loss(x, advantages), log_ratios)
    assert torch.autograd.gradcheck(
        lambda x: clipped_surrogate_loss(x, advantages, 0.2), log_ratios
    )


def test_advantages_get_no_gradient() -> None:
    """Advantages are constants of both losses."""
    log_ratios, advantages = samples(5)
    log_ratios.requires_grad_()
    advantages.requires_grad_()
    loss = policy_gradient_loss(log_ratios, advantages)
    torch.autograd.backward(loss + clipped_surrogate_loss(log_ratios, advantages, 0.2))
    assert log_ratios.grad is not None
    assert advantages.grad is None


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
def test_huge_log_ratios_stay_finite(log_ratio: float, advantage: float) -> None:
    """Neither the loss nor its gradient becomes NaN or infinite in float32."""
    log_ratios = torch.tensor([log_ratio, 0.0], requires_grad=True)
    loss = clipped_surrogate_loss(log_ratios, torch.tensor([advantage, 1.0]), 0.2)
    torch.autograd.backward(loss)
    assert torch.isfinite(loss)
    assert log_ratios.grad is not None
    assert torch.isfinite(log_ratios.grad).all()


def test_order_of_the_samples_does_not_matter() -> None:
    """All four functions are means over samples."""
    log_ratios, advantages = samples(16)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    shuffled, matching = log_ratios[order], advantages[order]
    for left, right in (
        (policy_gradient_loss(log_ratios, advantages), policy_gradient_loss(shuffled, matching)),
        (
            clipped_surrogate_loss(log_ratios, advantages, 0.2),
            clipped_surrogate_loss(shuffled, matching, 0.2),
        ),
        (approximate_kl(log_ratios), approximate_kl(shuffled)),
        (clip_fraction(log_ratios, 0.2), clip_fraction(shuffled, 0.2)),
    ):
        torch.testing.assert_close(left, right, rtol=RTOL, atol=0.0)


def test_kl_estimate_of_known_ratios() -> None:
    """Zero for equal policies, and the mean of (ratio - 1) - log ratio otherwise."""
    assert approximate_kl(torch.zeros(4)).item() == 0.0
    log_ratios = torch.tensor([math.log(2.0), -math.log(2.0)], dtype=torch.float64)
    assert approximate_kl(log_ratios).item() == pytest.approx(0.25, rel=RTOL)


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(floats, min_size=1, max_size=20), st.sampled_from([1.0, 1e-2, 1e-4, 1e-7]))
def test_kl_estimate_is_never_negative(log_ratios: list[float], scale: float) -> None:
    """Not even in float32 for policies that almost agree, where exp(x) - 1 - x would be."""
    assert approximate_kl(torch.tensor(log_ratios) * scale).item() >= 0.0


def test_kl_estimate_keeps_its_digits_in_float32() -> None:
    """For a log ratio x of 1e-3 the estimate is x^2 / 2, correct to a part in a thousand."""
    assert approximate_kl(torch.full((8,), 1e-3)).item() == pytest.approx(5e-7, rel=1e-3)


def test_kl_estimate_averages_to_the_divergence() -> None:
    """Over all actions, weighted by the old policy, the estimate is the exact divergence."""
    old = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    new = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
    actions = torch.tensor([0, 0, 1, 2])  # as often as the old policy takes them
    estimate = approximate_kl((new.log() - old.log())[actions])
    assert estimate.item() == pytest.approx((old * (old / new).log()).sum().item(), rel=RTOL)


def test_clip_fraction_counts_ratios_outside_of_the_band() -> None:
    """Both sides count, the inside does not."""
    log_ratios = torch.tensor([0.5, 1.0, 1.19, 1.21, 0.81, 0.79]).log()
    fraction = clip_fraction(log_ratios, 0.2)
    assert fraction.item() == 0.5
    assert fraction.dtype == torch.float32
    assert clip_fraction(torch.zeros(4), 0.2).item() == 0.0


def test_measures_carry_no_gradient() -> None:
    """Both measures are for reading, not for training."""
    log_ratios = torch.zeros(3, requires_grad=True)
    assert not approximate_kl(log_ratios).requires_grad
    assert not clip_fraction(log_ratios, 0.2).requires_grad


def test_losses_refuse_shapes_that_would_broadcast() -> None:
    """[N, 1] against [N] is an error and not a matrix."""
    with pytest.raises(ShapeError, match=r"advantages has shape \[4\], expected \[4, 1\]"):
        policy_gradient_loss(torch.ones(4, 1), torch.ones(4))
    with pytest.raises(ShapeError, match=r"advantages has shape \[4\], expected \[4, 1\]"):
        clipped_surrogate_loss(torch.ones(4, 1), torch.ones(4), 0.2)
