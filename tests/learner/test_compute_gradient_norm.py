"""The size of all gradients together."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from maze_train.learner.optimizers import compute_gradient_norm


def parameter(*gradient):
    """A parameter with a gradient; without one if there are no numbers."""
    param = nn.Parameter(torch.zeros(max(1, len(gradient))))
    if gradient:
        param.grad = torch.tensor(gradient)
    return param


def test_parameters_without_a_gradient_count_nothing():
    """3, 4 and 12 are the sides of a box whose diagonal is 13; no gradients have the norm 0."""
    params = [parameter(), parameter(3.0, -4.0), parameter(), parameter(12.0)]
    assert compute_gradient_norm(params) == 13.0
    for nothing in ([], [parameter()], [parameter(0.0)]):
        norm = compute_gradient_norm(nothing)
        assert (type(norm), norm) == (float, 0.0)


def test_equals_the_function_of_torch():
    """The number that clipping of torch returns, for a network; an iterator will do."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    net(torch.randn(4, 5)).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(net.parameters(), math.inf)
    assert compute_gradient_norm(net.parameters()) == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_show(bad):
    """They are not hidden."""
    norm = compute_gradient_norm([parameter(1.0), parameter(bad)])
    assert not math.isfinite(norm)


def test_the_host_waits_once(monkeypatch):
    """One number is read from the device, however many parameters there are."""
    reads = []
    read = torch.Tensor.__float__
    monkeypatch.setattr(torch.Tensor, "__float__", lambda x: reads.append(1) or read(x))
    monkeypatch.setattr(torch.Tensor, "item", lambda x: pytest.fail("a second read"))
    assert compute_gradient_norm([parameter(1.0)] * 100) == pytest.approx(10.0)
    assert reads == [1]
