from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from maze_train.errors import ConfigError, SpaceError
from maze_train.nets.actor_critic import build_actor_critic
from maze_train.nets.config import ModelConfig

BOX = spaces.Box(-1.0, 1.0, (5,), np.float32)
NESTED = spaces.Dict({"robot": spaces.Tuple((BOX, spaces.Discrete(3))), "goal": BOX})
OWN = "test_build_actor_critic"


class OwnNet(nn.Module):
    """A network of a user for Box observations."""

    def __init__(self, observation_space, output_size, width=4):
        super().__init__()
        size = int(np.prod(observation_space.shape))
        self.first = nn.Linear(size, width)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(width, output_size)

    def forward(self, obs):
        return self.last(self.dropout(self.first(obs).relu()))


class TooWide(OwnNet):
    def __init__(self, observation_space, output_size):
        super().__init__(observation_space, output_size + 1)


class FailsForward(OwnNet):
    def forward(self, obs):
        raise RuntimeError("the plug is out")


class TwoOutputs(OwnNet):
    def forward(self, obs):
        return super().forward(obs), obs


def not_a_module(observation_space, output_size):
    """A factory that returns something else."""
    return "hello"


def own(name, **settings):
    """Configuration of a network of this file."""
    return {"_target_": f"{OWN}.{name}", **settings}


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
    """The state-independent scale is a trained parameter of its own, appended to the output."""
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


def test_nested_observations_are_read_by_joined_keys():
    """The model of a nested space takes the flat observations of the vector environment."""
    model = build_actor_critic(ModelConfig(hidden_sizes=[8]), NESTED, spaces.Discrete(2), seed=0)
    obs = {
        "goal": torch.zeros(2, 5),
        "robot/0": torch.zeros(2, 5),
        "robot/1": torch.tensor([0, 2]),
    }
    values = model.values(obs)
    assert values.shape == (2,)
    assert values[0] != values[1]


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_own_networks_are_used(role):
    """A network named in the configuration takes the place of the template."""
    config = ModelConfig(**{role: own("OwnNet", width=3)})
    model = build_actor_critic(config, BOX, spaces.Discrete(4), seed=0)
    net = model.policy.net if role == "policy" else model.critic
    assert type(net).__name__ == "OwnNet"
    assert net.first.out_features == 3
    assert net.last.out_features == (4 if role == "policy" else 1)
    obs = torch.randn(3, 5)
    assert torch.equal(model.values(obs), model.values(obs)), "dropout must be off when acting"


def test_own_trunk_feeds_both_heads():
    """A trunk of a user has as many outputs as the last hidden layer."""
    config = ModelConfig(shared_trunk=True, hidden_sizes=[32, 6], trunk=own("OwnNet"))
    model = build_actor_critic(config, BOX, spaces.Discrete(4), seed=0)
    assert type(model.trunk).__name__ == "OwnNet"
    assert model.trunk.last.out_features == 6
    assert model(torch.randn(3, 5))[0].shape == (3, 4)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (own("TooWide"), r"model.critic = \[2, 2\]: expected outputs of shape \[batch, 1\]"),
        (own("TwoOutputs"), r"model.critic = 'tuple': expected outputs of shape \[batch, 1\]"),
        (own("FailsForward"), r"model.critic: a forward pass .* failed: the plug is out"),
        (own("not_a_module"), r"model.critic = 'str': expected a torch.nn.Module"),
        (own("OwnNet", colour=1), r"model.critic: calling .*OwnNet failed: .*'colour'"),
        (own("OwnNett"), r"model.critic._target_ = .*: .* has no 'OwnNett'; did you mean OwnNet"),
    ],
)
def test_networks_that_do_not_fit_are_refused(node, message):
    """What is wrong with a user's network is told with its key, before training."""
    with pytest.raises(ConfigError, match=message):
        build_actor_critic(ModelConfig(critic=node), BOX, spaces.Discrete(4), seed=0)


def test_a_network_for_another_space_is_refused():
    """A network that can not read the observations says so with the space."""
    config = ModelConfig(policy=own("OwnNet"))
    space = spaces.Box(-1, 1, (2, 2), np.float32)
    with pytest.raises(ConfigError, match=r"model.policy: a forward pass on observations of Box"):
        build_actor_critic(config, space, spaces.Discrete(4), seed=0)


def test_spaces_without_network_or_distribution_are_refused():
    """Observations and actions of an unknown kind are named."""
    with pytest.raises(SpaceError, match=r"Text"):
        build_actor_critic(ModelConfig(), spaces.Text(3), spaces.Discrete(2), seed=0)
    with pytest.raises(SpaceError, match=r"Text"):
        build_actor_critic(ModelConfig(), BOX, spaces.Text(3), seed=0)
