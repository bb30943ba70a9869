from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import sweep
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_returns import make_trajectory, slow_advantages, slow_recurrence
from step_ends import ends_of

from maze_train.core.errors import ShapeError
from maze_train.functional.returns import (
    backward_recurrence,
    discounts_and_lambdas,
    explained_variance,
    lambda_advantages,
    normalize_advantages,
    scale_advantages,
)

RTOL = 1e-9


@sweep("trailing", [(), (1,), (2, 3)])
@sweep("num_steps", [1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65, 200])
def test_recurrence_equals_a_loop(num_steps: int, trailing: tuple[int, ...]) -> None:
    """Recursive doubling matches the row-by-row loop for every length and shape."""
    rng = np.random.default_rng(num_steps)
    inputs = rng.normal(size=(num_steps, *trailing))
    decays = rng.uniform(size=(num_steps, *trailing)) * rng.integers(0, 2, (num_steps, *trailing))
    before = inputs.copy(), decays.copy()
    result = backward_recurrence(torch.from_numpy(inputs), torch.from_numpy(decays))
    np.testing.assert_allclose(result, slow_recurrence(inputs, decays), rtol=RTOL, atol=1e-12)
    assert (inputs == before[0]).all()
    assert (decays == before[1]).all()


def test_recurrence_keeps_the_wider_dtype() -> None:
    """Both tensors must have the same shape with a time dimension."""
    single, double = torch.ones(3), torch.ones(3, dtype=torch.float64)
    for pair in ((single, double), (double, single)):
        assert backward_recurrence(*pair).dtype == torch.float64
    assert backward_recurrence(single, single).dtype == torch.float32
    with pytest.raises(ShapeError, match=r"decays has shape \[3\], expected \[3, 1\] like inputs"):
        backward_recurrence(torch.ones(3, 1), torch.ones(3))
    with pytest.raises(ShapeError, match="time dimension"):
        backward_recurrence(torch.ones(()), torch.ones(()))


def test_end_codes_become_discounts_and_lambdas() -> None:
    """Termination zeroes the discount; lambda is 0 at each end and before invalid rows."""
    columns = torch.tensor([[0, 1, 0, 2, 0], [0, 3, 0, 4, 0], [0, 5, 5, 0, 0]], dtype=torch.uint8)
    discounts, lambdas = discounts_and_lambdas(columns.T, 0.5, 0.25)
    assert discounts.T.tolist() == [[0.5, 0.0, 0.5, 0.5, 0.5], [0.5] * 5, [0.5] * 5]
    expected = [[1, 0, 1, 0, 1], [0, 0, 0, 0, 1], [0, 0, 0, 1, 1]]
    assert (4 * lambdas).T.tolist() == expected
    assert discounts.dtype == lambdas.dtype == torch.float32


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    num_steps=st.integers(1, 8),
    num_envs=st.integers(1, 3),
    seed=st.integers(0, 2**31),
    gamma=st.sampled_from([0.0, 0.99, 1.0]),
    gae_lambda=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_estimators_match_their_definitions(
    num_steps: int, num_envs: int, seed: int, gamma: float, gae_lambda: float
) -> None:
    """Advantages match explicit sums over each episode, for every kind of end."""
    data = make_trajectory(num_steps, num_envs, seed)
    end = ends_of(data.tensor("terminated"), data.tensor("truncated"))
    discounts, lambdas = discounts_and_lambdas(end, gamma, gae_lambda, dtype=torch.float64)
    rewards, values, next_values = map(data.tensor, ("rewards", "values", "next_values"))
    advantages = lambda_advantages(rewards, discounts, values, next_values, lambdas)
    expected = slow_advantages(data, gamma, gae_lambda)
    np.testing.assert_allclose(advantages, expected, rtol=RTOL, atol=1e-12)


def test_advantages_and_returns_have_no_gradient() -> None:
    """Advantages and returns have no gradient, also if values have one."""
    values = torch.randn(4, 2, requires_grad=True)
    ones = torch.ones(4, 2)
    assert not lambda_advantages(ones, ones, values, values, ones).requires_grad
    assert not backward_recurrence(values, ones).requires_grad
    assert not explained_variance(values, ones).requires_grad


def test_estimators_raise_for_wrong_shapes() -> None:
    """The error contains the tensor, both shapes and the reference tensor."""
    ones = torch.ones(4, 2)
    with pytest.raises(
        ShapeError, match=r"next_values has shape \[5, 2\], expected \[4, 2\] like rewards"
    ):
        lambda_advantages(ones, ones, ones, torch.ones(5, 2), ones)


def test_normalized_advantages_have_mean_zero_and_std_one() -> None:
    """The sample std becomes 1."""
    result = normalize_advantages(3.0 + 5.0 * torch.randn(100, dtype=torch.float64))
    assert abs(result.mean().item()) < 1e-12
    assert result.std().item() == pytest.approx(1.0, rel=1e-7)


@sweep("size", [0, 1])
def test_normalization_keeps_a_single_advantage(size: int) -> None:
    """A single advantage, which has no std, is unchanged instead of NaN."""
    advantages = torch.full((size,), 7.0)
    assert torch.equal(normalize_advantages(advantages), advantages)


@sweep("value", [0.0, 0.1, 1000.3])
@sweep("size", [2, 64, 1000])
def test_normalized_equal_advantages_are_zero(value: float, size: int) -> None:
    """Equal advantages become 0, also if their mean is rounded."""
    assert not normalize_advantages(torch.full((size,), value)).any()


def test_scaled_advantages_keep_their_zero() -> None:
    """The root mean square becomes 1 for any mean; zeros do not cause a division by 0."""
    result = scale_advantages(torch.tensor([1.0, -1.0, 7.0, 0.0]))
    torch.testing.assert_close(result, torch.tensor([1.0, -1.0, 7.0, 0.0]) / 51**0.5 * 2)
    assert not scale_advantages(torch.zeros(3)).any()
    assert scale_advantages(torch.zeros(0)).shape == (0,)


def test_explained_variance_of_known_predictions() -> None:
    """Perfect: 1; shifted: 1; the mean: 0; opposite: -3; random data matches numpy."""
    targets = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert explained_variance(targets, targets).item() == 1.0
    assert explained_variance(targets + 5.0, targets).item() == 1.0
    assert explained_variance(torch.full((4,), 2.5), targets).item() == 0.0
    assert explained_variance(-targets, targets).item() == -3.0
    rng = np.random.default_rng(0)
    predicted, actual = rng.normal(size=(2, 6, 3))
    result = explained_variance(torch.from_numpy(predicted), torch.from_numpy(actual))
    expected = 1.0 - np.var(actual - predicted) / np.var(actual)
    assert result.shape == ()
    assert result.item() == pytest.approx(expected, rel=RTOL)


@sweep("value", [0.0, 0.1, -3.3, 1000.3])
@sweep("size", [1, 2, 64, 1000])
def test_explained_variance_of_constant_targets_is_zero(value: float, size: int) -> None:
    """Targets without variance give 0, also if their computed variance is not exactly 0."""
    assert explained_variance(torch.randn(size), torch.full((size,), value)).item() == 0.0
