"""Bernoulli against enumeration, and its safety for large logits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from gymnasium.spaces import Discrete, MultiBinary
from torch import distributions as td

from maze_train.distributions.bernoulli import Bernoulli
from maze_train.errors import SpaceError


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal float64 numbers of a fixed seed."""
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_equals_torch_distributions() -> None:
    """For an n-d space the functions are sums of those of torch's own class."""
    family = Bernoulli(MultiBinary((2, 3)))
    p, q = randn(5, 6), randn(5, 6, seed=1)
    actions = torch.randint(2, (5, 2, 3), generator=torch.Generator().manual_seed(2))
    reference, other = td.Bernoulli(logits=p), td.Bernoulli(logits=q)
    expected = reference.log_prob(actions.reshape(5, 6).double()).sum(-1)
    torch.testing.assert_close(family.log_prob(p, actions.to(torch.int8)), expected)
    torch.testing.assert_close(family.entropy(p), reference.entropy().sum(-1))
    torch.testing.assert_close(family.kl(p, q), td.kl_divergence(reference, other).sum(-1))


def test_probabilities_sum_to_one() -> None:
    """The probabilities of all bit patterns add up to 1, and each is the product of its bits'."""
    family, logits = Bernoulli(MultiBinary(4)), randn(4)
    patterns = torch.tensor(list(itertools.product((0, 1), repeat=4)), dtype=torch.int8)
    probs = family.log_prob(logits.expand(16, 4), patterns).exp()
    assert probs.sum().item() == pytest.approx(1.0, abs=1e-12)
    ones = [1 / (1 + math.exp(-logit)) for logit in logits.tolist()]
    slow = [
        math.prod(one if bit else 1 - one for bit, one in zip(bits, ones, strict=True))
        for bits in patterns.tolist()
    ]
    assert probs.tolist() == pytest.approx(slow, rel=1e-9)


def test_sampling_frequencies_are_the_probabilities() -> None:
    """Frequencies of 60,000 samples lie within four standard errors, bits do not correlate."""
    family, count = Bernoulli(MultiBinary(3)), 60_000
    logits = torch.tensor([-2.0, 0.0, 1.5])
    noise = family.draw_noise((count,), torch.Generator().manual_seed(3))
    bits = family.sample(logits.expand(count, 3), noise).double()
    probs = torch.sigmoid(logits.double())
    error = (probs * (1 - probs) / count).sqrt()
    assert ((bits.mean(0) - probs).abs() < 4 * error).all()
    assert (torch.corrcoef(bits.T) - torch.eye(3)).abs().max() < 4 / count**0.5


def test_bits_are_stored_in_one_byte() -> None:
    """Actions are bytes of 0 and 1, and those of the environment have its own type."""
    family = Bernoulli(MultiBinary(5))
    actions = family.sample(torch.zeros(50, 5), family.draw_noise((50,)))
    assert actions.dtype == family.action_dtype == torch.int8
    assert set(actions.unique().tolist()) == {0, 1}
    assert family.to_env(actions).dtype == torch.int8
    assert family.mode(torch.tensor([-1.0, 1.0, 0.0, 5.0, -0.1])).tolist() == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_logits(dtype: torch.dtype) -> None:
    """At logits of 1000 values and gradients are finite, exact, and the bits are certain."""
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


def test_wrong_space_is_named() -> None:
    """A family refuses a space of another type."""
    with pytest.raises(SpaceError, match=r"Bernoulli needs a MultiBinary space.*Discrete\(3\)"):
        Bernoulli(Discrete(3))  # type: ignore[arg-type]
