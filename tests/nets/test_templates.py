from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maze_train.core.errors import ConfigError
from maze_train.nets.actor_critic import build_actor_critic
from maze_train.nets.config import ACTIVATIONS, ModelConfig, RecurrentConfig
from maze_train.nets.template import TemplateNet, resolve

BOX = spaces.Box(-1.0, 1.0, (5,), np.float32)
DICT = spaces.Dict({"a": BOX, "b": spaces.Discrete(3)})
IMAGE = spaces.Box(0, 255, (9, 8, 3), np.uint8)
WITH_IMAGE = spaces.Dict({"a": BOX, "camera": IMAGE})
OWN = {"_target_": "a.B"}


def linears(module):
    """Return the linear layers in order."""
    return [m for m in module.modules() if isinstance(m, torch.nn.Linear)]


def gain_of(layer):
    """Return g with W W^T = g^2 I (or W^T W for a tall matrix); fail if there is none."""
    w = layer.weight.detach().double()
    gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
    squared = float(gram.diagonal().mean())
    torch.testing.assert_close(
        gram, squared * torch.eye(len(gram), dtype=gram.dtype), rtol=0, atol=1e-5
    )
    return math.sqrt(squared)


@pytest.mark.parametrize(
    ("space", "settings", "hidden_sizes", "activation", "shared_trunk"),
    [
        (BOX, {}, [64, 64], "tanh", False),
        (DICT, {}, [64, 64], "tanh", False),
        (IMAGE, {}, [512], "relu", True),
        (WITH_IMAGE, {}, [512], "relu", True),
        (IMAGE, {"image_encoder": "impala"}, [512], "relu", True),
        (IMAGE, {"image_encoder": "flat"}, [64, 64], "tanh", False),
        (BOX, {"rnn": RecurrentConfig()}, [64, 64], "tanh", True),
        (IMAGE, {"image_encoder": "flat", "rnn": RecurrentConfig()}, [64, 64], "tanh", True),
        (IMAGE, {"hidden_sizes": [8, 4]}, [8, 4], "relu", True),
        (IMAGE, {"activation": "gelu"}, [512], "gelu", True),
        (IMAGE, {"shared_trunk": False}, [512], "relu", False),
        (BOX, {"shared_trunk": True}, [64, 64], "tanh", True),
        (IMAGE, {"policy": OWN}, [512], "relu", False),
        (IMAGE, {"critic": OWN}, [512], "relu", False),
        (IMAGE, {"critic_hidden_sizes": [32]}, [512], "relu", False),
        (IMAGE, {"hidden_sizes": []}, [], "relu", False),
    ],
)
def test_model_settings_are_resolved_from_the_space(
    space, settings, hidden_sizes, activation, shared_trunk
):
    """Unset values are resolved from the space; resolving again changes nothing."""
    config = ModelConfig(branch_size=7, **settings)
    resolved = resolve(config, space)
    assert resolved.hidden_sizes == hidden_sizes
    assert resolved.activation == activation
    assert resolved.shared_trunk is shared_trunk
    assert resolved.branch_size == 7
    assert resolve(resolved, BOX) == resolved
    assert config == ModelConfig(branch_size=7, **settings)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("space", [BOX, DICT], ids=["box", "dict"])
def test_orthogonal_initialization_uses_the_usual_gains(space, shared):
    """Gains: sqrt(2) for hidden layers and branches, 0.01 for the policy, 1 for the critic."""
    config = ModelConfig(hidden_sizes=[16, 8], shared_trunk=shared)
    model = build_actor_critic(config, space, spaces.Discrete(4), seed=3)
    *policy_hidden, policy_head = linears(model.policy)
    *critic_hidden, critic_head = linears(model.critic)
    trunk = linears(model.trunk) if shared else []
    hidden = [*policy_hidden, *critic_hidden, *trunk]
    assert len(hidden) == (2 if space is BOX else 4) * (1 if shared else 2)
    assert [gain_of(layer) for layer in hidden] == pytest.approx([math.sqrt(2)] * len(hidden))
    assert gain_of(policy_head) == pytest.approx(0.01, rel=1e-5)
    assert gain_of(critic_head) == pytest.approx(1.0)
    assert not any(layer.bias.any() for layer in linears(model))


def test_default_initialization_of_pytorch_is_optional():
    """Without `orthogonal_init`, weights and biases are those of nn.Linear."""
    config = ModelConfig(hidden_sizes=[16, 8], orthogonal_init=False)
    model = build_actor_critic(config, BOX, spaces.Discrete(4), seed=3)
    torch.manual_seed(3)
    first = torch.nn.Linear(5, 16)
    assert torch.equal(linears(model.policy)[0].weight, first.weight)
    assert torch.equal(linears(model.policy)[0].bias, first.bias)
    assert all(layer.bias.any() for layer in linears(model))


def test_no_hidden_sizes_give_a_linear_model():
    """Without hidden sizes, the network is one linear layer."""
    net = TemplateNet(BOX, ModelConfig(), [], 3)
    assert len(linears(net)) == 1
    x = torch.randn(4, 5)
    torch.testing.assert_close(net(x), torch.nn.functional.linear(x, linears(net)[0].weight))
    config = ModelConfig(hidden_sizes=[4], critic_hidden_sizes=[])
    model = build_actor_critic(config, BOX, spaces.Discrete(2), seed=0)
    assert len(linears(model.critic)) == 1


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_template_network_composes_its_layers(name):
    """Each hidden layer is followed by the activation; the output layer is not."""
    function = getattr(torch.nn.functional, name)
    net = TemplateNet(BOX, ModelConfig(activation=name), [8, 6], 3)
    first, second, last = linears(net)
    x = 3.0 * torch.randn(2, 4, 5)
    expected = last(function(second(function(first(x)))))
    torch.testing.assert_close(net(x), expected)
    assert net(x).shape == (2, 4, 3)
    assert net.output_size == 3


def test_trunk_ends_with_its_activation():
    """A trunk ends with its activation."""
    net = TemplateNet(BOX, ModelConfig(), [8, 6])
    assert net.output_size == 6
    assert bool((net(100 * torch.randn(50, 5)).abs() <= 1.0).all())


def test_model_seed_does_not_use_the_global_generator():
    """The same seed gives the same weights, and the global generator is not used."""
    models = []
    for i, seed in enumerate((1, 1, 2)):
        torch.manual_seed(i)
        before = torch.get_rng_state()
        models.append(build_actor_critic(ModelConfig(), DICT, spaces.Discrete(3), seed=seed))
        assert torch.equal(torch.get_rng_state(), before)
    a, b, c = (torch.cat([p.flatten() for p in m.parameters()]) for m in models)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_sizes": [64, 0]}, r"hidden_sizes\[1\] = 0: expected a number in \[1, 16384\]"),
        ({"activation": "tahn"}, r"activation = 'tahn'.*did you mean 'tanh'"),
        ({"value_support": [3, 3]}, r"value_support = \[3, 3\]: expected \[low, high\]"),
        ({"shared_trunk": True, "hidden_sizes": []}, r"a shared trunk needs at least one layer"),
        ({"trunk": {"_target_": "a.B"}}, r"trunk: requires model.shared_trunk=true"),
        ({"policy": {"size": 3}}, r"policy = .*: expected a mapping with the key _target_"),
        (
            {"shared_trunk": True, "critic": {"_target_": "a.B"}},
            r"critic: with a shared trunk each head is a single layer",
        ),
        (
            {"shared_trunk": True, "critic_hidden_sizes": [8]},
            r"critic_hidden_sizes = \[8\]: with a shared trunk the critic has no separate",
        ),
        (
            {"rnn": RecurrentConfig(), "critic_hidden_sizes": [8]},
            r"critic_hidden_sizes = \[8\]: with a shared trunk the critic has no separate",
        ),
    ],
)
def test_invalid_model_settings_raise(settings, message):
    """ModelConfig raises an error that names the setting."""
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**settings)


# -- Actor-critics as a configuration describes them -----------------------------------------------


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
def test_network_outputs_match_the_distribution(action_space, params, free, shared):
    """The policy returns the distribution parameters, and the critic one value."""
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


def test_free_log_std_is_a_trainable_parameter():
    """The state-independent log std is a trainable parameter, appended to the output."""
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


def test_trunk_shares_gradients_of_policy_and_critic():
    """Without a trunk, the critic loss has no gradient for the policy; with one, both share it."""
    for shared in (False, True):
        config = ModelConfig(hidden_sizes=[8], shared_trunk=shared)
        model = build_actor_critic(config, BOX, spaces.Discrete(2), seed=0)
        model.values(torch.randn(4, 5)).sum().backward()
        assert all(p.grad is None for p in model.policy.parameters())
        assert (model.trunk is not None) is shared
        if shared:
            assert all(p.grad is not None for p in model.trunk.parameters())
