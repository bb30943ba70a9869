"""Beta: density of environment actions, rejection sampling, gradients of samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from torch import distributions as td

from maze_train.distributions.beta import PROPOSALS, Beta

LOW, HIGH = np.array([-3.0, 0.0]), np.array([1.0, 0.5])


def raw(*excesses: float) -> torch.Tensor:
    """Return parameters whose softplus is the given α - 1 and β - 1, > 0."""
    values = torch.tensor(excesses, dtype=torch.float64)
    return values + torch.log(-torch.expm1(-values))


def concentrations(params: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return α and β of parameters [..., 2 D]."""
    alpha, beta = (1 + torch.nn.functional.softplus(params)).chunk(2, -1)
    return alpha, beta


def distribution_function(x: float, alpha: float, beta: float) -> float:
    """Return P(X <= x), computed by the midpoint rule with 20,000 nodes."""
    middles = (np.arange(20_000) + 0.5) / 20_000 * x
    log_beta = math.lgamma(alpha) + math.lgamma(beta) - math.lgamma(alpha + beta)
    log_density = (alpha - 1) * np.log(middles) + (beta - 1) * np.log1p(-middles) - log_beta
    return float(np.exp(log_density).mean() * x)


def test_beta_parameters_start_flat_and_stay_unimodal() -> None:
    """α and β are 1 + softplus: at least 1, and 1 + log 2 for a network that computes 0."""
    family = Beta(Box(-1.0, 1.0, (1,)))
    expected = td.Beta(1 + math.log(2), 1 + math.log(2)).entropy() + math.log(2)
    assert family.entropy(torch.zeros(2)).item() == pytest.approx(expected.item(), rel=1e-6)
    lowest = torch.full((2,), -200.0)
    uniform = family.log_prob(lowest.expand(3, 2), torch.tensor([[0.01], [0.5], [0.99]]))
    assert uniform.tolist() == pytest.approx([-math.log(2.0)] * 3, rel=1e-6)


@pytest.mark.parametrize("excess", [(1e-6, 1e-6), (30.0, 1e-3)])
def test_moments_and_distribution_of_samples(excess: tuple[float, float]) -> None:
    """Mean, variance and deciles of 100,000 samples match the Beta distribution."""
    family, count = Beta(Box(0.0, 1.0, (1,), dtype=np.float64)), 100_000
    noise = family.draw_noise((count,), torch.Generator().manual_seed(0))
    x = family.sample(raw(*excess).expand(count, 2), noise)[:, 0]
    alpha, beta = 1 + excess[0], 1 + excess[1]
    reference = td.Beta(torch.tensor(alpha).double(), torch.tensor(beta).double())
    assert abs(x.mean() - reference.mean) < 4 * reference.stddev / count**0.5
    fourth = ((x - x.mean()) ** 4).mean()
    error = ((fourth - reference.variance**2) / count).sqrt()
    assert abs(x.var() - reference.variance) < 4 * error
    for level in (0.1, 0.5, 0.9):
        reached = distribution_function(float(x.quantile(level)), alpha, beta)
        assert reached == pytest.approx(level, abs=4 * (level * (1 - level) / count) ** 0.5)


def test_beta_accepts_94_percent_of_first_proposals() -> None:
    """94% of the variates of shape 1 do not depend on the noise of later proposals."""
    family, count = Beta(Box(0.0, 1.0, (1,))), 20_000
    noise = family.draw_noise((count,), torch.Generator().manual_seed(0))
    table = noise.clone().reshape(count, 2, 2, PROPOSALS)
    table[..., 1:] = family.draw_noise((count,), torch.Generator().manual_seed(1)).reshape(
        table.shape
    )[..., 1:]
    params = torch.full((count, 2), -50.0)
    changed = family.sample(params, noise) != family.sample(params, table.reshape(noise.shape))
    # Both variates of an action must be accepted at once: 0.95² > 0.9.
    assert 0.0 < changed.double().mean().item() < 0.1


def test_beta_samples_are_finite_if_all_proposals_are_rejected() -> None:
    """If every proposal is rejected, the first proposal or 1 is used, with finite gradients."""
    family = Beta(Box(0.0, 1.0, (1,)))
    table = torch.empty(1, 2, 1, 2, PROPOSALS)
    table[:, 0], table[:, 1] = -40.0, 1.0 - 2**-24
    params = torch.tensor([[0.0, 1.5]], requires_grad=True)
    x = family.sample(params, table.reshape(1, -1))
    x.sum().backward()
    d, e = (shape.item() - 1 / 3 for shape in concentrations(params.detach()))
    assert x.item() == pytest.approx(d / (d + e), rel=1e-6)
    assert params.grad is not None
    assert params.grad.isfinite().all()


@pytest.mark.parametrize("excess", [(0.5, 4.0), (80.0, 80.0)])
def test_gradient_of_samples(excess: tuple[float, float]) -> None:
    """The gradient is dx/dα = -(∂F/∂α) / p(x), checked by finite differences."""
    family = Beta(Box(0.0, 1.0, (1,), dtype=np.float64))
    params = raw(*excess).expand(5, 2).clone().requires_grad_()
    noise = family.draw_noise((5,), torch.Generator().manual_seed(4))
    samples = family.sample(params, noise)
    (gradient,) = torch.autograd.grad(samples.sum(), params)
    for row, x in enumerate(samples[:, 0].tolist()):
        density = family.log_prob(params[row], samples[row]).exp().item()
        for column in (0, 1):
            step = 1e-4
            values = []
            for sign in (1, -1):
                moved = params[row].detach().clone()
                moved[column] += sign * step
                alpha, beta = concentrations(moved)
                values.append(distribution_function(x, alpha.item(), beta.item()))
            expected = -(values[0] - values[1]) / (2 * step) / density
            # PyTorch approximates this derivative.
            assert gradient[row, column].item() == pytest.approx(expected, rel=5e-3, abs=1e-6)


def test_beta_mode_is_the_peak_of_the_density() -> None:
    """The mode is the peak of the density, 0.5 if it is uniform, and finite at the bounds."""
    family = Beta(Box(-1.0, 1.0, (1,)))
    assert family.mode(raw(1.0, 3.0)).item() == pytest.approx(0.25)
    assert family.mode(torch.full((2,), -2000.0)).item() == 0.5
    edge = torch.tensor([-2000.0, 5.0])
    assert 0.0 < family.mode(edge).item() < 1e-6
    assert family.log_prob(edge, family.mode(edge)).isfinite()
    at_zero = torch.full((2,), -2000.0, requires_grad=True)
    family.mode(at_zero).sum().backward()
    assert at_zero.grad is not None
    assert at_zero.grad.isfinite().all()


def test_beta_actions_stay_inside_the_bounds() -> None:
    """The density of float32 samples is finite for extremely skewed distributions."""
    family, count = Beta(Box(0.0, 1.0, (2,))), 5_000
    params = torch.tensor([1e5, -100.0, -100.0, 1e5]).expand(count, 4)
    x = family.sample(params, family.draw_noise((count,), torch.Generator().manual_seed(0)))
    assert x.dtype == torch.float32
    assert x.min() > 0
    assert x.max() < 1
    assert family.log_prob(params, x).isfinite().all()
    assert family.from_env(torch.tensor([0.0, 1.0])).tolist() == [2**-24, 1 - 2**-24]


def test_log_density_of_peaked_beta_is_accurate() -> None:
    """The float32 log-density is accurate for concentrations of 10⁶."""
    family = Beta(Box(0.0, 1.0, (1,)))
    params, x = torch.tensor([1e6, 2e6]), torch.tensor([1 / 3])
    exact = family.log_prob(params.double(), x.double())
    assert family.log_prob(params, x).item() == pytest.approx(exact.item(), rel=1e-6)
    assert family.entropy(params).item() == pytest.approx(
        family.entropy(params.double()).item(), rel=1e-6
    )
