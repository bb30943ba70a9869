"""TruncatedGaussian against quadrature, far tails included."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from cases import sweep
from gymnasium.spaces import Box
from torch import distributions as td

from maze_train.distributions import DiagonalGaussian, TruncatedGaussian
from maze_train.errors import ConfigError, SpaceError

INF = math.inf


def family_on(low: float, high: float, **settings: Any) -> TruncatedGaussian:
    """The family on an interval."""
    return TruncatedGaussian(Box(low, high, (1,), dtype=np.float64), **settings)


def params_of(mean: float, std: float) -> torch.Tensor:
    """Params of one dimension."""
    return torch.tensor([mean, math.log(std)], dtype=torch.float64)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal float64 numbers of a fixed seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class Slow:
    """A cut normal density on a fine grid that covers all of its mass.

    Numbers are relative to the peak, which is the mean clipped to the interval.
    """

    def __init__(self, mean: float, std: float, low: float, high: float) -> None:
        self.peak = min(max(mean, low), high)
        distance = abs(self.peak - mean)
        reach = min(14 * std, 45 * std * std / distance if distance else INF)
        left, right = max(low, self.peak - reach), min(high, self.peak + reach)
        edges = np.linspace(left - self.peak, right - self.peak, 40_001)
        self.step = edges[1] - edges[0]
        self.offsets = (edges[1:] + edges[:-1]) / 2
        self.mean, self.std = mean, std
        self.log_mass = math.log(np.exp(self.exponent(self.offsets)).sum() * self.step)
        self.weights = np.exp(self.exponent(self.offsets) - self.log_mass) * self.step

    def exponent(self, offset: Any) -> Any:
        """Logarithm of the density at peak + offset, up to a constant."""
        return -offset * (offset + 2 * (self.peak - self.mean)) / (2 * self.std**2)

    def log_prob(self, x: float) -> float:
        """Log-density."""
        return float(self.exponent(x - self.peak)) - self.log_mass

    def mean_of(self, values: Any) -> float:
        """Expectation of values on the grid."""
        return float((self.weights * values).sum())

    def below(self, x: float) -> float:
        """P(X <= x), by a part of the cell that x is in."""
        cells = (x - self.peak - self.offsets[0]) / self.step + 0.5
        whole = min(max(int(cells), 0), len(self.weights) - 1)
        return float(self.weights[:whole].sum() + (cells - whole) * self.weights[whole])


CASES = [
    (0.2, 0.7, -1.0, 1.0),
    (0.2, 0.01, -1.0, 1.0),
    (0.2, 100.0, -1.0, 1.0),
    (0.2, 1e5, -1.0, 1.0),
    (1.0, 0.5, -1.0, 1.0),
    (1.3, 0.5, -1.0, 1.0),
    (-4.0, 0.5, -1.0, 1.0),
    (51.0, 1.0, -1.0, 1.0),
    (-51.0, 1.0, -1.0, 1.0),
    (3.0, 0.001, -1.0, 1.0),
    (0.0, 1.0, 2.0, INF),
    (0.0, 1.0, 50.0, INF),
    (0.0, 1.0, -INF, -50.0),
    (0.0, 1.0, -0.5, INF),
    (0.0, 1.0, -INF, INF),
    (5.0, 2.0, 0.0, 1e-4),
    (5.0, 2.0, 0.0, 1e-8),
    (3e-9, 2.0, 0.0, 1e-8),
    (-2.0, 1e-7, 0.0, 1.0),
    (-3.0, 1.0, 0.0, 1e-8),
]
"""Mean, std, bounds."""


@pytest.mark.parametrize(("mean", "std", "low", "high"), CASES)
def test_density_and_entropy_equal_quadrature(
    mean: float, std: float, low: float, high: float
) -> None:
    """log_prob is that of a density with integral 1, entropy its expectation."""
    family, params = family_on(low, high), params_of(mean, std)
    slow = Slow(mean, std, low, high)
    x = torch.tensor(slow.peak + slow.offsets[::2_000]).unsqueeze(-1)
    log_probs = family.log_prob(params.expand(len(x), 2), x)
    expected = [slow.log_prob(value) for value in x[:, 0].tolist()]
    # The grid subtracts numbers around 50, which costs digits that the family keeps.
    assert log_probs.tolist() == pytest.approx(expected, rel=2e-6, abs=2e-6)
    entropy = -slow.mean_of(slow.exponent(slow.offsets) - slow.log_mass)
    assert family.entropy(params).item() == pytest.approx(entropy, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(("mean", "std", "low", "high"), CASES)
def test_samples_are_quantiles(mean: float, std: float, low: float, high: float) -> None:
    """The probability below a sample is Φ(noise), for noise from -3 to 3."""
    family, slow = family_on(low, high), Slow(mean, std, low, high)
    noise = torch.linspace(-3, 3, 13, dtype=torch.float64).unsqueeze(-1)
    samples = family.sample(params_of(mean, std).expand(13, 2), noise)[:, 0]
    assert samples.min() >= low
    assert samples.max() <= high
    # A sample has a last digit, and so has its probability.
    digits = 1e-15 * abs(slow.peak) / float(slow.step) * float(slow.weights.max())
    for x, wanted in zip(samples.tolist(), torch.special.ndtr(noise[:, 0]).tolist(), strict=True):
        assert slow.below(x) == pytest.approx(wanted, abs=2e-5 + digits)


@pytest.mark.parametrize(("mean", "std", "low", "high"), CASES)
def test_gradients_of_log_prob_are_scores(mean: float, std: float, low: float, high: float) -> None:
    """∂log p/∂μ = (x - E x) / σ², ∂log p/∂log σ = z² - E z², by quadrature."""
    family, slow = family_on(low, high), Slow(mean, std, low, high)
    params = params_of(mean, std).requires_grad_()
    far = slow.peak - mean
    ex = slow.mean_of(slow.offsets)
    ez2 = slow.mean_of(slow.offsets * (slow.offsets + 2 * far)) / std**2
    spread = math.sqrt(max(slow.mean_of((slow.offsets - ex) ** 2), 0.0))
    for offset in (ex - 0.6 * spread, ex + 1.1 * spread):
        x = torch.tensor([slow.peak + offset], dtype=torch.float64)
        (gradient,) = torch.autograd.grad(family.log_prob(params, x), params)
        offset = x.item() - slow.peak
        tolerance = 1e-4 * spread / std**2
        assert gradient[0].item() == pytest.approx((offset - ex) / std**2, abs=tolerance)
        z2 = offset * (offset + 2 * far) / std**2
        assert gradient[1].item() == pytest.approx(z2 - ez2, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("p", "q", "low", "high"),
    [
        ((0.2, 0.7), (-0.5, 0.3), -1.0, 1.0),
        ((3.0, 0.5), (-0.5, 0.3), -1.0, 1.0),
        ((0.0, 0.5), (9.0, 0.2), -1.0, 1.0),
        ((9.0, 0.2), (-9.0, 0.3), -1.0, 1.0),
        ((0.0, 1.0), (1.0, 2.0), 0.5, INF),
        ((-3.0, 1.0), (-5.0, 0.7), 0.5, INF),
        ((0.0, 1.0), (1.0, 2.0), -INF, INF),
        ((0.5, 300.0), (0.0, 0.5), -1.0, 1.0),
        ((0.5, 1e9), (0.0, 0.5), -1.0, 1.0),
        ((5.0, 2.0), (5e-5, 3e-5), 0.0, 1e-4),
        ((-2.0, 1e-2), (1e-4, 1e-4), 0.0, 1.0),
    ],
)
def test_divergence_equals_quadrature(
    p: tuple[float, float], q: tuple[float, float], low: float, high: float
) -> None:
    """KL is the expectation of the difference of log-densities on the grid of p."""
    family, slow, other = family_on(low, high), Slow(*p, low, high), Slow(*q, low, high)
    log_q = other.exponent(slow.peak + slow.offsets - other.peak) - other.log_mass
    expected = slow.mean_of(slow.exponent(slow.offsets) - slow.log_mass - log_q)
    kl = family.kl(params_of(*p), params_of(*q))
    assert kl.item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_moments_of_samples() -> None:
    """Mean and variance of 100,000 samples are those of quadrature, within four errors."""
    cases = [(0.2, 0.7, -1.0, 1.0), (2.0, 0.5, -1.0, 1.0), (0.0, 1.0, 1.0, INF)]
    for mean, std, low, high in cases:
        family, slow = family_on(low, high), Slow(mean, std, low, high)
        noise = family.draw_noise((100_000,), torch.Generator().manual_seed(0))
        x = family.sample(params_of(mean, std).expand(100_000, 2), noise)[:, 0] - slow.peak
        expected = slow.mean_of(slow.offsets)
        variance = slow.mean_of((slow.offsets - expected) ** 2)
        assert abs(x.mean().item() - expected) < 4 * math.sqrt(variance / 100_000)
        fourth = slow.mean_of((slow.offsets - expected) ** 4)
        error = math.sqrt((fourth - variance**2) / 100_000)
        assert abs(x.var().item() - variance) < 4 * error


@pytest.mark.parametrize("offset", [0.0, 0.5, 1.5, 6.0, 60.0])
def test_gradient_of_samples(offset: float) -> None:
    """Analytic gradients of samples equal numerical ones, inside and far outside."""
    family = TruncatedGaussian(Box(-1.0, 1.0, (2, 1)), state_dependent_std=True)
    params = 0.3 * randn(4, 4)
    params[:, 0] += offset
    params[:, 1] -= offset
    noise = randn(4, 2, seed=1)
    assert torch.autograd.gradcheck(lambda p: family.sample(p, noise), (params.requires_grad_(),))


def test_open_sides_are_not_cut() -> None:
    """Without bounds, all functions are those of the Gaussian, and samples are μ + σ ε."""
    space = Box(-np.inf, np.inf, (3,))
    cut, whole = TruncatedGaussian(space), DiagonalGaussian(space)
    p, q, noise = randn(20, 6), randn(20, 6, seed=1), randn(20, 3, seed=2)
    noise[0] = torch.tensor([-9.0, 9.0, 20.0])
    actions = whole.sample(p, noise)
    torch.testing.assert_close(cut.sample(p, noise), actions)
    torch.testing.assert_close(cut.log_prob(p, actions), whole.log_prob(p, actions))
    torch.testing.assert_close(cut.entropy(p), whole.entropy(p))
    torch.testing.assert_close(cut.kl(p, q), whole.kl(p, q))
    assert torch.equal(cut.mode(p), whole.mode(p))


def test_half_normal() -> None:
    """Cut at its mean, a normal distribution is torch's half-normal one."""
    family, reference = family_on(0.0, INF), td.HalfNormal(torch.tensor(1.7).double())
    x = torch.linspace(0.01, 9.0, 50, dtype=torch.float64)
    params = params_of(0.0, 1.7)
    torch.testing.assert_close(
        family.log_prob(params.expand(50, 2), x.unsqueeze(-1)), reference.log_prob(x)
    )
    torch.testing.assert_close(family.entropy(params), reference.entropy())


@sweep("dtype", [torch.float32, torch.float64])
@sweep("log_std", [-20.0, -6.0, 0.0, 2.0, 30.0])
@sweep("mean", [-1e8, -50.0, -1.0, 0.0, 1.0, 3.0, 1e8])
def test_extremes_are_finite(mean: float, log_std: float, dtype: torch.dtype) -> None:
    """However far the mean is outside, and however narrow or wide, all is finite."""
    for space in (Box(-1.0, 1.0, (1,)), Box(-1.0, np.inf, (1,)), Box(-np.inf, 1.0, (1,))):
        family = TruncatedGaussian(space)
        params = torch.tensor([mean, log_std], dtype=dtype, requires_grad=True)
        for noise in (-5.5, 0.0, 5.5):
            action = family.sample(params, torch.tensor([noise]))
            assert space.low[0] <= action.item() <= space.high[0]
            log_prob, entropy = family.log_prob_and_entropy(params, action.detach())
            values = torch.stack([*action, log_prob, entropy, family.kl(params, params.detach())])
            (gradient,) = torch.autograd.grad(values.sum(), params)
            assert values.isfinite().all()
            assert gradient.isfinite().all()


def test_extreme_noise_is_finite() -> None:
    """Noise that no generator draws gives the bounds, with finite gradients."""
    family = family_on(-1.0, 1.0)
    for mean in (-9.0, 0.0, 9.0):
        params = params_of(mean, 0.5).requires_grad_()
        for noise, bound in ((-60.0, -1.0), (60.0, 1.0)):
            x = family.sample(params, torch.tensor([noise]))
            assert x.item() == pytest.approx(bound, abs=1e-6)
            assert torch.autograd.grad(x.sum(), params)[0].isfinite().all()


def test_mode_is_the_clipped_mean() -> None:
    """Per dimension the mode is the mean, or the bound that is nearest to it."""
    low = np.array([[-1.0, -np.inf], [0.0, 2.0]], np.float32)
    high = np.array([[1.0, 1.0], [np.inf, 3.0]], np.float32)
    family = TruncatedGaussian(Box(low, high))
    mean = torch.tensor([5.0, -7.0, -0.5, 2.5])
    mode = family.mode(torch.cat([mean, torch.zeros(4)]))
    assert mode.tolist() == [[1.0, -7.0], [0.0, 2.5]]


def test_std_settings() -> None:
    """The std is free, or limited and shifted when the network computes it."""
    space = Box(-1.0, 1.0, (2,))
    free = TruncatedGaussian(space, initial_log_std=-0.5)
    assert free.free_param_size == 2
    assert free.initial_free_params().tolist() == [-0.5, -0.5]
    dependent = TruncatedGaussian(space, state_dependent_std=True, initial_log_std=-1.0)
    assert dependent.free_param_size == 0
    at_zero, at_minus_one = torch.zeros(4), torch.tensor([0.0, 0.0, -1.0, -1.0])
    assert torch.equal(dependent.entropy(at_zero), free.entropy(at_minus_one))
    beyond, limit = torch.tensor([0.0, 0.0, 9.0, 9.0]), torch.tensor([0.0, 0.0, 2.0, 2.0])
    assert torch.equal(dependent.entropy(beyond), free.entropy(limit))
    with pytest.raises(ConfigError, match="log_std_min"):
        TruncatedGaussian(space, log_std_min=3.0)


def test_environment_actions() -> None:
    """Integer boxes are rounded; recorded actions are clipped to the bounds."""
    family = TruncatedGaussian(Box(0, 10, (2,), dtype=np.int32))
    assert family.to_env(torch.tensor([2.6, 9.9])).tolist() == [3, 10]
    assert family.to_env(torch.tensor([2.6, 9.9])).dtype == torch.int32
    recorded = family.from_env(torch.tensor([-4, 7], dtype=torch.int32))
    assert recorded.tolist() == [0.0, 7.0]
    assert recorded.dtype == torch.float32


def test_empty_interval_is_refused() -> None:
    """A dimension without room is an error with a remedy."""
    with pytest.raises(SpaceError, match=r"needs low < high.*remove the constant dimensions"):
        TruncatedGaussian(Box(0.0, 0.0, (2,)))


def test_reparameterized_keeps_the_digits_of_actions_at_a_bound() -> None:
    """Where float32 actions almost coincide, their densities are still those of the noise."""
    family = family_on(-1.0, 1.0)
    params, noise = torch.tensor([[30.0, -5.0], [-3.0, -6.0]]), torch.tensor([[0.3], [-1.2]])
    features, log_probs = family.reparameterized(params, noise)
    assert features.dtype == log_probs.dtype == torch.float32
    for row in range(2):
        (mean, log_std), sign = params[row].tolist(), params[row, 0].sign().item()
        # So far outside, the distance y to the bound is exponential: p = rate · exp(-rate · y), and
        # the second factor is the probability Φ(±noise) of a larger distance.
        rate = (abs(mean) - 1) * math.exp(-2 * log_std)
        further = 0.5 * math.erfc(-sign * noise[row].item() / math.sqrt(2))
        assert log_probs[row].item() == pytest.approx(math.log(rate * further), abs=1e-3)
