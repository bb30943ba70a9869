"""Interquartile means and bootstrap intervals match slow references from the paper."""

from __future__ import annotations

import numpy as np
import pytest

from maze_train.tools.runs import bootstrap_interval, interquartile_mean


def slow_iqm(values: list[float]) -> float:
    """Return the mean without the lowest and highest quarter (arXiv:2108.13264, section 4.3)."""
    cut = int(0.25 * len(values))
    middle = sorted(values)[cut : len(values) - cut]
    return sum(middle) / len(middle)


@pytest.mark.parametrize("n", range(1, 14))
def test_interquartile_mean_matches_the_reference(n: int) -> None:
    """Matches the reference for any number of runs and any axis; the mean of up to three runs."""
    values = np.random.default_rng(n).normal(size=(n, 3))
    expected = [slow_iqm(column) for column in values.T.tolist()]
    assert np.allclose(interquartile_mean(values, axis=0), expected, rtol=1e-12)
    assert np.allclose(interquartile_mean(values.T), expected, rtol=1e-12)


def test_bootstrap_interval_equals_a_loop() -> None:
    """Each resample draws as many runs per task as the task has; the bounds are percentiles."""
    rng = np.random.default_rng(5)
    strata = [rng.normal(size=4), rng.normal(3.0, size=7)]
    low, high = bootstrap_interval(strata, n_resamples=300, seed=2)
    rng = np.random.default_rng(2)
    draws = [rng.integers(len(stratum), size=(300, len(stratum))) for stratum in strata]
    means = []
    for i in range(300):
        drawn = [s[j] for s, rows in zip(strata, draws, strict=True) for j in rows[i]]
        means.append(slow_iqm(drawn))
    assert np.allclose([low, high], np.quantile(means, [0.025, 0.975]), rtol=1e-12)


def test_bootstrap_keeps_the_weight_of_tasks() -> None:
    """Identical runs of each task give an interval of width 0, even if the tasks differ."""
    low, high = bootstrap_interval([np.zeros(4), np.ones(12)])
    assert low == high == 1.0


def test_curves_have_an_interval_per_point() -> None:
    """Trailing axes are kept, also if resampling is split into chunks."""
    values = np.random.default_rng(0).normal(size=(5, 3000))
    low, high = bootstrap_interval([values], n_resamples=400)
    assert low.shape == high.shape == (3000,)
    assert (low < interquartile_mean(values, axis=0)).all()
    assert (interquartile_mean(values, axis=0) < high).all()


def test_single_run_has_no_interval() -> None:
    """The interval of a single run is NaN."""
    assert np.isnan(bootstrap_interval([np.ones(1)])).all()
    low, high = bootstrap_interval([np.ones(1), np.arange(2.0)])  # together with a task of two runs
    assert low < high
