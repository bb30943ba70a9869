"""PyTorch optimizers and schedulers in a learner: steps, rates, errors."""

from __future__ import annotations

import math

import pytest
import torch
from practice_learner import LineLearner, make_data, make_module

from maze_train import ConfigError, Freeze, Progress, Schedule

SCHEDULERS = [
    {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": 6},
    {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 0.2, "total_steps": 7},
    {"_target_": "torch.optim.lr_scheduler.MultiStepLR", "milestones": [2, 4]},
]


class OwnOptimizer(LineLearner):
    """Learner that registers a PyTorch optimizer object."""

    def __init__(self, *args, make=torch.optim.Adam, rate=None, own_params=None, **settings):
        self.make, self.rate, self.own_params = make, rate, own_params
        super().__init__(*args, batch_size=10, **settings)

    def configure_optimizers_for_module(self, module_id):
        params = list(self.modules[module_id].parameters())
        self.register_optimizer(
            module_id,
            optimizer=self.make(self.own_params or params, lr=0.1),
            params=params,
            lr_or_lr_schedule=self.rate,
        )


def reference(make, updates, scheduler=None, frozen=()):
    """Return weights and learning rates of updates in plain PyTorch."""
    net, rates = make_module(), []
    optimizer = make(net.parameters(), lr=0.1)
    if scheduler is not None:
        options = {key: value for key, value in scheduler.items() if key != "_target_"}
        name = scheduler["_target_"].rpartition(".")[2]
        scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **options)
    for k in range(updates):
        data = make_data(k)
        optimizer.zero_grad()
        (net(data[:, :2]).squeeze(-1) - data[:, 2]).square().mean().backward()
        if k in frozen:
            net.weight.grad = None
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return net, rates


def train(learner, first=0, last=6):
    """Run updates on the whole batch; return their learning rates."""
    rows = [learner.update(make_data(k), Progress(updates=k)).reduce() for k in range(first, last)]
    return [row["train/learning_rate"] for row in rows]


def assert_close(ours, theirs):
    """Assert that both modules have the same weights."""
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("node", SCHEDULERS, ids=lambda node: node["_target_"].rpartition(".")[2])
def test_torch_scheduler_is_called_after_each_update(node):
    """Rates and steps match PyTorch, and factors multiply the rate of their parameters."""
    learner = LineLearner(make_module(), batch_size=10, lr_scheduler=node)
    net, rates = reference(lambda params, lr: torch.optim.Adam(params, lr, eps=1e-5), 6, node)
    assert train(learner) == pytest.approx(rates, rel=1e-12)
    assert len(set(rates)) > 2
    assert_close(learner.module, net)
    if "max_lr" not in node:  # OneCycleLR sets the rate of every group
        parts = LineLearner(make_module(), lr_scheduler=node, lr_factors={"bias": 0.5})
        train(parts, 0, 4)
        groups = parts.get_optimizer().optimizer.param_groups
        assert groups[1]["lr"] == pytest.approx(0.5 * groups[0]["lr"], rel=1e-12)


def test_torch_scheduler_counts_skipped_updates():
    """Updates with non-finite gradients are counted, including the first update."""
    learner = LineLearner(
        make_module(), batch_size=10, lr_scheduler=SCHEDULERS[2], on_non_finite="skip"
    )
    learner.most_empty_updates = 9
    for _ in range(2):
        learner.update(torch.full((10, 3), math.nan), Progress())
    assert train(learner, 0, 1) == [pytest.approx(0.01)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"lr": Schedule(start=0.1, end=0.0), "lr_scheduler": SCHEDULERS[0]},
            r"algorithm.lr_scheduler = .*CosineAnn.* already has a schedule: expected a number",
        ),
        ({"lr_scheduler": {"T_max": 3}}, r"lr_scheduler = .*: expected the key _target_"),
        (
            {"lr_scheduler": {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau"}},
            r"algorithm.lr_scheduler._target_ = .*Plateau': requires a metric",
        ),
        (
            {"lr_scheduler": {"_target_": "torch.optim.Adam"}},
            r"algorithm.lr_scheduler._target_ = .*: expected a subclass of .*LRScheduler",
        ),
        ({"lr": [0.1, 0.2]}, r"expected pairs .* such as \[\[0, 1e-3\], \[100_000, 1e-4\]\]"),
    ],
)
def test_invalid_torch_schedulers_raise(settings, message):
    """Invalid schedules and schedulers raise ConfigError."""
    with pytest.raises(ConfigError, match=message):
        LineLearner(make_module(), **settings)


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD, torch.optim.Rprop])
def test_torch_optimizer_keeps_its_learning_rate(make):
    """The optimizer keeps its learning rate, and frozen parameters keep their moments."""
    learner = OwnOptimizer(
        make_module(), make=make, freeze=[Freeze(params=["weight"], start=2, stop=4)]
    )
    net, rates = reference(make, 6, frozen=(2, 3))
    assert train(learner) == rates
    assert_close(learner.module, net)


@pytest.mark.parametrize("rate", [0.2, [[0, 0.2], [100, 0.1]]], ids=["number", "points"])
def test_registered_rate_replaces_rate_of_torch_optimizer(rate):
    """The registered rate replaces the rate of the optimizer."""
    assert train(OwnOptimizer(make_module(), rate=rate), 0, 2) == [0.2, 0.2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"own_params": [torch.nn.Parameter(torch.ones(1))]}, r"optimizer = 'Adam': expected an"),
        (
            {"lr_factors": {"bias": 2.0}},
            r"algorithm.lr_factors: has no effect on a PyTorch",
        ),
    ],
)
def test_torch_optimizers_of_other_parameters_raise(settings, message):
    """Parameters of other modules and rate factors raise ConfigError."""
    with pytest.raises(ConfigError, match=message):
        OwnOptimizer(make_module(), **settings)
