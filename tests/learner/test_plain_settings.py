"""Learners whose settings are an object of a plain class."""

from __future__ import annotations

import pytest
import torch
from practice_learner import ADAM, LineLearner, LineSettings, make_data, make_module

from maze_train import ConfigError, Learner, Progress

SCHEDULER = {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 1, "gamma": 0.5}


class Plain:
    """Settings without a base."""

    optimizer = ADAM
    lr = 0.1
    max_grad_norm = 0.0
    on_non_finite = "raise"

    def __init__(self, **settings):
        vars(self).update(settings)


class PlainLearner(LineLearner):
    """Takes the object of its settings."""

    def __init__(self, modules, config, batch_size=10):
        self.calls, self.refused, self.stop_at = [], (), None
        self.batch_size = batch_size
        Learner.__init__(self, modules, config)


def trained(config, own):
    """Statistics of the last update, and weights, of two modules, one with its own settings."""
    learner = PlainLearner({"a": make_module(0)}, config)
    learner.add_module("b", make_module(0), overrides=own)
    for k in range(3):
        statistics = learner.update({key: make_data(k) for key in "ab"}, Progress(updates=k))
    return statistics.reduce(), learner.get_weights()


@pytest.mark.parametrize(
    ("settings", "own"),
    [
        ({"lr_scheduler": SCHEDULER}, {}),
        ({"freeze": ["weight"], "lr_factors": {"bias": 0.1}}, {}),
        ({"autocast": "bfloat16"}, {}),
        ({"overrides": {"a": {"lr": 0.3}}}, {"lr": 1e-4}),
        ({}, {"lr_scheduler": SCHEDULER, "max_grad_norm": 0.01}),
        ({"lr": [[0, 0.1], [10, 0.05]]}, {"optimizer": {"_target_": "torch.optim.SGD"}}),
    ],
)
def test_a_plain_class_of_settings_does_what_a_dataclass_does(settings, own):
    """For all modules and for one, to the bit; it makes a difference."""
    found, expected = trained(Plain(**settings), own), trained(LineSettings(**settings), own)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
    assert found != trained(Plain(), {})


@pytest.mark.parametrize(
    ("settings", "own", "message"),
    [
        ({"freeze": 3}, {}, r"freeze = 3: expected a list"),
        ({"lr": "fast"}, {}, r"lr = 'fast': expected a number"),
        ({}, {"lr": "fast"}, r"lr = 'fast': expected a number"),
        ({"lr": [[1, 0.1]]}, {}, r"lr = \[\[1, 0.1\]\]: expected pairs"),
        ({}, {"batch": 3}, r"overrides.b.batch = 3: cannot be set per module; these"),
        ({}, {"lr_scheduler": 3}, r"lr_scheduler = 3: expected a mapping"),
    ],
)
def test_a_wrong_value_of_a_plain_class_is_refused(settings, own, message):
    """By its name."""
    with pytest.raises(ConfigError, match=message):
        trained(Plain(**settings), own)
