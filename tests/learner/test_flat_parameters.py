from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from maze_train.learner.flat_parameters import (
    FlatParameters,
    get_flat_parameters,
    set_flat_parameters,
)


def make_net(seed=0):
    """Return a small network with parameters of several shapes, including a scalar."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    net.register_parameter("scale", nn.Parameter(torch.tensor(0.7)))
    return net


def loss_of(net, step):
    """Return a loss that depends on the step."""
    x = torch.linspace(-1, 1, 12).view(4, 3) + 0.1 * step
    return (net.scale * net(x) - step).square().mean()


def weights(net):
    """Return a copy of all weights as one vector."""
    return get_flat_parameters(net)


def test_parameters_become_views_of_one_vector():
    """Values, names and identities of parameters are kept; memory is shared."""
    net = make_net()
    before, names = weights(net), [name for name, _ in net.named_parameters()]
    objects = list(net.parameters())
    flat = FlatParameters(objects)
    assert torch.equal(weights(net), before)
    assert [name for name, _ in net.named_parameters()] == names
    assert all(a is b for a, b in zip(net.parameters(), objects, strict=True))
    assert torch.equal(flat.vector.detach(), before)
    with torch.no_grad():
        flat.vector.add_(1.0)
        assert torch.equal(weights(net), before + 1.0)
        net[0].bias.zero_()
    assert int((flat.vector == 0).sum()) == 5
    assert all(p.is_leaf and p.requires_grad for p in net.parameters())


@pytest.mark.parametrize("part", ["whole", "layer"])
def test_zero_grad_restores_gradients_set_to_none(part):
    """The next `zero_grad` restores gradients that `module.zero_grad()` has set to None."""
    net = make_net()
    flat = FlatParameters(list(net.parameters()))
    dropped = net if part == "whole" else net[0]
    dropped.zero_grad()
    assert all(param.grad is None for param in dropped.parameters())
    flat.zero_grad()
    loss_of(net, 1).backward()
    assert torch.equal(flat.grad, torch.cat([p.grad.flatten() for p in net.parameters()]))
    assert flat.grad.any()


def test_flat_parameters_of_mixed_dtypes_raise():
    """All parameters must have the same dtype."""
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    with pytest.raises(ValueError, match="one dtype and one device"):
        FlatParameters(params)


def test_copies_and_files_of_flat_modules_are_ordinary():
    """Copies of a flattened module are independent; files contain the weights once."""
    net = make_net()
    FlatParameters(list(net.parameters()))
    twin = copy.deepcopy(net)
    before = weights(net)
    with torch.no_grad():
        for param in twin.parameters():
            param.add_(1.0)
    assert torch.equal(weights(net), before)
    assert torch.equal(weights(twin), before + 1.0)
    buffer = io.BytesIO()
    torch.save(net.state_dict(), buffer)
    buffer.seek(0)
    other = make_net(1)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(weights(other), before)
    flat = FlatParameters(list(other.parameters()))
    other.load_state_dict(twin.state_dict())
    assert torch.equal(flat.vector.detach(), before + 1.0), "loading writes into the vector"


def test_get_and_set_are_inverse():
    """A flat copy of the parameters can be written to another module."""
    a, b = make_net(0), make_net(1)
    vector = get_flat_parameters(a)
    set_flat_parameters(b, vector)
    assert torch.equal(get_flat_parameters(b), vector)
    vector.zero_()
    assert get_flat_parameters(a).any()
    assert get_flat_parameters(b).any()
    with pytest.raises(ValueError, match=r"shape \[3\], expected \[33\]"):
        set_flat_parameters(a, torch.zeros(3))
