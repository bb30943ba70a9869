"""Slow losses, written from the papers: one sample at a time, cases in place of min and max."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from reference_returns import FloatArray


def slow_surrogate(log_ratios: FloatArray, advantages: FloatArray, clip_range: float) -> float:
    """Negative mean of the smaller of the plain and the clipped objective."""
    total = 0.0
    for log_ratio, advantage in zip(log_ratios.flat, advantages.flat, strict=True):
        ratio = math.exp(log_ratio)
        clipped = min(max(ratio, 1.0 - clip_range), 1.0 + clip_range)
        total += min(ratio * advantage, clipped * advantage)
    return -total / log_ratios.size


def slow_clipped_value_loss(
    values: FloatArray, old_values: FloatArray, targets: FloatArray, clip_range: float
) -> float:
    """Mean of the larger of the plain and the clipped squared error."""
    total = 0.0
    for value, old, target in zip(values.flat, old_values.flat, targets.flat, strict=True):
        clipped = old + min(max(value - old, -clip_range), clip_range)
        total += max((value - target) ** 2, (clipped - target) ** 2)
    return total / values.size


def slow_two_hot(scalar: float, low: int, high: int) -> FloatArray:
    """Two neighbouring integers share the weight in inverse proportion to their distance."""
    scalar = min(max(scalar, low), high)
    below = math.floor(scalar)
    result = np.zeros(high - low + 1)
    result[below - low] = 1.0 - (scalar - below)
    if below < high:
        result[below - low + 1] = scalar - below
    return result


def slow_two_hot_loss(logits: FloatArray, targets: FloatArray, low: int, high: int) -> float:
    """Mean cross-entropy of softmax(logits) under the two-hot target, row by row."""
    total = 0.0
    for row, target in zip(logits, targets, strict=True):
        normalizer = sum(math.exp(logit) for logit in row)
        for weight, logit in zip(slow_two_hot(target, low, high), row, strict=True):
            total -= weight * math.log(math.exp(logit) / normalizer)
    return total / len(logits)
