"""JointDistribution is the product of its components."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from family_cases import randn
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple

from maze_train.core.errors import SpaceError
from maze_train.distributions.categorical import Categorical, MultiCategorical
from maze_train.distributions.gaussian import DiagonalGaussian, SquashedGaussian
from maze_train.distributions.mapping import JointDistribution, distribution_for


def make() -> JointDistribution:
    """Return a joint distribution of five components, two with free parameters."""
    return JointDistribution(
        {
            "steer": DiagonalGaussian(Box(-1.0, 1.0, (2,)), initial_log_std=-1.0),
            "gear": Categorical(Discrete(3, start=1)),
            "arm/0": SquashedGaussian(Box(0.0, 5.0, (1,))),
            "arm/1": DiagonalGaussian(Box(-1.0, 1.0, (1,)), initial_log_std=0.5),
            "keys": MultiCategorical(MultiDiscrete([2, 4])),
        }
    )


def own_params(params: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return parameters by component: 2 + 3 + 2 + 1 + 6 from the network, then 2 + 1 free."""
    return {
        "steer": torch.cat([params[..., 0:2], params[..., 14:16]], -1),
        "gear": params[..., 2:5],
        "arm/0": params[..., 5:7],
        "arm/1": torch.cat([params[..., 7:8], params[..., 16:17]], -1),
        "keys": params[..., 8:14],
    }


def test_sizes_are_sums_and_free_params_come_last() -> None:
    """Sizes add up, and initial free parameters are in the order of the components."""
    joint = make()
    assert (joint.param_size, joint.noise_size, joint.free_param_size) == (17, 2 + 3 + 1 + 1 + 6, 3)
    assert joint.initial_free_params().tolist() == [-1.0, -1.0, 0.5]


def test_joint_values_are_sums_over_components() -> None:
    """Samples and modes match the components, given slices of parameters and noise."""
    joint, p, q = make(), randn(4, 3, 17), randn(4, 3, 17, seed=1)
    noise = joint.draw_noise((4, 3), torch.Generator().manual_seed(0))
    assert torch.equal(noise, joint.draw_noise((4, 3), torch.Generator().manual_seed(0)))
    actions, modes = joint.sample(p, noise), joint.mode(p)
    slices = noise.split([2, 3, 1, 1, 6], -1)
    expected = torch.zeros(3, 4, 3, dtype=torch.float64)
    for (key, part), own_noise in zip(joint.parts.items(), slices, strict=True):
        mine, other = own_params(p)[key], own_params(q)[key]
        assert torch.equal(actions[key], part.sample(mine, own_noise))
        assert torch.equal(modes[key], part.mode(mine))
        assert actions[key].shape == (4, 3, *part.action_shape)
        log_prob = part.log_prob(mine, actions[key])
        expected += torch.stack([log_prob, part.entropy(mine), part.kl(mine, other)])
    log_prob, entropy = joint.log_prob_and_entropy(p, actions)
    torch.testing.assert_close(torch.stack([log_prob, entropy, joint.kl(p, q)]), expected)
    assert torch.equal(log_prob, joint.log_prob(p, actions))
    assert torch.equal(entropy, joint.entropy(p))
    split = zip(joint.split(p), own_params(p).values(), strict=True)
    assert all(torch.equal(a, b) for a, b in split)


def test_joint_env_actions_are_in_the_space() -> None:
    """The flat actions are members of the leaves, and `from_env` inverts `to_env`."""
    space = Dict(
        {"move": Tuple([Box(-1.0, 1.0, (2,)), Discrete(3, start=5)]), "key": MultiDiscrete([2, 3])}
    )
    joint = distribution_for(space)
    actions = joint.sample(randn(20, joint.param_size).float(), joint.draw_noise((20,)))
    in_env = joint.to_env(actions)
    assert sorted(in_env) == ["key", "move/0", "move/1"]
    for i in range(20):
        move = (in_env["move/0"][i].numpy(), np.int64(in_env["move/1"][i].item()))
        assert space.contains({"move": move, "key": in_env["key"][i].numpy()})
    back = joint.from_env(in_env)
    assert torch.equal(back["move/1"], actions["move/1"])
    assert torch.equal(back["key"], actions["key"])


def test_joint_distribution_without_components_raises() -> None:
    """A joint distribution without components raises SpaceError."""
    with pytest.raises(SpaceError, match="at least one part"):
        JointDistribution({})
