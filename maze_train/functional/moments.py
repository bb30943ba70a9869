"""Mean and variance of data that comes in batches, without keeping it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from maze_train.core.errors import ShapeError
from maze_train.core.types import Tensor


@dataclass(frozen=True)
class Moments:
    """Number, mean and variance of some samples, in float64."""

    count: Tensor
    """Number of samples, >= 0, 0-d."""

    mean: Tensor
    """Mean, entry by entry; 0 of no samples."""

    var: Tensor
    """Variance with divisor `count`, >= 0, in the shape of the mean; 0 of no samples."""


def batch_moments(batch: Tensor) -> Moments:
    """Moments of one batch.

    mean = sum(x) / N,  var = sum((x - mean)^2) / N

    Args:
        batch: Samples of any real dtype, `[N, ...]`, N >= 0.

    Returns:
        Moments of the shape of one sample. Values that are not finite make their entries NaN or
        infinite.

    Raises:
        ShapeError: If there is no first dimension.
    """
    if batch.dim() == 0:
        raise ShapeError("batch has shape [], expected samples [N, ...]")
    x = batch.detach().to(torch.float64)
    count = torch.tensor(float(len(x)), dtype=torch.float64, device=x.device)
    if len(x) == 0:
        zeros = x.new_zeros(x.shape[1:])
        return Moments(count, zeros, zeros.clone())
    # The mean is known before squares are summed: they are small, whatever the mean is.
    var, mean = torch.var_mean(x, dim=0, correction=0)
    return Moments(count, mean, var)


def merge_moments(a: Moments, b: Moments) -> Moments:
    """Moments of two disjoint sets of samples taken together.

    With w = n_b / (n_a + n_b) and d = mean_b - mean_a,

    mean = mean_a + w d,  var = (1 - w) var_a + w var_b + w (1 - w) d^2

    Args:
        a: Moments of the first set, possibly empty.
        b: Moments of the second set, possibly empty, of the same shape.

    Returns:
        New tensors.

    Raises:
        ShapeError: If the shapes differ.

    Source: Chan, Golub and LeVeque (1983), The American Statistician 37(3), the formula that joins
    two sums of squares, divided by counts.
    """
    if a.mean.shape != b.mean.shape:
        raise ShapeError(f"b has shape {list(b.mean.shape)}, expected {list(a.mean.shape)} like a")
    count = a.count + b.count
    weight = b.count / count.clamp(min=1.0)
    shift = b.mean - a.mean
    mean = a.mean + weight * shift
    var = (1.0 - weight) * a.var + weight * b.var + weight * (1.0 - weight) * shift.square()
    return Moments(count, mean, var)
