"""Evolution strategies written from the paper, entry by entry on Python lists.

Ranks are counted by comparing every entry with every other one; the package sorts.
"""

from __future__ import annotations

import math


def slow_ranks(returns: list[float]) -> list[float]:
    """Share of the others that an entry beats, where an equal one is beaten by half; minus 1/2."""
    utilities = []
    for i, own in enumerate(returns):
        rank = 0.0
        for j, other in enumerate(returns):
            if i != j:
                rank += 1.0 if other < own else 0.5 if other == own else 0.0
        utilities.append(rank / (len(returns) - 1) - 0.5 if len(returns) > 1 else 0.0)
    return utilities


def slow_normalized(returns: list[float]) -> list[float]:
    """Deviations from the mean in units of the standard deviation."""
    m = len(returns)
    mean = math.fsum(returns) / m
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in returns) / m)
    return [(r - mean) / std for r in returns]


def slow_gradient(utilities: list[list[float]], noise: list[list[float]]) -> list[float]:
    """Average of u * eps over all 2 n policies, the second of a pair with the noise -eps."""
    policies = []
    for (plus, minus), eps in zip(utilities, noise, strict=True):
        policies += [(plus, eps), (minus, [-e for e in eps])]
    return [
        math.fsum(u * eps[i] for u, eps in policies) / len(policies) for i in range(len(noise[0]))
    ]
