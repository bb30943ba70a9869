"""Gradient norms and clipping."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from maze_train.learner.optimizers import clip_gradients, compute_gradient_norm

SHAPES = [(3, 4), (5,), ()]


def gradients(scale=1.0, seed=0):
    """Return random gradients of several shapes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES
    ]


def as_params(grads):
    """Return parameters with the given gradients."""
    params = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    return params


def total_norm(grads):
    """Return the global norm, computed from its definition."""
    return math.sqrt(sum(float(x) ** 2 for g in grads for x in g.flatten()))


@pytest.mark.parametrize("bound", [0.1, 1.0, 100.0])
@pytest.mark.parametrize("by", ["global_norm", "norm", "value"])
def test_gradient_clipping_matches_torch(by, bound):
    """Each mode matches torch.nn.utils; the norm before clipping is returned."""
    ours = gradients()
    params = as_params(ours)
    if by == "global_norm":
        nn.utils.clip_grad_norm_(params, bound)
    elif by == "value":
        nn.utils.clip_grad_value_(params, bound)
    else:
        for param in params:
            nn.utils.clip_grad_norm_([param], bound)
    expected_norm = total_norm(ours)
    norm = clip_gradients(ours, bound, by)
    assert float(norm) == pytest.approx(expected_norm, rel=1e-12)
    for grad, param in zip(ours, params, strict=True):
        torch.testing.assert_close(grad, param.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("by", ["global_norm", "norm", "value"])
def test_small_or_zero_gradients_are_not_clipped(by):
    """Gradients below the bound are bit-for-bit unchanged; a zero norm causes no division by 0."""
    zeros = [torch.zeros(3), torch.zeros(2, 2)]
    for bound, before in ((1e9, gradients()), (0.0, gradients()), (0.5, zeros)):
        grads = [grad.clone() for grad in before]
        clip_gradients(grads, bound, by)
        torch.testing.assert_close(grads, before, rtol=0.0, atol=0.0)
    assert float(clip_gradients(zeros, 0.5, by)) == float(clip_gradients([], 0.5, by)) == 0.0


def parameter(*gradient):
    """Return a parameter with the given gradient, or without a gradient."""
    param = nn.Parameter(torch.zeros(max(1, len(gradient))))
    if gradient:
        param.grad = torch.tensor(gradient)
    return param


def test_gradient_norm_ignores_missing_gradients():
    """The norm of 3, 4 and 12 is 13; without gradients it is 0."""
    params = [parameter(), parameter(3.0, -4.0), parameter(), parameter(12.0)]
    assert compute_gradient_norm(iter(params)) == 13.0
    for nothing in ([], [parameter()], [parameter(0.0)]):
        norm = compute_gradient_norm(nothing)
        assert (type(norm), norm) == (float, 0.0)


def test_gradient_clipping_reads_one_value(monkeypatch):
    """A single value is read from the device, regardless of the number of parameters."""
    reads = []
    read = torch.Tensor.__float__
    monkeypatch.setattr(torch.Tensor, "__float__", lambda x: reads.append(1) or read(x))
    monkeypatch.setattr(torch.Tensor, "item", lambda x: pytest.fail("a second read"))
    assert compute_gradient_norm([parameter(1.0)] * 100) == pytest.approx(10.0)
    assert reads == [1]
