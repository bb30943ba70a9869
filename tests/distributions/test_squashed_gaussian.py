"""SquashedGaussian: a density over the environment's action, safe where tanh saturates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cases import sweep
from gymnasium.spaces import Box
from torch import distributions as td
from torch.distributions import transforms as tt

from maze_train.distributions.gaussian import DiagonalGaussian, SquashedGaussian
from maze_train.errors import SpaceError

LOW, HIGH = np.array([-3.0, 0.0]), np.array([1.0, 0.5])


def asymmetric() -> SquashedGaussian:
    """Two dimensions of different, asymmetric bounds."""
    return SquashedGaussian(Box(LOW, HIGH, dtype=np.float64))


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal float64 numbers of a fixed seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_density_integrates_to_one_on_the_interval() -> None:
    """The integral of exp(log_prob) over the environment's own interval is 1 in each dimension."""
    for low, high, mean, log_std in [(-3.0, 1.0, 0.4, -0.5), (0.0, 0.5, -1.0, 0.2)]:
        family = SquashedGaussian(Box(low, high, (1,), dtype=np.float64))
        edges = torch.linspace(low, high, 400_001, dtype=torch.float64)
        middles = (edges[1:] + edges[:-1]) / 2
        u = torch.atanh((middles - (low + high) / 2) / ((high - low) / 2)).unsqueeze(-1)
        params = torch.tensor([mean, log_std], dtype=torch.float64).expand(len(u), 2)
        integral = family.log_prob(params, u).exp().sum() * (high - low) / 400_000
        assert integral.item() == pytest.approx(1.0, abs=1e-6)


def test_equals_a_transformed_torch_distribution() -> None:
    """log_prob is that of torch's tanh and affine transforms of a normal distribution."""
    family, params, u = asymmetric(), 0.5 * randn(6, 4), randn(6, 2, seed=1)
    mean, log_std = params.chunk(2, -1)
    centre, half = torch.tensor((HIGH + LOW) / 2), torch.tensor((HIGH - LOW) / 2)
    chain = [tt.TanhTransform(cache_size=1), tt.AffineTransform(centre, half, cache_size=1)]
    reference = td.TransformedDistribution(td.Normal(mean, log_std.exp()), chain)
    in_env = family.to_env(u)
    torch.testing.assert_close(in_env, centre + half * torch.tanh(u))
    expected = reference.log_prob(centre + half * torch.tanh(u)).sum(-1)
    torch.testing.assert_close(family.log_prob(params, u), expected, rtol=1e-7, atol=1e-9)


def test_widening_the_bounds_lowers_the_density() -> None:
    """Doubling all widths subtracts log 2 per dimension from log_prob and adds it to entropy."""
    narrow = SquashedGaussian(Box(-1.0, 1.0, (3,)))
    wide = SquashedGaussian(Box(0.0, 4.0, (3,)))
    params, u = 0.3 * randn(5, 6), randn(5, 3, seed=1)
    shift = torch.full((5,), 3 * math.log(2.0), dtype=torch.float64)
    torch.testing.assert_close(narrow.log_prob(params, u) - wide.log_prob(params, u), shift)
    torch.testing.assert_close(wide.entropy(params) - narrow.entropy(params), shift)


@pytest.mark.parametrize("log_std", [-3.0, -0.5, 0.0, 1.0])
def test_entropy_is_the_mean_of_minus_log_prob(log_std: float) -> None:
    """The quadrature agrees with 100,000 samples within three standard errors."""
    family = asymmetric()
    params = torch.tensor([0.8, -1.5, log_std, log_std], dtype=torch.float64).expand(100_000, 4)
    noise = family.draw_noise((100_000,), torch.Generator().manual_seed(1))
    surprises = -family.log_prob(params, family.sample(params, noise))
    error = surprises.std().item() / 100_000**0.5
    assert abs(surprises.mean().item() - family.entropy(params[0]).item()) < 3 * error


def test_quadrature_error_stays_within_its_promise() -> None:
    """Against a fine grid the entropy is exact to the digits that its docstring promises."""
    family = SquashedGaussian(Box(-1.0, 1.0, (1,)))
    for log_std, tolerance in [(-1.0, 1e-9), (0.0, 1e-7), (1.0, 2e-3), (2.0, 0.1)]:
        for mean in (0.0, 0.7, 3.0):
            u = mean + math.exp(log_std) * torch.linspace(-12, 12, 200_001, dtype=torch.float64)
            params = torch.tensor([mean, log_std], dtype=torch.float64)
            normal = torch.exp(-0.5 * ((u - mean) / math.exp(log_std)) ** 2)
            log_probs = family.log_prob(params.expand(len(u), 2), u.unsqueeze(-1))
            expected = -(normal * log_probs).sum() / normal.sum()
            assert family.entropy(params).item() == pytest.approx(expected.item(), abs=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saturated_actions_have_finite_gradients(dtype: torch.dtype) -> None:
    """At |u| = 20 and beyond, values and gradients for params and actions are finite."""
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
    """At u = 20 the Jacobian is 2 (log 2 - 20), where log(1 - tanh²) would be -inf."""
    family = SquashedGaussian(Box(-1.0, 1.0, (1,)))
    expected = -200.0 - 0.9189385332046727 - 2 * (math.log(2.0) - 20.0)
    log_prob = family.log_prob(torch.zeros(2), torch.tensor([20.0]))
    assert log_prob.item() == pytest.approx(expected, rel=1e-6)


def test_kl_equals_that_of_the_gaussians() -> None:
    """Squashing both sides by one bijection leaves the divergence as it was."""
    p, q = 0.5 * randn(4, 4), 0.5 * randn(4, 4, seed=1)
    plain = DiagonalGaussian(Box(-1.0, 1.0, (2,)))
    torch.testing.assert_close(asymmetric().kl(p, q), plain.kl(p, q))
    samples = asymmetric().sample(p[0].expand(50_000, 4), randn(50_000, 2, seed=2))
    ratios = asymmetric().log_prob(p[0].expand(50_000, 4), samples) - asymmetric().log_prob(
        q[0].expand(50_000, 4), samples
    )
    error = 4 * ratios.std().item() / 50_000**0.5
    assert abs(ratios.mean().item() - asymmetric().kl(p, q)[0].item()) < error


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_to_env_never_leaves_the_bounds(dtype: type) -> None:
    """Saturated actions become the bounds themselves, not a rounding error outside of them."""
    rng = np.random.default_rng(0)
    low = rng.normal(size=500).astype(dtype)
    space = Box(low, low + rng.uniform(0.01, 3, size=500).astype(dtype), dtype=dtype)
    family = SquashedGaussian(space)
    for u in (-100.0, -9.0, 0.3, 9.0, 100.0):
        assert space.contains(family.to_env(torch.full((500,), u)).numpy())
    assert family.to_env(torch.full((500,), 100.0)).numpy() == pytest.approx(space.high)


def test_widest_float_box_is_finite() -> None:
    """The largest finite bounds overflow neither the scale nor the log-density."""
    limit = np.finfo(np.float32).max
    space = Box(-limit, limit, (1,), dtype=np.float32)
    family = SquashedGaussian(space)
    assert space.contains(family.to_env(torch.tensor([30.0])).numpy())
    assert family.log_prob(torch.zeros(2), torch.tensor([0.5])).isfinite()


def test_integer_box_is_rounded() -> None:
    """An integer box receives integers inside its bounds."""
    space = Box(0, 10, (1,), dtype=np.uint8)
    in_env = SquashedGaussian(space).to_env(torch.tensor([[-9.0], [0.0], [9.0]]))
    assert in_env.tolist() == [[0], [5], [10]]
    assert in_env.dtype == torch.uint8


def test_from_env_inverts_to_env_up_to_clipping() -> None:
    """The round trip returns u while tanh is not saturated, and ±7.25 on the bounds."""
    family = asymmetric()
    u = torch.linspace(-4, 4, 18, dtype=torch.float64).reshape(9, 2)
    back = family.from_env(family.to_env(u))
    assert back.dtype == torch.float32
    torch.testing.assert_close(back, u.float(), rtol=1e-5, atol=1e-5)
    edge = math.atanh(1 - 1e-6)
    assert family.from_env(torch.tensor(HIGH)).tolist() == pytest.approx([edge, edge], rel=1e-5)
    assert family.from_env(torch.tensor(LOW - 1)).tolist() == pytest.approx(
        [-edge, -edge], rel=1e-5
    )


def test_gradient_flows_through_to_env() -> None:
    """A critic's gradient reaches the params through sampling and squashing."""
    family = SquashedGaussian(Box(-2.0, 2.0, (2,)))
    params = torch.zeros(3, 4, requires_grad=True)
    family.to_env(family.sample(params, torch.full((3, 2), 0.5))).sum().backward()
    assert params.grad is not None
    slope = 2.0 * (1 - math.tanh(0.5) ** 2)
    assert params.grad.flatten().tolist() == pytest.approx([slope, slope, slope / 2, slope / 2] * 3)


def test_mode_is_the_median_of_the_environments_action() -> None:
    """Half of the samples lie on each side of the mode."""
    family = asymmetric()
    params = torch.tensor([0.7, -0.2, 0.5, -1.0], dtype=torch.float64).expand(40_000, 4)
    samples = family.to_env(family.sample(params, randn(40_000, 2)))
    below = (samples < family.to_env(family.mode(params))).double().mean(0)
    assert (below - 0.5).abs().max().item() < 4 * 0.5 / 40_000**0.5


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        (-np.inf, 1.0, "needs finite bounds.*model.distributions.Box=diagonal_gaussian"),
        (0.0, 0.0, "needs low < high.*remove the constant dimensions"),
    ],
)
def test_bounds_that_tanh_can_not_reach_are_refused(low: float, high: float, message: str) -> None:
    """Infinite and empty intervals are errors with a remedy."""
    with pytest.raises(SpaceError, match=message):
        SquashedGaussian(Box(low, high, (2,)))


@pytest.mark.parametrize(("low", "high"), [(-3.0, 1.0), (0.0, 100.0)])
def test_what_critics_read_does_not_depend_on_the_bounds(low: float, high: float) -> None:
    """Features, log-densities and gradients are those of [-1, 1], bit by bit."""
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
    """Beyond the limits the gradient stops, on them it passes, as `torch.clamp` has it."""
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


def test_gradient_of_a_free_std() -> None:
    """A free log std gets its gradient however large it is."""
    family = SquashedGaussian(Box(-1.0, 1.0, (2,)), state_dependent_std=False)
    params = torch.cat((randn(5, 2), torch.full((5, 2), 2.5).double()), -1).requires_grad_()
    noise, f, g = randn(5, 2, seed=1), randn(5, 2, seed=2), randn(5, seed=3)
    features, log_probs = family.reparameterized(params, noise)
    ((features * f).sum() + (log_probs * g).sum()).backward()
    assert (params.grad[:, 2:] != 0).all()
