from __future__ import annotations

import pytest
import torch
from practice_learner import LineLearner, make_data
from torch import nn

from maze_train import ConfigError, Freeze, Progress
from maze_train.learner.modules import matches

TURNS = [
    Freeze(params=["trunk"], period=4, stop=2),
    Freeze(params=["head.bias"], period=4, start=2),
]


def make_net(seed=0):
    """Return a network of three submodules for LineLearner."""
    torch.manual_seed(seed)
    net = nn.Sequential()
    net.add_module("trunk", nn.Linear(2, 4))
    net.add_module("act", nn.Tanh())
    net.add_module("head", nn.Linear(4, 1))
    return net


def reference(updates, target, settings, lr, factors, freeze, bound=0.0):
    """Return the network trained by PyTorch with a group per parameter.

    Frozen parameters have no gradient.
    """
    net = make_net()
    named = dict(net.named_parameters())
    groups = [{"params": [param], "lr": lr * factors.get(n, 1.0)} for n, param in named.items()]
    optimizer = getattr(torch.optim, target)(groups, **settings)
    for k in range(updates):
        data = make_data(k)
        optimizer.zero_grad()
        (net(data[:, :2]).squeeze(-1) - data[:, 2]).square().mean().backward()
        for n, param in named.items():
            if any(rule.holds(k) and n.startswith(rule.params[0]) for rule in freeze):
                param.grad = None
        if bound:
            nn.utils.clip_grad_norm_(net.parameters(), bound)
        optimizer.step()
    return net


def train(learner, first, last):
    """Update on the whole batch; the number of the update determines the frozen parameters."""
    for k in range(first, last):
        learner.update(make_data(k), Progress(updates=k))


@pytest.mark.parametrize(
    ("target", "settings"),
    [
        ("Adam", {"eps": 1e-5}),
        ("AdamW", {"eps": 1e-5, "weight_decay": 0.1}),
        ("SGD", {"momentum": 0.9}),
        ("Rprop", {}),  # an optimizer without a flat vector
    ],
)
@pytest.mark.parametrize("bound", [0.0, 0.3])
def test_lr_factors_and_freezing_match_torch(target, settings, bound):
    """As in PyTorch without a gradient, frozen parameters and their moments do not change."""
    node = {"_target_": f"torch.optim.{target}", **settings}
    learner = LineLearner(
        make_net(),
        batch_size=10,
        optimizer=node,
        max_grad_norm=bound,
        lr_factors={"trunk": 0.1, "*.bias": 2.0},
        freeze=TURNS,
    )
    train(learner, 0, 8)
    factors = {"trunk.weight": 0.1, "trunk.bias": 0.1, "head.bias": 2.0}
    slow = reference(8, target, settings, 0.1, factors, TURNS, bound)
    for ours, theirs in zip(learner.module.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["Adam", "Rprop"])
@pytest.mark.parametrize("frozen", [["trunk"], ["trunk", "head"]], ids=str)
def test_frozen_parameters_are_bit_for_bit_unchanged(frozen, name):
    """Other parameters change, and all parameters change after the window."""
    learner = LineLearner(
        make_net(),
        optimizer={"_target_": f"torch.optim.{name}"},
        freeze=[Freeze(params=frozen, start=1, stop=3)],
    )
    before = None
    for k, moves in enumerate([True, False, False, True]):
        before = {n: p.detach().clone() for n, p in learner.module.named_parameters()}
        train(learner, k, k + 1)
        for n, param in learner.module.named_parameters():
            is_frozen = not moves and n.split(".")[0] in frozen
            assert torch.equal(param, before[n]) is is_frozen


def test_a_group_that_is_frozen_counts_in_no_norm():
    """`train/grad_norm` and its bound only cover the applied gradient."""
    learner = LineLearner(make_net(), batch_size=10, freeze=[Freeze(params=["trunk"])])
    net, data = make_net(), make_data()
    (net(data[:, :2]).squeeze(-1) - data[:, 2]).square().mean().backward()
    norm = torch.cat([p.grad.flatten() for p in net.head.parameters()]).norm()
    row = learner.update(data, Progress()).reduce()
    assert row["train/grad_norm"] == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "frozen"),
    [
        ({}, range(12)),
        ({"start": 3}, range(3, 12)),
        ({"start": 2, "stop": 5}, range(2, 5)),
        ({"period": 4, "start": 1, "stop": 3}, [1, 2, 5, 6, 9, 10]),
        ({"period": 4, "stop": 2}, [0, 1, 4, 5, 8, 9]),
        ({"period": 4, "start": 2}, [2, 3, 6, 7, 10, 11]),
    ],
    ids=str,
)
def test_windows_of_freezing(settings, frozen):
    """A window is unlimited, single, or repeated in every period."""
    rule = Freeze(params=["x"], **settings)
    assert [k for k in range(12) if rule.holds(k)] == list(frozen)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"params": []}, r"params = \[\]: expected names of parameters"),
        ({"params": ["x"], "start": -1}, r"start = -1: expected a number >= 0"),
        ({"params": ["x"], "start": 2, "stop": 2}, r"stop = 2: expected a number >= 3"),
        ({"params": ["x"], "period": 3, "stop": 4}, r"period = 3: expected at least 4, or 0"),
        ({"params": ["x"], "period": 3, "start": 3}, r"period = 3: expected at least 4, or 0"),
    ],
)
def test_windows_that_can_not_be(settings, message):
    """The error contains the setting."""
    with pytest.raises(ConfigError, match=message):
        Freeze(**settings)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("trunk", "trunk.0.weight", True),
        ("trunk", "trunk", True),
        ("trunk", "trunk2.weight", False),
        ("*.bias", "trunk.0.bias", True),
        ("*.bias", "trunk.0.weight", False),
        ("policy.net", "policy.net.0.weight", True),
        ("net", "policy.net.0.weight", False),
    ],
)
def test_names_mean_parameters_parts_and_patterns(pattern, name, expected):
    """A name matches a whole parameter name or a prefix up to a dot."""
    assert matches(pattern, name) is expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_factors": {"trnk": 2.0}}, r"algorithm.lr_factors = 'trnk': no parameter .* trunk"),
        (
            {"freeze": [Freeze(params=["head"]), Freeze(params=["zzz"])]},
            r"algorithm.freeze\[1\].params = 'zzz': no parameter has this name; similar.*: trunk",
        ),
    ],
)
def test_names_of_nothing_are_refused(settings, message):
    """Unknown names raise an error with similar names."""
    with pytest.raises(ConfigError, match=message):
        LineLearner(make_net(), **settings)


def test_negative_factors_are_refused():
    """Negative factors raise ConfigError."""
    with pytest.raises(ConfigError, match=r"lr_factors.trunk = -1.0: expected a number >= 0"):
        LineLearner(make_net(), lr_factors={"trunk": -1.0})
