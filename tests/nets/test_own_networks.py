"""Custom networks in all roles."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from own_networks import OwnNet, own

from maze_train.algorithms.sac.model import build_soft_actor_critic
from maze_train.core.errors import ConfigError
from maze_train.nets.actor_critic import build_actor_critic
from maze_train.nets.config import ModelConfig
from maze_train.nets.policy_model import build_policy

BOX = spaces.Box(-1.0, 1.0, (5,), np.float32)
BUILDERS = {
    "policy": build_policy,
    "actor-critic": build_actor_critic,
    "soft actor-critic": build_soft_actor_critic,
}
every_place = pytest.mark.parametrize(
    ("model", "role", "output_size"),
    [
        ("policy", "policy", 4),
        ("policy", "trunk", 6),
        ("actor-critic", "policy", 4),
        ("actor-critic", "critic", 1),
        ("actor-critic", "trunk", 6),
        ("soft actor-critic", "policy", 4),
        ("soft actor-critic", "critic", 4),
    ],
)


def build(model, role, node, space=BOX):
    """Return a model with a custom network in a role."""
    settings = {"hidden_sizes": [8, 6], "shared_trunk": role == "trunk", role: node}
    return BUILDERS[model](ModelConfig(**settings), space, spaces.Discrete(4), 0)


@every_place
def test_custom_networks_get_their_settings(model, role, output_size):
    """The networks have the given settings and are in evaluation mode."""
    built = build(model, role, own("OwnNet", width=3))
    nets = {
        "policy": lambda: [built.policy.net],
        "trunk": lambda: [built.trunk],
        "critic": lambda: built.critics.members if "soft" in model else [built.critic],
    }[role]()
    for net in nets:
        assert type(net) is OwnNet
        assert (net.first.out_features, net.last.out_features) == (3, output_size)
    assert not any(module.training for module in built.modules())


@every_place
def test_invalid_custom_networks_raise(model, role, output_size):
    """The error contains the key and the problem, before training."""
    expected = rf"expected outputs of shape \[batch, {output_size}\] \(argument output_size\)"
    for node, message in (
        (own("TooWide"), rf" = \[2, {output_size + 1}\]: {expected}"),
        (own("Flat"), rf" = \[2\]: {expected}"),
        (own("TwoOutputs"), f" = 'tuple': {expected}"),
        (own("FailsForward"), ": a forward pass on observations of Box.* failed: the plug is out"),
        (own("not_a_module"), r" = 'str': expected a torch.nn.Module"),
        (own("OwnNet", colour=1), ": calling .*OwnNet failed: .*'colour'"),
        (own("OwnNett"), r"._target_ = .*: .* has no 'OwnNett'; did you mean OwnNet"),
    ):
        with pytest.raises(ConfigError, match=f"^model.{role}{message}"):
            build(model, role, node)
    with pytest.raises(ConfigError, match=f"model.{role}: a forward pass on observations of Box"):
        build(model, role, own("OwnNet"), spaces.Box(-1, 1, (2, 2), np.float32))
