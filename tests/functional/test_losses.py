"""Losses of policies and values match their papers; common properties."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from cases import sweep
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_returns import slow_clipped_value_loss, slow_surrogate, slow_two_hot_loss

from maze_train.core.errors import ConfigError, ShapeError
from maze_train.functional.losses import (
    approximate_kl,
    clip_fraction,
    clipped_surrogate_loss,
    clipped_value_loss,
    critic_loss,
    critic_loss_gradient,
    policy_gradient_loss,
    squared_value_loss,
)
from maze_train.functional.value_transforms import two_hot_loss

if TYPE_CHECKING:
    from collections.abc import Callable

RTOL = 1e-9
floats = st.floats(-5.0, 5.0, width=32)


def samples(*shape: int) -> torch.Tensor:
    """Return standard normal float64 values from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def two_hot(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of logits [N] of one of five integers; the other logits are 0."""
    return two_hot_loss(torch.nn.functional.pad(logits.unsqueeze(-1), (2, 2)), targets, (-2, 2))


def slow_two_hot(logits: Any, targets: Any) -> float:
    """Return the slow reference of `two_hot`."""
    rows = torch.nn.functional.pad(torch.from_numpy(logits).reshape(-1, 1), (2, 2)).numpy()
    return slow_two_hot_loss(rows, targets.ravel(), -2, 2)


LOSSES: dict[str, tuple[int, Callable[..., Any], Callable[..., Any]]] = {
    "policy gradient": (1, policy_gradient_loss, lambda p, a: -(p * a).mean()),
    **{
        f"surrogate {c}": (
            1,
            lambda p, a, c=c: clipped_surrogate_loss(p, a, c),
            lambda p, a, c=c: slow_surrogate(p, a, c),
        )
        for c in (0.05, 0.2, 1.5)
    },
    "squared": (1, squared_value_loss, lambda v, r: ((v - r) ** 2).mean()),
    **{
        f"clipped {c}": (
            2,
            lambda v, old, r, c=c: clipped_value_loss(v, old, r, c),
            lambda v, old, r, c=c: slow_clipped_value_loss(v, old, r, c),
        )
        for c in (0.05, 0.5, 100.0)
    },
    "two-hot": (1, two_hot, slow_two_hot),
}
"""Number of constants after the first argument, the loss, and its slow reference."""


@pytest.mark.parametrize("name", LOSSES)
@sweep("shape", [(1,), (20,), (4, 5)])
def test_losses_match_the_papers(name: str, shape: tuple[int, ...]) -> None:
    """Losses are means over samples in any order with numerically correct gradients."""
    count, loss, slow = LOSSES[name]
    x, *constants = (row.requires_grad_() for row in samples(1 + count, *shape).unbind())
    value = loss(x, *constants)
    assert value.shape == ()
    expected = slow(*(tensor.detach().numpy() for tensor in (x, *constants)))
    assert value.item() == pytest.approx(float(expected), rel=RTOL)
    value.backward()
    assert x.grad is not None
    assert all(constant.grad is None for constant in constants)
    fixed = [constant.detach() for constant in constants]
    assert torch.autograd.gradcheck(lambda leaf: loss(leaf, *fixed), x)
    order = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(1))
    shuffled = loss(*(tensor.detach().ravel()[order] for tensor in (x, *constants)))
    torch.testing.assert_close(shuffled, value.detach(), rtol=RTOL, atol=0.0)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_broadcasting_shapes_raise(name: str) -> None:
    """A combination of [N, 1] and [N] raises an error instead of broadcasting."""
    count, loss, _ = LOSSES[name]
    with pytest.raises(ShapeError, match=r"has shape \[4\], expected \[4, 1\]|\[4, 1\], .* \[4\]"):
        loss(torch.ones(4, 1), *[torch.ones(4)] * count)


def test_squared_loss_has_no_factor_one_half() -> None:
    """Errors of 1 and 3 have the loss (1 + 9) / 2."""
    assert squared_value_loss(torch.tensor([1.0, 5.0]), torch.tensor([2.0, 2.0])).item() == 5.0


@sweep("advantage", [1.0, 0.0, -1.0])
@sweep("log_ratio", [1000.0, -1000.0])
def test_huge_log_ratios_are_finite(log_ratio: float, advantage: float) -> None:
    """Loss and gradient are finite in float32."""
    log_ratios = torch.tensor([log_ratio, 0.0], requires_grad=True)
    loss = clipped_surrogate_loss(log_ratios, torch.tensor([advantage, 1.0]), 0.2)
    assert loss.isfinite()
    assert torch.autograd.grad(loss, log_ratios)[0].isfinite().all()


def test_two_hot_loss_of_logits() -> None:
    """Targets outside the support are clamped, and large logits do not overflow."""
    logits = samples(6, 5)
    targets = torch.tensor([-3.0, -2.0, -0.4, 0.7, 2.0, 9.0], dtype=torch.float64)
    expected = slow_two_hot_loss(logits.numpy(), targets.numpy(), -2, 2)
    assert two_hot_loss(logits, targets, (-2, 2)).item() == pytest.approx(expected, rel=RTOL)
    uniform = two_hot_loss(torch.zeros(2, 3, 7), torch.randn(2, 3), (-3, 3))
    assert uniform.item() == pytest.approx(math.log(7.0), rel=1e-6)
    extreme = torch.tensor([[1000.0, -1000.0, 0.0]], requires_grad=True)
    loss = two_hot_loss(extreme, torch.tensor([2.0]), (0, 2))
    assert loss.item() == 1000.0
    assert torch.autograd.grad(loss, extreme)[0].isfinite().all()


def test_two_hot_loss_with_wrong_support_raises() -> None:
    """The number of logits must match the support, which must not be empty."""
    row = torch.ones(4)
    with pytest.raises(ShapeError, match=r"expected \[\.\.\., 5\] for the integers -2 to 2"):
        two_hot_loss(torch.zeros(4, 6), row, (-2, 2))
    with pytest.raises(ConfigError, match="low < high"):
        two_hot_loss(torch.zeros(4, 5), row, (2, -2))


def test_kl_estimate_of_known_ratios() -> None:
    """The estimate is the mean of (ratio - 1) - log ratio, accurate for 1e-3 in float32."""
    assert approximate_kl(torch.zeros(4)).item() == 0.0
    log_ratios = torch.tensor([math.log(2.0), -math.log(2.0)], dtype=torch.float64)
    assert approximate_kl(log_ratios).item() == pytest.approx(0.25, rel=RTOL)
    assert approximate_kl(torch.full((8,), 1e-3)).item() == pytest.approx(5e-7, rel=1e-3)


@settings(deadline=None)  # a busy machine does not fail the test
@given(st.lists(floats, min_size=1, max_size=20), st.sampled_from([1.0, 1e-2, 1e-4, 1e-7]))
def test_kl_estimate_is_never_negative(log_ratios: list[float], scale: float) -> None:
    """The estimate is not negative in float32 for small log ratios, unlike exp(x) - 1 - x."""
    assert approximate_kl(torch.tensor(log_ratios) * scale).item() >= 0.0


def test_clip_fraction_counts_ratios_beyond_the_bounds() -> None:
    """Ratios beyond either bound are counted, and metrics have no gradient."""
    log_ratios = torch.tensor([0.5, 1.0, 1.19, 1.21, 0.81, 0.79]).log().requires_grad_()
    fraction = clip_fraction(log_ratios, 0.2)
    assert fraction.item() == 0.5
    assert fraction.dtype == torch.float32
    assert clip_fraction(torch.zeros(4), 0.2).item() == 0.0
    assert not fraction.requires_grad
    assert not approximate_kl(log_ratios).requires_grad


@sweep("weighted", [False, True])
@sweep("delta", [math.inf, 1.0, 0.3])
@sweep("choices", [(), (3, 2)])
def test_critic_loss(choices: tuple[int, ...], delta: float, weighted: bool) -> None:
    """Loss, gradient and errors match loops over critics, samples and choices."""
    n, size = 5, 3
    q, targets = samples(size, n, sum(choices) or 1).requires_grad_(), samples(n)
    generator = torch.Generator().manual_seed(0)
    columns = [torch.randint(k, (n,), generator=generator) for k in choices]
    chosen = torch.empty(n, 0, dtype=torch.int64)
    if choices:
        chosen = torch.stack([columns[0], columns[1] + choices[0]], 1)
    weights = samples(2, n)[1].abs() if weighted else None
    expected, errors = samples(1)[0] * 0.0, torch.zeros(size, n, dtype=torch.float64)
    for e, i in itertools.product(range(size), range(n)):
        places = chosen[i].tolist() if choices else [0]
        error = sum(q[e, i, j] for j in places) - targets[i]
        is_square = bool(error.abs() <= delta)
        own = error**2 / 2 if is_square else delta * (error.abs() - delta / 2)
        expected = expected + own * (1.0 if weights is None else weights[i]) / n
        errors[e, i] = error.detach()
    loss, found = critic_loss(q, chosen, targets, weights, delta)
    torch.testing.assert_close(loss, expected, rtol=RTOL, atol=0)
    (gradient,) = torch.autograd.grad(expected, q)
    torch.testing.assert_close(torch.autograd.grad(loss, q), (gradient,))
    torch.testing.assert_close(found, errors)
    slopes = critic_loss_gradient(found, weights, delta).unsqueeze(2)
    entries = (chosen if choices else torch.zeros(n, 1, dtype=torch.int64)).expand(size, n, -1)
    by_hand = torch.zeros_like(q).scatter_(2, entries, slopes.expand(entries.shape))
    torch.testing.assert_close(by_hand, gradient)
