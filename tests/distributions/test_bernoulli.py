"""Bernoulli against enumeration, and its safety for large logits."""

from __future__ import annotations

import math

import pytest
import torch
from gymnasium.spaces import MultiBinary

from maze_train.distributions.bernoulli import Bernoulli


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
