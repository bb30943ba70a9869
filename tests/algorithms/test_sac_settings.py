"""Effects of SAC settings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gymnasium import spaces

import maze_train.algorithms.off_policy.learner as off_policy_learner
from maze_train.algorithms.sac.config import SACAlgorithmConfig
from maze_train.algorithms.sac.learner import SACLearner
from maze_train.algorithms.sac.model import build_soft_actor_critic
from maze_train.data.replay import Transitions
from maze_train.learner.config import Progress
from maze_train.nets.config import ModelConfig

BOX = spaces.Box(-1.0, 1.0, (2,))
N = 8


def make_learner(**settings):
    """Return a learner with small networks."""
    model = build_soft_actor_critic(ModelConfig(hidden_sizes=[4]), BOX, BOX, 0)
    return SACLearner(model, SACAlgorithmConfig(**settings))


def batch(reward=1.0):
    """Return identical transitions."""
    zeros = torch.zeros(N, 2)
    ones = torch.ones(N)
    return Transitions(zeros, zeros, reward * ones, ones, zeros, torch.arange(N))


def test_weight_decay_excludes_temperatures():
    """Weight decay would pull the temperature to 1, so it only applies to networks."""
    decaying = {"_target_": "torch.optim.SGD", "weight_decay": 0.5}
    learner = make_learner(lr=1e-3, entropy_coef=0.1, optimizer=decaying)
    decays = {
        name: optimizer.optimizer.param_groups[0]["weight_decay"]
        for (_, name), optimizer in learner.optimizers.items()
    }
    assert decays == {"policy": 0.5, "critics": 0.5, "temperature": 0.0}


def trained_model():
    """Return a model whose temperature differs from the settings."""
    model = build_soft_actor_critic(ModelConfig(hidden_sizes=[4]), BOX, BOX, 1)
    SACLearner(model, SACAlgorithmConfig(entropy_coef=0.3))
    return model


def copied(learner):
    """Add a module from a state dict."""
    learner.add_module("other", trained_model().state_dict())


def frozen_then_trained(learner):
    """Add a trained module as frozen, then unfreeze it."""
    model = build_soft_actor_critic(ModelConfig(hidden_sizes=[4]), BOX, BOX, 1)
    model.load_state_dict(trained_model().state_dict())
    learner.add_module("other", model, frozen=True)
    learner.freeze_module("other", False)


def given(learner):
    """Add a trained module."""
    learner.add_module("other", trained_model())


def new(learner):
    """Add an untrained module."""
    learner.add_module("other", build_soft_actor_critic(ModelConfig(), BOX, BOX, 1))


@pytest.mark.parametrize(
    ("add", "expected"), [(copied, 0.3), (frozen_then_trained, 0.3), (given, 0.3), (new, 0.1)]
)
@pytest.mark.parametrize("entropy_tuning", [True, False])
def test_new_module_starts_with_configured_temperature(add, expected, entropy_tuning):
    """A new module starts with the configured temperature; without tuning every module has it."""
    learner = make_learner(entropy_coef=0.1, entropy_tuning=entropy_tuning)
    add(learner)
    temperatures = learner.model("other").log_temperatures.exp()
    assert temperatures.item() == pytest.approx(expected if entropy_tuning else 0.1)


def test_td_errors_are_mean_absolute_errors_over_critics(monkeypatch):
    """TD errors are mean absolute errors over critics, so opposite signs do not cancel."""
    learner = make_learner()
    errors = torch.tensor([[1.0, -2.0], [-1.0, 3.0]])
    monkeypatch.setattr(
        off_policy_learner,
        "critic_loss",
        lambda q, *args: (0.0 * q.sum(), errors),
    )
    result = learner.update(replace(batch(), weights=torch.ones(N)), Progress())
    assert result.kept["td_errors"]["default"].tolist() == [1.0, 2.5]
