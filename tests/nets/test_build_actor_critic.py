from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maze_train.nets.actor_critic import build_actor_critic
from maze_train.nets.config import ModelConfig

BOX = spaces.Box(-1.0, 1.0, (5,), np.float32)


@pytest.mark.parametrize(
    ("action_space", "params", "free"),
    [
        (spaces.Discrete(4), 4, 0),
        (spaces.MultiDiscrete([2, 3]), 5, 0),
        (spaces.Box(-1, 1, (2,), np.float32), 4, 2),
        (spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32))), 7, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("shared", [False, True])
def test_outputs_fit_the_distribution(action_space, params, free, shared):
    """The policy gives the parameters of the distribution, the critic one value."""
    config = ModelConfig(hidden_sizes=[8], shared_trunk=shared)
    model = build_actor_critic(config, BOX, action_space, seed=0)
    obs = torch.randn(6, 3, 5)
    policy_params, raw = model(obs)
    assert policy_params.shape == (6, 3, params)
    assert raw.shape == (6, 3, 1)
    assert torch.equal(model.policy_params(obs), policy_params)
    assert torch.equal(model.values(obs), raw.squeeze(-1))
    names = [name for name, p in model.named_parameters() if p.shape == (free,) and "free" in name]
    assert len(names) == (1 if free else 0)
    assert not model.training


def test_free_log_std_starts_where_it_is_told_and_is_the_same_in_every_state():
    """The state-independent scale is its own trained parameter, appended to the output."""
    node = {"Box": {"name": "diagonal_gaussian", "initial_log_std": -0.5}}
    config = ModelConfig(hidden_sizes=[8], distributions=node)
    model = build_actor_critic(config, BOX, spaces.Box(-1, 1, (2,), np.float32), seed=0)
    params = model.policy_params(torch.randn(7, 5))
    assert torch.equal(params[:, 2:], torch.full((7, 2), -0.5))
    params[:, 2:].sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    free = [grad for grad in grads.values() if grad.any()]
    assert [grad.tolist() for grad in free] == [[7.0, 7.0]]
    assert "policy.free_params" in model.state_dict()


def test_separate_networks_share_no_weight_and_a_trunk_is_shared():
    """Without a trunk the critic's loss leaves the policy alone; with one both move it."""
    for shared in (False, True):
        config = ModelConfig(hidden_sizes=[8], shared_trunk=shared)
        model = build_actor_critic(config, BOX, spaces.Discrete(2), seed=0)
        model.values(torch.randn(4, 5)).sum().backward()
        assert all(p.grad is None for p in model.policy.parameters())
        assert (model.trunk is not None) is shared
        if shared:
            assert all(p.grad is not None for p in model.trunk.parameters())
