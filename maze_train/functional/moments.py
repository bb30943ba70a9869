"""Mean and variance of data that arrives in batches, computed without storing the data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from maze_train.core.errors import ShapeError
from maze_train.core.types import Tensor, precise_dtype


@dataclass(frozen=True)
class Moments:
    """Count, mean and variance of a set of samples, in float64 (float32 on MPS)."""

    count: Tensor
    """Number of samples, >= 0, 0-d."""

    mean: Tensor
    """Elementwise mean; 0 if there are no samples."""

    var: Tensor
    """Elementwise variance with divisor `count`, >= 0, same shape as the mean; 0 if there are no
    samples."""


def batch_moments(batch: Tensor) -> Moments:
    """Compute the moments of one batch.

    mean = sum(x) / N,  var = sum((x - mean)^2) / N

    Args:
        batch: Samples of any real dtype, `[N, ...]`, N >= 0.

    Returns:
        Moments with the shape of one sample. Elements with a non-finite value become NaN or
        infinite.

    Raises:
        ShapeError: If the batch is 0-d.
    """
    if batch.dim() == 0:
        raise ShapeError("batch has shape [], expected samples [N, ...]")
    x = batch.detach().to(precise_dtype(batch.device))
    count = x.new_tensor(float(len(x)))
    if len(x) == 0:
        zeros = x.new_zeros(x.shape[1:])
        return Moments(count, zeros, zeros.clone())
    # Two passes: subtracting the mean before squaring keeps precision for a large mean.
    var, mean = torch.var_mean(x, dim=0, correction=0)
    return Moments(count, mean, var)


def merge_moments(a: Moments, b: Moments) -> Moments:
    """Merge the moments of two disjoint sample sets.

    With w = n_b / (n_a + n_b) and d = mean_b - mean_a,

    mean = mean_a + w d,  var = (1 - w) var_a + w var_b + w (1 - w) d^2

    Args:
        a: Moments of the first set, possibly empty.
        b: Moments of the second set, possibly empty, of the same shape.

    Returns:
        New tensors.

    Raises:
        ShapeError: If the shapes differ.

    Source: Chan, Golub and LeVeque (1983), The American Statistician 37(3), pairwise update of the
    sums of squares, divided by the counts.
    """
    if a.mean.shape != b.mean.shape:
        raise ShapeError(f"b has shape {list(b.mean.shape)}, expected {list(a.mean.shape)} like a")
    count = a.count + b.count
    weight = b.count / count.clamp(min=1.0)
    shift = b.mean - a.mean
    mean = a.mean + weight * shift
    var = (1.0 - weight) * a.var + weight * b.var + weight * (1.0 - weight) * shift.square()
    return Moments(count, mean, var)
