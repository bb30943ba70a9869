"""Policies without a critic equal policies of an actor-critic; policy wrappers."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
import torch
from gymnasium import spaces
from own_networks import Remembers, Rule, Wrapper, own
from torch import nn

from maze_train.core.errors import ConfigError, SpaceError
from maze_train.distributions.mapping import distribution_for
from maze_train.nets.acting import Actor
from maze_train.nets.actor_critic import ActorCriticModel, build_actor_critic
from maze_train.nets.config import ModelConfig, ObservationNormalizationConfig, RecurrentConfig
from maze_train.nets.policy_model import PolicyModel, build_policy
from maze_train.spaces.describe import flat_space, is_mask_key
from maze_train.spaces.tensors import sampled_for

N = 6
BOX = spaces.Box(-1.0, 1.0, (5,), np.float32)
TURN = spaces.Box(-1.0, 1.0, (2,), np.float32)
PARTS = {"robot": spaces.Tuple((BOX, spaces.Discrete(3))), "at": BOX}
ACTIONS = {
    "discrete": spaces.Discrete(4),
    "multi discrete": spaces.MultiDiscrete([2, 3]),
    "multi binary": spaces.MultiBinary(3),
    "box": TURN,
    "tuple": spaces.Tuple((spaces.Discrete(3), TURN)),
    "dict": spaces.Dict({"turn": TURN, "keys": spaces.MultiDiscrete([2, 4])}),
}
CHOICES = {"discrete": 4, "multi discrete": 5, "tuple": 3, "dict": 6}
"""Number of mask entries of the action spaces that support masks."""

RUNNING = ObservationNormalizationConfig(mode="running")
MEMORY = RecurrentConfig(size=7, layers=2)
SETTINGS = {
    "plain": {},
    "no hidden layer": {"hidden_sizes": []},
    "shared trunk": {"shared_trunk": True},
    "memory": {"rnn": MEMORY},
    "gru": {"rnn": RecurrentConfig(cell="gru", size=7)},
    "normalised": {"normalization": RUNNING},
    "normalised memory": {"normalization": RUNNING, "rnn": MEMORY},
}
KINDS = ("box", "dict", "masked")
PROBLEMS = [
    (settings, action, kind)
    for i, settings in enumerate(SETTINGS)
    for j, action in enumerate(ACTIONS)
    for k, kind in enumerate(KINDS)
    if kind != "masked" or action in CHOICES
    # Combines each setting with most actions, and each action with all kinds of observations.
    if (i + 2 * j + k) % 5 == 0
]
WRAPPER = "algorithm.policy_wrapper"


def space_of(kind, action):
    """Return an observation space: a Box, a nested Dict, or a nested Dict with a mask."""
    if kind == "masked":
        return spaces.Dict({**PARTS, "action_mask": spaces.MultiBinary(CHOICES[action])})
    return spaces.Dict(PARTS) if kind == "dict" else BOX


def observations(space):
    """Return N flat observations of a space, in which every second action is legal."""
    obs = sampled_for(flat_space(space), N)
    if isinstance(obs, dict):
        for key in filter(is_mask_key, obs):
            obs[key] = (torch.arange(obs[key].shape[-1]) % 2 == 0).expand(N, -1).clone()
    return obs


def model_config(name, **more):
    """Return settings of a small model."""
    return ModelConfig(**{"hidden_sizes": [8, 6], **SETTINGS[name], **more})


def acts(model, obs):
    """Return the outputs of a model for N observations; of two steps if it is recurrent."""
    with torch.no_grad():
        if not model.state_size:
            return [model.policy_params(obs)]
        first, state = model.policy_step(obs, torch.zeros(N, model.state_size))
        return [first, *model.policy_step(obs, state)]


def assert_same(found, expected):
    """Assert that the tensors of two lists are bit-for-bit identical."""
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(("settings", "action", "kind"), PROBLEMS)
def test_policy_equals_policy_of_an_actor_critic(settings, action, kind):
    """The same seed gives the same weights, in the same order, and the same outputs.

    Weights of another actor-critic can be loaded and give its outputs.
    """
    space = space_of(kind, action)
    arguments, obs = (model_config(settings), space, ACTIONS[action]), observations(space)
    policy = build_policy(*arguments, 3)
    actor_critic, other = (build_actor_critic(*arguments, seed) for seed in (3, 4))
    assert type(policy) is PolicyModel
    assert not any(module.training for module in policy.modules())
    state = actor_critic.state_dict()
    assert list(policy.state_dict()) == [key for key in state if not key.startswith("critic.")]
    for key, value in policy.state_dict().items():
        assert torch.equal(value, state[key]), key
    names = [key for key, _ in actor_critic.named_parameters() if not key.startswith("critic.")]
    assert [key for key, _ in policy.named_parameters()] == names
    assert policy.state_size == actor_critic.state_size
    found = acts(policy, obs)
    assert found[0].shape == (N, policy.distribution.param_size)
    assert_same(found, acts(actor_critic, obs))
    if other.normalizer is not None:
        other.normalizer.update(sampled_for(flat_space(space), 50))
    missing, unexpected = policy.load_state_dict(other.state_dict(), strict=False)
    assert missing == []
    assert unexpected
    assert all(key.startswith("critic.") for key in unexpected)
    assert_same(acts(policy, obs), acts(other, obs))
    assert not torch.equal(acts(policy, obs)[0], found[0])


def test_actor_critic_keeps_the_order_of_submodules():
    """Saved weights and flat parameter vectors depend on the order of the submodules."""
    config = model_config("normalised memory")
    model = build_actor_critic(config, BOX, TURN, 0)
    order = ["normalizer", "trunk", "rnn", "policy", "critic"]
    assert [name for name, _ in model.named_children()] == order
    for keys in (model.state_dict(), dict(model.named_parameters())):
        first = [key.split(".")[0] for key in keys]
        assert first == sorted(first, key=order.index)
    assert isinstance(model, PolicyModel)
    assert ActorCriticModel.learner_only == ("critic", "value_head")
    assert not PolicyModel.learner_only


def test_recurrent_models_require_a_hidden_state():
    """Recurrent models do not support the method without a hidden state."""
    assert build_policy(model_config("plain"), BOX, TURN, 0).state_size == 0
    memory = build_policy(model_config("memory"), BOX, TURN, 0)
    assert memory.state_size == 2 * 2 * 7
    with pytest.raises(AssertionError, match="call policy_step"):
        memory(observations(BOX))


def named(name, **settings):
    """Return the configuration of an object in this file."""
    return {"_target_": f"{__name__}.{name}", **settings}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("critic", own("Wrapper")),
        ("critic_hidden_sizes", [8]),
        ("critic_hidden_sizes", []),
        ("value_transform", {"_target_": "maze_train.ReduceScaleValueTransform"}),
        ("value_support", [-1, 1]),
    ],
    ids=str,
)
def test_critic_settings_of_policies_without_critic_raise(key, value):
    """The error names the setting, which a policy without a critic does not support."""
    message = rf"model.{key} = .*: there is no critic: remove this setting"
    with pytest.raises(ConfigError, match=message) as caught:
        build_policy(ModelConfig(**{key: value}), BOX, TURN, 0)
    assert caught.value.key == f"model.{key}"


def test_policies_of_unsupported_spaces_raise():
    """The error contains the type of the space."""
    for observation_space, action_space in ((spaces.Text(3), TURN), (BOX, spaces.Text(3))):
        with pytest.raises(SpaceError, match="Text"):
            build_policy(ModelConfig(), observation_space, action_space, 0)


class NeedsLegalActions(Wrapper):
    """Wrapper that requires all actions to be legal."""

    def policy_params(self, obs):
        assert sorted(obs) == ["action_mask", "at", "robot/0", "robot/1"]
        assert obs["action_mask"].all(), "an action is not legal"
        return super().policy_params(obs)


class NoDistribution(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.policy_params = model.policy_params


class OtherDistribution(Wrapper):
    def __init__(self, model):
        super().__init__(model)
        self.distribution = distribution_for(spaces.Discrete(9))


class NoParams(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.distribution = model.distribution


class Changes(Wrapper):
    """Wrapper that changes the distribution parameters."""

    def __init__(self, model, how):
        super().__init__(model)
        self.how = how

    def policy_params(self, obs):
        return CHANGES[self.how](super().policy_params(obs))


CHANGES = {
    "too wide": lambda params: params.repeat(1, 2),
    "one row": lambda params: params[0],
    "two outputs": lambda params: (params, params),
    "a list": lambda params: params.tolist(),
    "fails": lambda params: params.reshape(7),
}


class OddState(Wrapper):
    state_size = "large"


class OneOutput(Remembers):
    def policy_step(self, obs, state):
        return super().policy_step(obs, state)[0]


def no_module(model):
    """Factory that does not return a module."""
    return "hello"


def refuses(model):
    """Factory that raises ConfigError."""
    raise ConfigError("strength", "expected more", 1)


def breaks(model):
    """Factory that raises another error."""
    raise KeyError("the key is lost")


def wrap(node, settings="plain", space=BOX, action="discrete", seed=0):
    """Return a policy in the wrapper of a node."""
    config = model_config(settings)
    return build_policy(config, space, ACTIONS[action], seed, policy_wrapper=node)


def test_policy_wrapper_changes_selected_outputs():
    """A wrapper gets the policy and its settings; other outputs do not change."""
    model, policy = wrap(own("Rule", strength=4.0)), wrap(None)
    assert type(model) is Rule
    assert type(model.model) is PolicyModel
    assert not any(module.training for module in model.modules())
    obs = torch.tensor([[1.0, 0, 0, 0, 0], [-1.0, 0, 0, 0, 0]])
    change = model.policy_params(obs) - policy(obs)
    torch.testing.assert_close(change, torch.tensor([[4.0, 0, 0, 0], [0, 0, 0, 0]]))
    assert_same(list(model.model.parameters()), list(policy.parameters()))
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(twin.policy_params(obs), model.policy_params(obs))


def test_recurrent_policy_wrapper_sets_its_state_size():
    """A recurrent wrapper sets the size of its hidden state."""
    model = wrap(own("Remembers"), "memory")
    actor = Actor(model, N)
    obs = observations(BOX)
    actor.act(obs, None, True)
    params = actor.act(obs, None, True).params
    assert actor.hidden_state[:, -1].tolist() == [2.0] * N
    torch.testing.assert_close(params, 2 * acts(wrap(None, "memory"), obs)[1])


def test_policy_wrapper_is_probed_with_legal_actions():
    """Wrappers are tested on flat observations with masks in which every action is legal."""
    space = space_of("masked", "discrete")
    assert type(wrap(named("NeedsLegalActions"), space=space)) is NeedsLegalActions


def test_policy_wrapper_distribution_must_match_parameters():
    """The number of parameters must match the distribution of the wrapper."""
    with pytest.raises(ConfigError, match=r"= \[2, 4\]: .*shape \[batch, 9\] from policy_par"):
        wrap(named("OtherDistribution"))


PARAMS = r"expected distribution .* shape \[batch, 4\] from policy_params"
STEP = r"expected .* \[batch, 4\] and a recurrent state of shape \[batch, 29\] from policy_step"
WRONG = {
    "plain": [
        ({"strength": 1}, " = {'strength': 1}: expected a mapping with the key _target_"),
        (own("Rulle"), "._target_ = .*: .* has no 'Rulle'; did you mean Rule"),
        (own("Rule", colour=1), ": calling .*Rule failed: .*'colour'"),
        (named("no_module"), " = 'str': expected a torch.nn.Module"),
        (named("refuses"), ".strength = 1: expected more"),
        (named("breaks"), ": calling .*breaks failed: KeyError: 'the key is lost'"),
        (named("NoDistribution"), " = 'NoneType': expected .* the attribute distribution"),
        (named("NoParams"), ": policy_params on .*'NoParams' .* no attribute 'policy_par"),
        (named("Changes", how="too wide"), rf" = \[2, 8\]: {PARAMS}"),
        (named("Changes", how="one row"), rf" = \[4\]: {PARAMS}"),
        (named("Changes", how="two outputs"), rf" = \[\[2, 4\], \[2, 4\]\]: {PARAMS}"),
        (named("Changes", how="a list"), f" = 'list': {PARAMS}"),
        (named("Changes", how="fails"), ": policy_params on .*Box.* failed: RuntimeError: shape"),
        (named("OddState"), ": policy_params on .* failed: .*'large'"),
    ],
    "memory": [
        (own("Wrapper"), ": policy_params on .* failed: .*: call policy_step"),
        (own("Remembers", extra=2), rf" = \[\[2, 4\], \[2, 30\]\]: {STEP}"),
        (named("OneOutput"), rf" = \[2, 4\]: {STEP}"),
    ],
}


@pytest.mark.parametrize(
    ("settings", "node", "message"),
    [(settings, *row) for settings, rows in WRONG.items() for row in rows],
)
def test_invalid_policy_wrappers_raise(settings, node, message):
    """The error contains the key and the problem, before training."""
    with pytest.raises(ConfigError, match=f"^{re.escape(WRAPPER)}{message}"):
        wrap(node, settings)
