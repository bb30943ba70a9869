"""Utilities and gradients of evolution strategies match the paper."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from cases import sweep
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_es import slow_gradient, slow_normalized, slow_ranks

from maze_train.core.errors import ConfigError, ShapeError, TrainingError
from maze_train.functional.evolution import (
    antithetic_gradient,
    centered_ranks,
    normalized_returns,
    shaped_returns,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maze_train.core.types import Tensor

SHAPINGS = ("centered_ranks", "normalized", "raw")
VALUES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 500.0]),
    st.floats(-1e6, 1e6, allow_nan=False, allow_subnormal=False),
)
RETURNS = st.lists(VALUES, min_size=1, max_size=25)


def double(values: Any) -> Tensor:
    """Return a float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)


def make_problem(n: int, dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return utilities [n, 2] and noise [n, dim] in float64."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(n, 2))), torch.from_numpy(rng.normal(size=(n, dim)))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(returns=RETURNS)
def test_centered_ranks_match_pairwise_comparisons(returns: list[float]) -> None:
    """Ranks match pairwise comparisons with ties, sum to 0 and lie in [-0.5, 0.5]."""
    ranks = centered_ranks(double(returns))
    np.testing.assert_allclose(ranks, slow_ranks(returns), rtol=0, atol=1e-15)
    assert abs(float(ranks.sum())) < 1e-13
    assert float(ranks.abs().max()) <= 0.5


def test_centered_ranks_rank_a_matrix_jointly() -> None:
    """All entries of a matrix are ranked together, and the shape is kept."""
    returns = double([[3.0, 10.0], [-1.0, 3.0], [100.0, 0.0]])
    expected = double([[0.5, 0.8], [0.0, 0.5], [1.0, 0.2]]) - 0.5
    torch.testing.assert_close(centered_ranks(returns), expected, rtol=0, atol=1e-15)
    assert centered_ranks(returns.view(3, 1, 2)).shape == (3, 1, 2)
    assert float(centered_ranks(double(7.0))) == 0.0


@sweep("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_utilities_keep_the_dtype_of_returns(dtype: torch.dtype) -> None:
    """Utilities of integers have the default dtype; ranks distinguish large integers."""
    returns = torch.tensor([5.0, 1.0, 1.0, 2.0], dtype=dtype)
    for shaping in SHAPINGS:
        assert shaped_returns(returns, shaping).dtype == dtype
        assert shaped_returns(returns.long(), shaping).dtype == torch.float32
    expected = double([0.5, -1 / 3, -1 / 3, 1 / 6]).to(dtype)
    torch.testing.assert_close(centered_ranks(returns), expected)
    large = torch.tensor([2**60, 2**60 + 1, 2**60 + 2])
    assert centered_ranks(large).tolist() == [-0.5, 0.0, 0.5]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    returns=st.lists(st.integers(-1000, 1000), min_size=2, max_size=25),
    scale=st.sampled_from([1.0, 0.1, 1e-8, 1e8]),
)
def test_normalized_returns_match_the_formula(returns: list[int], scale: float) -> None:
    """The mean is 0 and the std 1 (with divisor m), or all values are exactly 0."""
    scaled = [scale * r for r in returns]
    result = normalized_returns(double(scaled))
    if len(set(returns)) == 1:
        assert not result.any()
        return
    np.testing.assert_allclose(result, slow_normalized(scaled), rtol=1e-9, atol=1e-9)


def test_normalized_returns_keep_their_precision() -> None:
    """Small spreads around large means, extreme values, float32 and integers are accurate."""
    expected = slow_normalized([0.0, 1.0, 2.0, 5.0])
    spread = np.array([[0.0, 1.0], [2.0, 5.0]])
    for returns in (2.0**52 + spread, 1e-300 * spread, 1e300 * spread, -1e200 * (5.0 - spread)):
        result = normalized_returns(torch.from_numpy(returns))
        assert result.shape == (2, 2)
        np.testing.assert_allclose(result.reshape(-1), expected, rtol=1e-9)
    single = normalized_returns(torch.from_numpy(2.0**20 + spread).float())
    np.testing.assert_allclose(single.reshape(-1), expected, rtol=1e-6)
    integers = normalized_returns(torch.from_numpy(2.0**40 + spread).long())
    np.testing.assert_allclose(integers.reshape(-1), expected, rtol=1e-6)


@sweep("shaping", ["centered_ranks", "normalized"])
@sweep("value", [0.0, 0.1, -1e-300, 1e30, 123456.789])
@sweep("dtype", [torch.float32, torch.float64])
@sweep("n", [1, 3, 1000])
def test_equal_returns_have_no_gradient(
    shaping: str, value: float, dtype: torch.dtype, n: int
) -> None:
    """Utilities and gradient are exactly 0, even if the mean is rounded."""
    utilities = shaped_returns(torch.full((n, 2), value, dtype=dtype), shaping)
    assert utilities.shape == (n, 2)
    assert utilities.dtype == dtype
    assert not utilities.any()
    noise = torch.ones(n, 3, dtype=dtype)
    assert antithetic_gradient(utilities, noise, 3).tolist() == [0.0] * 3


@sweep("shaping", SHAPINGS)
def test_non_finite_or_missing_returns_raise(shaping: str) -> None:
    """Non-finite returns, no returns and an unknown shaping raise errors."""
    returns = double([[1.0, 4.0], [2.0, -7.0]])
    if shaping == "raw":
        assert torch.equal(shaped_returns(returns, shaping), returns)
    with pytest.raises(ConfigError, match=r"shaping = 'rank'.*centered_ranks, normalized, raw"):
        shaped_returns(returns, "rank")
    for wrong in (math.nan, math.inf, -math.inf):
        with pytest.raises(TrainingError, match="1 of 4 returns are not finite"):
            shaped_returns(double([[1.0, wrong], [2.0, 3.0]]), shaping)
    with pytest.raises(ShapeError, match=r"returns has shape \[0, 2\], expected at least one"):
        shaped_returns(torch.zeros(0, 2), shaping)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(n=st.integers(1, 8), dim=st.integers(1, 6), seed=st.integers(0, 2**31))
def test_es_gradient_matches_the_paper(n: int, dim: int, seed: int) -> None:
    """The gradient is the mean of utility times noise over 2 n policies, in any order of pairs."""
    utilities, noise = make_problem(n, dim, seed)
    gradient = antithetic_gradient(utilities, noise, dim)
    expected = slow_gradient(utilities.tolist(), noise.tolist())
    np.testing.assert_allclose(gradient, expected, rtol=1e-11, atol=1e-13)
    order = np.random.default_rng(seed).permutation(n)
    permuted = antithetic_gradient(utilities[order], noise[order], dim)
    torch.testing.assert_close(permuted, gradient, rtol=1e-11, atol=1e-13)


def test_es_gradient_accepts_a_generator_of_noise() -> None:
    """Noise may be a generator of overlapping views; the result is a new tensor of its dtype."""
    table = torch.randn(20, generator=torch.Generator().manual_seed(0))
    kept = table.clone()
    utilities = double([[1.0, -2.0], [0.5, 4.0], [3.0, 0.0]])
    places = [0, 3, 8]

    def views() -> Iterator[Tensor]:
        """Yield vectors of noise."""
        for place in places:
            yield table[place : place + 12]

    gradient = antithetic_gradient(utilities, views(), 12)
    rows = [table[place : place + 12].tolist() for place in places]
    np.testing.assert_allclose(gradient, slow_gradient(utilities.tolist(), rows), rtol=1e-5)
    assert gradient.dtype == torch.float32
    assert torch.equal(table, kept)
    single = antithetic_gradient(double([[2.0, 0.0]]), [table], 20)
    assert torch.equal(single, table)
    assert single.data_ptr() != table.data_ptr()


@pytest.mark.parametrize(
    ("utilities", "noise", "dim", "message"),
    [
        ((0, 2), (0, 3), 3, r"utilities has shape \[0, 2\], expected \[n, 2\]"),
        ((4, 1), (4, 3), 3, r"utilities has shape \[4, 1\], expected \[n, 2\]"),
        ((), (1, 3), 3, r"utilities has shape \[\], expected \[n, 2\]"),
        ((4, 2), (3, 3), 3, "noise has 3 vectors, expected 4"),
        ((4, 2), (5, 3), 3, "noise has more than 4 vectors"),
        ((4, 2), (4, 3), 2, r"noise\[0\] has shape \[3\], expected \[2\]"),
        ((4, 2), (4, 3, 1), 3, r"noise\[0\] has shape \[3, 1\], expected \[3\]"),
    ],
)
def test_wrong_shapes_are_refused(
    utilities: tuple[int, ...], noise: tuple[int, ...], dim: int, message: str
) -> None:
    """Wrong numbers and shapes of vectors raise ShapeError."""
    with pytest.raises(ShapeError, match=message):
        antithetic_gradient(torch.ones(utilities), torch.ones(noise), dim)


def test_es_estimate_is_within_4_percent_of_the_gradient() -> None:
    """With the factor 1 / (2 n σ), the estimate is within 4% of the gradient."""
    top = torch.linspace(-1.0, 2.0, 8, dtype=torch.float64)
    theta, sigma, n = torch.full((8,), 0.3, dtype=torch.float64), 0.05, 20_000
    _, noise = make_problem(n, 8)
    members = torch.stack([theta + sigma * noise, theta - sigma * noise], 1)
    returns = -(members - top).square().sum(-1)
    gradient = antithetic_gradient(shaped_returns(returns, "raw"), noise, 8) / sigma
    true = 2.0 * (top - theta)
    assert float((gradient - true).norm() / true.norm()) < 0.04
