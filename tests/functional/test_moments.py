"""Merged moments of batches equal the moments of all data."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
import torch
from cases import sweep
from hypothesis import given, settings
from hypothesis import strategies as st

from maze_train.core.errors import ShapeError
from maze_train.functional.moments import Moments, batch_moments, merge_moments


def merged(data, cuts):
    """Return the merged moments of the pieces between cuts, starting with no data."""
    pieces = np.split(data, sorted(cuts))
    empty = batch_moments(torch.zeros(0, *data.shape[1:]))
    return reduce(
        merge_moments, (batch_moments(torch.from_numpy(piece)) for piece in pieces), empty
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    size=st.integers(1, 60),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    offset=st.sampled_from([0.0, -3.0, 1e6, -1e6]),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_merged_moments_equal_moments_of_all_data(seed, size, cuts, offset, scale):
    """Empty pieces, single samples and large offsets are supported."""
    data = offset + scale * np.random.default_rng(seed).normal(size=(size, 2, 3))
    for pieces in ([min(cut, size) for cut in cuts], range(1, size)):
        moments = merged(data, pieces)
        assert float(moments.count) == size
        np.testing.assert_allclose(moments.mean, data.mean(0), rtol=1e-13, atol=1e-12)
        # The rounding of a large mean affects the std.
        rounding = 2e-15 * np.abs(data).max()
        np.testing.assert_allclose(moments.var.sqrt(), data.std(0), rtol=1e-12, atol=rounding)
        assert moments.mean.dtype == moments.var.dtype == torch.float64


def test_equal_samples_have_no_variance():
    """The variance is exactly 0, even if the sum of the samples is rounded."""
    data = np.full((1000, 1), 0.1)
    for cuts in ([], [1], [300, 301, 700]):
        moments = merged(data, cuts)
        assert float(moments.var) == 0.0
        assert float(moments.mean) == 0.1


def test_merging_an_empty_set_changes_no_moments():
    """Merging an empty set on either side gives bit-for-bit identical moments."""
    some = batch_moments(torch.tensor([[0.1, 1e6], [0.2, -3.0]]))
    none = batch_moments(torch.zeros(0, 2))
    for both in (merge_moments(some, none), merge_moments(none, some)):
        assert torch.equal(both.count, some.count)
        assert torch.equal(both.mean, some.mean)
        assert torch.equal(both.var, some.var)
    nothing = merge_moments(none, none)
    assert nothing.mean.tolist() == nothing.var.tolist() == [0.0, 0.0]


@sweep("dtype", [torch.uint8, torch.int64, torch.float32, torch.bool])
def test_moments_accept_any_dtype(dtype):
    """Integers and booleans are supported, and moments have no gradient."""
    batch = torch.tensor([[0, 1], [1, 1]]).to(dtype)
    moments = batch_moments(batch)
    assert moments.mean.tolist() == [0.5, 1.0]
    assert moments.var.tolist() == [0.25, 0.0]
    assert not batch_moments(torch.ones(2, requires_grad=True)).mean.requires_grad


def test_wrong_shapes():
    """Moments of different shapes do not broadcast."""
    with pytest.raises(ShapeError, match=r"expected samples \[N, ...\]"):
        batch_moments(torch.tensor(1.0))
    one, other = (batch_moments(torch.zeros(4, n)) for n in (1, 3))
    with pytest.raises(ShapeError, match=r"b has shape \[3\], expected \[1\] like a"):
        merge_moments(one, other)
    assert isinstance(one, Moments)
