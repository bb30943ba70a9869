"""Settings of SAC: what they reach."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest
import torch
from gymnasium import spaces

import maze_train.algorithms.off_policy.learner as off_policy_learner
from maze_train import load_policy, train
from maze_train.algorithms.sac.config import SACAlgorithmConfig
from maze_train.algorithms.sac.learner import SACLearner
from maze_train.data.replay import Transitions, UniformReplayBuffer
from maze_train.learner.config import Progress
from maze_train.nets.config import ModelConfig
from maze_train.nets.critics import build_soft_actor_critic

BOX = spaces.Box(-1.0, 1.0, (2,))
N = 8


def make_learner(**settings):
    """A learner with small networks."""
    model = build_soft_actor_critic(ModelConfig(hidden_sizes=[4]), BOX, BOX, 0)
    return SACLearner(model, SACAlgorithmConfig(**settings))


def batch(reward=1.0):
    """Transitions that are all alike."""
    zeros = torch.zeros(N, 2)
    ones = torch.ones(N)
    return Transitions(zeros, zeros, reward * ones, ones, zeros, torch.arange(N))


def test_temperatures_do_not_decay():
    """Weight decay is for weights: a temperature of 1 would be the only one at rest."""
    decaying = {"_target_": "torch.optim.SGD", "weight_decay": 0.5}
    learner = make_learner(lr=1e-3, entropy_coef=0.1, optimizer=decaying)
    decays = {
        name: optimizer.optimizer.param_groups[0]["weight_decay"]
        for (_, name), optimizer in learner.optimizers.items()
    }
    assert decays == {"policy": 0.5, "critics": 0.5, "temperature": 0.0}


def test_the_learning_rate_of_the_policy_is_reported():
    """The other two have settings of their own."""
    learner = make_learner(lr=0.01, critic_lr=0.02, entropy_coef_lr=0.03)
    row = learner.update(batch(), Progress()).reduce()
    assert row["train/learning_rate"] == 0.01
    rates = [o.optimizer.param_groups[0]["lr"] for o in learner.optimizers.values()]
    assert rates == [0.01, 0.02, 0.03]


def test_a_saved_policy_has_as_many_critics_as_the_run(tmp_path):
    """They are among the weights that `load_policy` reads."""
    run_dir = tmp_path / "run"
    train(
        "Pendulum-v1",
        "sac",
        **{
            "algorithm.num_critics": 3,
            "algorithm.initial_buffer_size": 8,
            "algorithm.batch_size": 4,
            "algorithm.epoch_length": 4,
            "model.hidden_sizes": [4],
            "evaluation.n_episodes": 0,
            "total_steps": 32,
            "tracking.progress": "quiet",
            "tracking.plot": False,
            "run_dir": run_dir,
        },
    )
    assert load_policy(run_dir).model.critics.layers.size == 3


def test_errors_for_priorities_are_means_of_sizes(monkeypatch):
    """A critic that is too high and one that is too low do not cancel out."""
    learner = make_learner()
    errors = torch.tensor([[1.0, -2.0], [-1.0, 3.0]])
    monkeypatch.setattr(
        off_policy_learner,
        "critic_loss",
        lambda q, *args: (0.0 * q.sum(), errors),
    )
    learner.update(replace(batch(), weights=torch.ones(N)), Progress())
    assert learner.errors.tolist() == [1.0, 2.5]


@pytest.mark.skipif(sys.platform != "linux", reason="files may be sparse elsewhere")
def test_files_take_their_space_at_once(tmp_path, monkeypatch):
    """A disk that fills later would end the process without a word."""
    taken = []
    original = os.posix_fallocate

    def allocate(file, offset, size):
        taken.append(size)
        original(file, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    settings = {"storage": "disk", "directory": tmp_path}
    UniformReplayBuffer(99, BOX, torch.zeros(2), **settings).reserve(200)
    UniformReplayBuffer(99, BOX, torch.zeros(2), **settings).reserve(9)
    assert taken == [100 * 8, 100 * 8, 10 * 8, 10 * 8]
