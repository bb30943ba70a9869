"""Aggregates over few runs: the interquartile mean, and bootstrap intervals.

Source: Agarwal, Schwarzer, Castro, Courville, Bellemare (2021), Deep Reinforcement Learning at the
Edge of the Statistical Precipice, arXiv:2108.13264, sections 4.1 and 4.3.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[np.float64]"

CONFIDENCE = 0.95
_CHUNK = 1 << 22  # numbers that are resampled at once


def interquartile_mean(values: Any, axis: int = -1) -> Array:
    """Mean of the middle half: of n values, floor(n / 4) are left out at each end.

    Args:
        values: Numbers; less than 4 of them have the plain mean.
        axis: Axis over which the mean is taken.
    """
    ordered = np.sort(np.asarray(values, np.float64), axis=axis)
    n = ordered.shape[axis]
    middle = np.arange(n // 4, n - n // 4)
    mean: Array = np.take(ordered, middle, axis=axis).mean(axis=axis)
    return mean


def bootstrap_interval(
    strata: Sequence[Any], n_resamples: int = 10_000, seed: int = 0
) -> tuple[Array, Array]:
    """Percentile interval of 95 % of the interquartile mean over all values of all strata.

    A bootstrap sample draws from each stratum as many runs as it has, with replacement, so that
    every task keeps its weight.

    Args:
        strata: Runs of each task: `[n_i, ...]`, the same trailing axes in all of them.
        n_resamples: Bootstrap samples, >= 1.
        seed: Seed of the samples; equal data have equal intervals.

    Returns:
        Lower and upper ends, `[...]`; NaN where no stratum has two runs.
    """
    arrays = [np.asarray(stratum, np.float64) for stratum in strata]
    shape = arrays[0].shape[1:]
    if max(map(len, arrays)) < 2:
        return np.full(shape, math.nan), np.full(shape, math.nan)
    rng = np.random.default_rng(seed)
    chunk = max(1, _CHUNK // sum(array.size for array in arrays))
    means = []
    for start in range(0, n_resamples, chunk):
        count = min(chunk, n_resamples - start)
        drawn = [array[rng.integers(len(array), size=(count, len(array)))] for array in arrays]
        means.append(interquartile_mean(np.concatenate(drawn, axis=1), axis=1))
    outside = 50.0 * (1.0 - CONFIDENCE)
    low, high = np.percentile(np.concatenate(means), [outside, 100.0 - outside], axis=0)
    return low, high
