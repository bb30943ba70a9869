"""Updates of behavioral cloning match a plain training loop in float64."""

from __future__ import annotations

import copy
from collections import OrderedDict

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from maze_train.algorithms.bc.config import BCAlgorithmConfig
from maze_train.algorithms.bc.learner import BCBatch, BCLearner, BCLoss
from maze_train.learner.config import Progress
from maze_train.nets.config import ModelConfig, ObservationNormalizationConfig
from maze_train.nets.policy_model import build_policy

BOX = spaces.Box(-np.inf, np.inf, (3,), np.float32)
ARM = spaces.Box(-1.0, 1.0, (2,), np.float32)
HYBRID = spaces.Dict(OrderedDict(arm=ARM, grip=spaces.Discrete(4), bits=spaces.MultiBinary(2)))
UPDATES = 5


class OwnNet(nn.Module):
    """User-defined network without analytic gradients."""

    def __init__(self, observation_space, output_size):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(observation_space.shape[0], 5), nn.Softplus(), nn.Linear(5, output_size)
        )

    def forward(self, obs):
        return self.layers(obs)


def make_model(action_space, **settings):
    """Return a small policy in float64."""
    config = ModelConfig(**{"hidden_sizes": [4, 3], **settings})
    return build_policy(config, BOX, action_space, seed=1).double()


def batches(model, n=7):
    """Yield minibatches with sampled actions."""
    generator = torch.Generator().manual_seed(5)
    distribution = model.distribution
    for _ in range(UPDATES):
        obs = torch.randn(n, 3, generator=generator, dtype=torch.float64)
        noise = distribution.draw_noise((n,), generator).double()
        params = torch.randn(n, distribution.param_size, generator=generator).double()
        actions = distribution.sample(params, noise)
        yield BCBatch(obs, actions)


def slow_losses(model, config, loss):
    """Return the losses of a plain loop: loss, backward, clipping, Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr, eps=1e-8)
    losses = []
    for batch in batches(model):
        value = loss(model.policy_params(batch.obs), batch.actions)
        optimizer.zero_grad()
        value.backward()
        if config.max_grad_norm:
            nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


SETTINGS = {
    "discrete": (spaces.Discrete(4), {}, {}),
    "continuous": (ARM, {}, {}),
    "squared error": (ARM, {"box_loss": "mse"}, {}),
    "hybrid": (HYBRID, {}, {}),
    "hybrid, squared error": (HYBRID, {"box_loss": "mse"}, {}),
    "entropy": (HYBRID, {"entropy_coef": 0.2}, {}),
    "clipped": (spaces.Discrete(4), {"max_grad_norm": 0.05}, {}),
    "trunk": (spaces.Discrete(4), {}, {"shared_trunk": True}),
    "own network": (HYBRID, {}, {"policy": {"_target_": "test_bc_update.OwnNet"}}),
    "normalised": (
        ARM,
        {},
        {"normalization": ObservationNormalizationConfig(mode="running")},
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_bc_updates_equal_a_plain_loop(name):
    """Losses and final weights match a plain training loop."""
    space, changes, model_settings = SETTINGS[name]
    config = BCAlgorithmConfig(**{"lr": 0.05, **changes})
    model = make_model(space, **model_settings)
    if model.normalizer is not None:
        obs = torch.randn(50, 3, generator=torch.Generator().manual_seed(1)) * 3 + 1
        model.normalizer.update(obs)
    reference = copy.deepcopy(model)
    loss = BCLoss(model.distribution, box_loss=config.box_loss, entropy_coef=config.entropy_coef)
    learner = BCLearner(model, config, loss)
    found = []
    for batch in batches(model):
        row = learner.update(batch, Progress()).reduce()
        found.append(row["train/policy_loss"] - config.entropy_coef * row["train/policy_entropy"])
    expected = slow_losses(reference, config, loss)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-8, atol=1e-10)
