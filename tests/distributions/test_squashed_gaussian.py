"""SquashedGaussian: density of environment actions, numerically stable at the bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cases import sweep
from family_cases import randn
from gymnasium.spaces import Box

from maze_train.distributions.gaussian import SquashedGaussian

LOW, HIGH = np.array([-3.0, 0.0]), np.array([1.0, 0.5])


def test_squashed_entropy_is_as_accurate_as_documented() -> None:
    """The entropy is as accurate as documented, compared with a fine grid."""
    family = SquashedGaussian(Box(-1.0, 1.0, (1,)))
    for log_std, tolerance in [(-1.0, 1e-9), (0.0, 1e-7), (1.0, 2e-3), (2.0, 0.1)]:
        for mean in (0.0, 0.7, 3.0):
            u = mean + math.exp(log_std) * torch.linspace(-12, 12, 200_001, dtype=torch.float64)
            params = torch.tensor([mean, log_std], dtype=torch.float64)
            normal = torch.exp(-0.5 * ((u - mean) / math.exp(log_std)) ** 2)
            log_probs = family.log_prob(params.expand(len(u), 2), u.unsqueeze(-1))
            expected = -(normal * log_probs).sum() / normal.sum()
            assert family.entropy(params).item() == pytest.approx(expected.item(), abs=tolerance)


@sweep("dtype", [torch.float32, torch.float64])
def test_saturated_actions_have_finite_gradients(dtype: torch.dtype) -> None:
    """For |u| >= 20, values and gradients are finite."""
    family = SquashedGaussian(Box(-1.0, 1.0, (6,)))
    u = torch.tensor([-500.0, -60.0, -20.0, 20.0, 60.0, 500.0], dtype=dtype, requires_grad=True)
    params = torch.zeros(12, dtype=dtype, requires_grad=True)
    log_prob, entropy = family.log_prob_and_entropy(params, u)
    (log_prob + entropy).backward()
    assert log_prob.isfinite()
    assert u.grad is not None
    assert params.grad is not None
    assert u.grad.isfinite().all()
    assert params.grad.isfinite().all()


def test_log_prob_of_a_saturated_action_is_exact() -> None:
    """At u = 20 the log-Jacobian is 2 (log 2 - 20); log(1 - tanh²) would be -inf."""
    family = SquashedGaussian(Box(-1.0, 1.0, (1,)))
    expected = -200.0 - 0.9189385332046727 - 2 * (math.log(2.0) - 20.0)
    log_prob = family.log_prob(torch.zeros(2), torch.tensor([20.0]))
    assert log_prob.item() == pytest.approx(expected, rel=1e-6)


@sweep("dtype", [np.float32, np.float64])
def test_squashed_actions_stay_within_the_bounds(dtype: type) -> None:
    """Saturated actions are mapped exactly to the bounds."""
    rng = np.random.default_rng(0)
    low = rng.normal(size=500).astype(dtype)
    space = Box(low, low + rng.uniform(0.01, 3, size=500).astype(dtype), dtype=dtype)
    family = SquashedGaussian(space)
    for u in (-100.0, -9.0, 0.3, 9.0, 100.0):
        assert space.contains(family.to_env(torch.full((500,), u)).numpy())
    assert family.to_env(torch.full((500,), 100.0)).numpy() == pytest.approx(space.high)


def test_widest_float_box_is_finite() -> None:
    """The largest finite bounds do not overflow the scale or the log-density."""
    limit = np.finfo(np.float32).max
    space = Box(-limit, limit, (1,), dtype=np.float32)
    family = SquashedGaussian(space)
    assert space.contains(family.to_env(torch.tensor([30.0])).numpy())
    assert family.log_prob(torch.zeros(2), torch.tensor([0.5])).isfinite()


def test_actions_on_the_bounds_are_not_inverted() -> None:
    """Actions on the bounds are mapped to ±7.25 in float32."""
    family, edge = SquashedGaussian(Box(LOW, HIGH, dtype=np.float64)), math.atanh(1 - 1e-6)
    for bound, expected in ((HIGH, edge), (LOW - 1, -edge)):
        u = family.from_env(torch.tensor(bound))
        assert u.dtype == torch.float32
        assert u.tolist() == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize(("low", "high"), [(-3.0, 1.0), (0.0, 100.0)])
def test_squashed_features_do_not_depend_on_the_bounds(low: float, high: float) -> None:
    """Features, log-densities and gradients are identical to those for [-1, 1]."""
    family, unit = (SquashedGaussian(Box(a, b, (3,))) for a, b in [(low, high), (-1.0, 1.0)])
    params, noise = randn(9, 6), randn(9, 3, seed=1)
    f, g = randn(9, 3, seed=2), randn(9, seed=3)
    values, expected = (
        part.reparameterized(params.requires_grad_(), noise) for part in (family, unit)
    )
    assert torch.equal(values[0], expected[0])
    assert torch.equal(values[1], expected[1])
    slopes = [torch.autograd.grad(pair, params, (f, g))[0] for pair in (values, expected)]
    assert torch.equal(*slopes)
    assert family.log_scale == pytest.approx(3 * math.log((high - low) / 2))
    assert torch.equal(values[0], family.critic_input(family.sample(params, noise)))


@sweep("dtype", [torch.float32, torch.float64])
@sweep("u", [-50.0, -21.0, -20.0, -9.0, 9.0, 20.0, 21.0, 50.0])
def test_log_density_of_reparameterized_saturated_actions(u: float, dtype: torch.dtype) -> None:
    """Values and gradients follow log(1 - tanh² u) = log 4 - 2 |u| - 2 log(1 + exp(-2 |u|))."""
    family = SquashedGaussian(Box(-1.0, 1.0, (1,)))
    log_std, noise = -1.0, 0.7
    mean = u - math.exp(log_std) * noise
    params = torch.tensor([[mean, log_std]], dtype=dtype, requires_grad=True)
    noises = torch.tensor([[noise]], dtype=dtype)
    features, log_probs = family.reparameterized(params, noises)
    squash = math.log(4) - 2 * abs(u) - 2 * math.log1p(math.exp(-2 * abs(u)))
    expected = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi) - squash
    assert log_probs.item() == pytest.approx(expected, rel=1e-6)
    assert features.item() == pytest.approx(math.tanh(u))
    (slopes,) = torch.autograd.grad(log_probs.sum(), params)
    d_mean = 2 * math.tanh(u)
    assert slopes[0].tolist() == pytest.approx(
        [d_mean, d_mean * math.exp(log_std) * noise - 1], rel=1e-5
    )


@pytest.mark.parametrize("initial_log_std", [0.0, -0.5])
def test_gradient_at_the_limits_of_the_std(initial_log_std: float) -> None:
    """The gradient is 0 outside the limits and passes at the limits, as in `torch.clamp`."""
    space = Box(-1.0, 1.0, (4,))
    family = SquashedGaussian(
        space, initial_log_std=initial_log_std, log_std_min=-2.0, log_std_max=1.0
    )
    raw = torch.tensor([-2.5, -2.0, 1.0, 1.5], dtype=torch.float64) - initial_log_std
    params = torch.cat((randn(5, 4), raw.expand(5, 4)), -1).requires_grad_()
    noise, f, g = randn(5, 4, seed=1), randn(5, 4, seed=2), randn(5, seed=3)
    features, log_probs = family.reparameterized(params, noise)
    ((features * f).sum() + (log_probs * g).sum()).backward()
    assert (params.grad[:, 4:] != 0).all(0).tolist() == [False, True, True, False]
