from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from reference_returns import slow_two_hot

from maze_train.core.errors import ConfigError, ShapeError
from maze_train.functional.value_transforms import (
    ReduceScaleValueTransform,
    ValueTransform,
    scalar_to_support,
    support_to_scalar,
)

EPSILONS = [1e-7, 1e-3, 0.5]
TRANSFORMS = [ReduceScaleValueTransform(epsilon) for epsilon in EPSILONS]


def wide_range(dtype: torch.dtype) -> torch.Tensor:
    """Return 0 and magnitudes from 1e-6 to 1e8 with both signs."""
    magnitudes = torch.logspace(-6, 8, 141, dtype=dtype)
    return torch.cat([-magnitudes.flip(0), torch.zeros(1, dtype=dtype), magnitudes])


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_reduce_scale_matches_the_paper(epsilon: float) -> None:
    """The map and its inverse match the published formulas in float64, for both signs."""
    transform = ReduceScaleValueTransform(epsilon)
    for x in (-1e4, -100.0, -3.0, -0.5, 0.0, 0.5, 3.0, 100.0, 1e4):
        sign = math.copysign(1.0, x)
        expected = sign * (math.sqrt(abs(x) + 1.0) - 1.0) + epsilon * x
        assert transform.transform_value(
            torch.tensor(x, dtype=torch.float64)
        ).item() == pytest.approx(expected, rel=1e-9)
        root = math.sqrt(1.0 + 4.0 * epsilon * (abs(x) + 1.0 + epsilon))
        inverse = sign * (((root - 1.0) / (2.0 * epsilon)) ** 2 - 1.0)
        # For small epsilon the published inverse is inaccurate due to cancellation; ours is not.
        assert transform.transform_value_inv(
            torch.tensor(x, dtype=torch.float64)
        ).item() == pytest.approx(inverse, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 3e-6)])
def test_value_transform_inverse_undoes_the_transform(
    transform: ValueTransform, dtype: torch.dtype, rtol: float
) -> None:
    """h^-1(h(x)) = x and h(h^-1(y)) = y for both signs and all magnitudes, also in float32."""
    x = wide_range(dtype)
    there_and_back = transform.transform_value_inv(transform.transform_value(x))
    back_and_there = transform.transform_value(transform.transform_value_inv(x))
    assert there_and_back.dtype == dtype
    torch.testing.assert_close(there_and_back, x, rtol=rtol, atol=0)
    torch.testing.assert_close(back_and_there, x, rtol=rtol, atol=0)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)
def test_transforms_increase_strictly(transform: ValueTransform) -> None:
    """The transforms are strictly increasing, and h(-x) = -h(x)."""
    x = wide_range(torch.float64)
    transformed = transform.transform_value(x)
    assert (transformed.diff() > 0.0).all()
    assert torch.equal(transform.transform_value(-x), -transformed)
    assert torch.equal(transform.transform_value_inv(-x), -transform.transform_value_inv(x))


def test_transforms_are_differentiable_at_zero() -> None:
    """Gradients match finite differences on both sides of 0, and are finite at 0."""
    transform = ReduceScaleValueTransform()
    x = torch.tensor([-3.0, -0.2, 0.4, 50.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(transform.transform_value, x)
    assert torch.autograd.gradcheck(transform.transform_value_inv, x)
    zero = torch.zeros((), requires_grad=True)
    (gradient,) = torch.autograd.grad(transform.transform_value(zero), zero)
    assert gradient.item() == pytest.approx(0.501)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)
def test_numbers_and_arrays_become_tensors(transform: ValueTransform) -> None:
    """Floats, integers and arrays give the values of a tensor."""
    array = np.array([-2.0, 3.0])
    expected = transform.transform_value(torch.tensor([-2.0, 3.0], dtype=torch.float64))
    assert torch.equal(transform.transform_value(array), expected)
    for number in (3, 3.0):
        result = transform.transform_value(number)
        assert result.shape == ()
        assert result.item() == pytest.approx(expected[1].item(), rel=1e-6)


@pytest.mark.parametrize("value", [0.0, -1e-3, math.inf, math.nan])
def test_value_transform_epsilon_out_of_range_raises(value: float) -> None:
    """Epsilon must be finite and > 0; the error names it."""
    with pytest.raises(ConfigError, match="epsilon"):
        ReduceScaleValueTransform(value)


def test_expected_value_of_known_logits() -> None:
    """Eleven logits, two of them raised, give the known value, with and without a batch."""
    logits = torch.zeros(11)
    logits[3], logits[4] = 0.3, 0.7
    result = support_to_scalar(logits, (0, 10))
    assert result.shape == ()
    assert result.item() == pytest.approx(4.861410140991211, rel=1e-6)
    batch = support_to_scalar(logits.expand(2, 10, 11), (0, 10))
    assert batch.shape == (2, 10)
    torch.testing.assert_close(batch, result.expand(2, 10))


def test_two_hot_follows_its_definition() -> None:
    """Values inside, on integers, at the ends and outside of the support match the definition."""
    scalars = torch.tensor([-9.0, -3.0, -2.99, -1.0, -0.5, 0.0, 0.3, 1.999, 2.0, 8.0]).double()
    weights = scalar_to_support(scalars.view(2, 5), (-3, 2)).view(10, 6)
    expected = np.stack([slow_two_hot(scalar, -3, 2) for scalar in scalars.tolist()])
    np.testing.assert_allclose(weights, expected, rtol=1e-9, atol=1e-12)
    assert scalar_to_support(torch.tensor([1, 7]), (0, 2)).tolist() == [[0, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize("support_range", [(0, 10), (-300, 300), (-1, 0)])
def test_two_hot_round_trip(support_range: tuple[int, int]) -> None:
    """The expected value of a two-hot distribution is the scalar; at most two entries are not 0."""
    low, high = support_range
    scalars = torch.linspace(low, high, 997, dtype=torch.float64)
    weights = scalar_to_support(scalars, support_range)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(scalars))
    assert ((weights > 0.0).sum(-1) <= 2).all()
    recovered = support_to_scalar(weights.log(), support_range)
    torch.testing.assert_close(recovered, scalars, rtol=1e-9, atol=1e-9)


def test_two_hot_with_wrong_support_raises() -> None:
    """The number of logits must match the support, which must not be empty."""
    with pytest.raises(ShapeError, match=r"logits has shape \[3, 10\], expected \[\.\.\., 11\]"):
        support_to_scalar(torch.zeros(3, 10), (0, 10))
    with pytest.raises(ShapeError):
        support_to_scalar(torch.zeros(()), (0, 10))
    with pytest.raises(ConfigError, match="low < high"):
        scalar_to_support(torch.zeros(3), (4, 4))
