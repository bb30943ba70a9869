"""Categorical, MultiCategorical and Bernoulli with large logits and few legal choices."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from cases import sweep
from gymnasium.spaces import Discrete, MultiBinary, MultiDiscrete

from maze_train.distributions.categorical import (
    Bernoulli,
    Categorical,
    MultiCategorical,
    impossible_logit,
)

if TYPE_CHECKING:
    from maze_train.distributions.base import Distribution


def logits(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    """Return random float64 logits from a fixed seed."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_actions_with_very_negative_logits_are_not_sampled() -> None:
    """An action with a large negative logit is not sampled; values and gradients are finite."""
    family = Categorical(Discrete(3))
    params = torch.tensor([[0.3, -1e9, 1.0]]).expand(1000, 3).clone().requires_grad_()
    reference = Categorical(Discrete(2)).entropy(torch.tensor([[0.3, 1.0]]))
    actions = family.sample(params, family.draw_noise((1000,)))
    log_prob, entropy = family.log_prob_and_entropy(params, actions)
    (log_prob + entropy + family.kl(params, params.detach() + 1)).sum().backward()
    assert (actions != 1).all()
    torch.testing.assert_close(entropy.detach()[:1], reference)
    assert params.grad is not None
    assert params.grad.isfinite().all()


def test_half_precision_padding_is_finite() -> None:
    """The padding of choices is finite in bfloat16 and float16."""
    family = MultiCategorical(MultiDiscrete([2, 5]))
    for dtype in (torch.bfloat16, torch.float16):
        params = logits(4, 7).to(dtype)
        assert family.entropy(params).isfinite().all()
        assert family.kl(params, -params).isfinite().all()


@sweep("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("family", "legal", "log_counts"),
    [
        (Categorical(Discrete(4)), [[1, 0, 1, 1], [0, 0, 1, 0]], [3, 1]),
        (
            MultiCategorical(MultiDiscrete([2, 3])),
            [[1, 0, 1, 1, 0], [1, 1, 0, 1, 0]],
            [2, 2],
        ),
        (Bernoulli(MultiBinary(2)), [[1, 0], [0, 0]], [2, 1]),
    ],
)
def test_masked_choices_match_legal_choices_only(
    family: Distribution, legal: list[list[int]], log_counts: list[int], dtype: torch.dtype
) -> None:
    """Values, gradients and the maximum entropy match the legal actions only."""
    is_legal = torch.tensor(legal, dtype=torch.bool)
    logits = torch.linspace(-1, 1, is_legal.numel(), dtype=dtype).reshape(is_legal.shape)
    params = torch.where(is_legal, logits, impossible_logit(dtype))
    probs, log_probs = family.choice_probs(params.requires_grad_())
    assert log_probs.isfinite().all()
    assert (log_probs[probs == 0] == 0).all()
    counted = is_legal
    if isinstance(family, Bernoulli):
        counted = torch.stack((torch.ones_like(is_legal), is_legal), -1).flatten(-2)
    assert torch.equal(probs > 0, counted)
    values = torch.linspace(-5, 5, probs.numel(), dtype=dtype).reshape(probs.shape)
    for alpha in (0.0, 0.2, 1e6):
        costs = alpha * log_probs - values
        assert (probs * costs)[~counted].eq(0).all()
        (slopes,) = torch.autograd.grad((probs * costs).sum(), params, retain_graph=True)
        assert slopes.isfinite().all()
        assert (slopes[~is_legal] == 0).all()
    expected = torch.tensor(log_counts, dtype=dtype).log()
    torch.testing.assert_close(family.max_entropy(params), expected)
    torch.testing.assert_close(-(probs * log_probs).sum(-1), family.entropy(params))


def test_max_entropy_without_legal_actions_is_zero() -> None:
    """Without legal actions, the maximum entropy is 0 instead of -inf."""
    params = torch.full((1, 3), impossible_logit(torch.float32))
    assert Categorical(Discrete(3)).max_entropy(params).tolist() == [0.0]


@pytest.mark.parametrize(
    ("family", "params"),
    [
        (Categorical(Discrete(4)), [[0.5, -math.inf, 1.0, -0.5]]),
        (MultiCategorical(MultiDiscrete([2, 3])), [[-math.inf, 0.5, 1.0, -0.5, -math.inf]]),
        (MultiCategorical(MultiDiscrete([2, 2])), [[-math.inf, 0.5, 1.0, -0.5]]),
        (Bernoulli(MultiBinary(3)), [[-math.inf, 0.5, math.inf]]),
    ],
)
def test_infinite_logits_equal_large_finite_logits(
    family: Distribution, params: list[list[float]]
) -> None:
    """Infinite logits give the values and gradients of large finite logits."""
    actions = family.mode(torch.tensor(params))

    def results(params: torch.Tensor) -> list[torch.Tensor]:
        p, q = params.clone().requires_grad_(), (0.5 * params).requires_grad_()
        values = [*family.log_prob_and_entropy(p, actions), family.entropy(q), family.kl(p, q)]
        torch.stack(values).sum().backward()
        return [*(v.detach() for v in values), p.grad, q.grad]

    infinite = torch.tensor(params)
    expected = results(infinite.clamp(-1e4, 1e4))
    assert all(value.isfinite().all() for value in expected)
    torch.testing.assert_close(results(infinite), expected)


def test_kl_from_impossible_actions_is_infinite() -> None:
    """KL(p || q) is infinite if p has an action that q never has; the reverse is finite."""
    family = Categorical(Discrete(3))
    p, q = torch.zeros(3), torch.tensor([0.0, 0.0, -math.inf])
    assert family.kl(p, q) == math.inf
    assert float(family.kl(q, p)) == pytest.approx(math.log(3 / 2))


@sweep("dtype", [torch.float32, torch.float64])
def test_large_logits_of_bits(dtype: torch.dtype) -> None:
    """For logits of 1000, values and gradients are finite and exact, and the bits are certain."""
    family = Bernoulli(MultiBinary(4))
    logits = torch.tensor([-1000.0, 1000.0, -50.0, 50.0], dtype=dtype, requires_grad=True)
    unlikely = torch.tensor([1, 0, 0, 1], dtype=torch.int8)
    log_prob, entropy = family.log_prob_and_entropy(logits, unlikely)
    assert log_prob.item() == -2000.0
    assert entropy.item() == pytest.approx(2 * 51 * math.exp(-50), rel=1e-5, abs=0.0)
    kl = family.kl(logits, -logits)
    assert kl.item() == pytest.approx(2100.0)
    (log_prob + entropy + kl).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    noise = family.draw_noise((10_000,), torch.Generator().manual_seed(0))
    assert noise.isfinite().all()
    bits = family.sample(logits.detach().to(torch.float32).expand(10_000, 4), noise)
    assert (bits == torch.tensor([0, 1, 0, 1])).all()
