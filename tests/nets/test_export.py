"""Networks under tracing, export, PyTorch transformations and copying: equal results."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from cases import everyday, sweep
from gymnasium import spaces
from torch import nn
from torch.utils._pytree import tree_map

from maze_train import ModelConfig, build_actor_critic
from maze_train.algorithms.sac.model import build_soft_actor_critic
from maze_train.core.types import Sequences
from maze_train.nets.config import ObservationNormalizationConfig, RecurrentConfig
from maze_train.spaces.tensors import sampled_for

N, L = 3, 4
VECTOR = spaces.Box(-1.0, 1.0, (5,))
IMAGE = spaces.Box(0, 255, (12, 12, 1), "uint8")
PARTS = spaces.Dict({"at": VECTOR, "gear": spaces.Discrete(3), "view": IMAGE})
MASKED = spaces.Dict({"at": VECTOR, "action_mask": spaces.MultiBinary(4)})
ACTIONS = spaces.Dict({"aim": spaces.Box(-2.0, 3.0, (2,)), "fire": spaces.MultiDiscrete([2, 3])})
RUNNING = ObservationNormalizationConfig(mode="running")

MODELS = {
    "vector": (VECTOR, ACTIONS, {}),
    "relu": (VECTOR, ACTIONS, {"activation": "relu"}),
    "trunk": (VECTOR, ACTIONS, {"shared_trunk": True}),
    "discrete": (spaces.Discrete(7), ACTIONS, {}),
    "image": (IMAGE, ACTIONS, {}),
    "impala": (IMAGE, ACTIONS, {"image_encoder": "impala"}),
    "dict": (PARTS, ACTIONS, {}),
    "masked": (MASKED, spaces.Discrete(4), {}),
    "running": (VECTOR, ACTIONS, {"normalization": RUNNING}),
    "lstm": (VECTOR, ACTIONS, {"rnn": RecurrentConfig(cell="lstm", size=4, layers=2)}),
    "gru": (PARTS, ACTIONS, {"rnn": RecurrentConfig(cell="gru", size=4, layers=2)}),
}


class Method(nn.Module):
    """Module that calls one method of a model."""

    def __init__(self, model, function):
        super().__init__()
        self.model, self.function = model, function

    def forward(self, *args):
        return self.function(self.model, *args)


def observations(space, n):
    """Return random observations in which the first action is legal."""
    obs = sampled_for(space, n)
    if isinstance(obs, dict) and "action_mask" in obs:
        obs["action_mask"][:, 0] = 1
    return obs


def settings_of(kind):
    """Return settings of small networks with tanh, changed by the case."""
    return ModelConfig(**{"hidden_sizes": [6, 6], "activation": "tanh", **MODELS[kind][2]})


def make_case(kind, part):
    """Return a module and a function that draws its arguments."""
    space, actions, _ = MODELS[kind]
    if part == "critics":
        model = build_soft_actor_critic(settings_of(kind), space, actions, seed=1)
        size = model.actions.critic_input_size
        module = Method(model, lambda m, obs, a: m.critics(m.inputs(obs), a))
        return module, lambda: (observations(space, N), torch.rand(N, size))
    model = build_actor_critic(settings_of(kind), space, actions, seed=1)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.2 * torch.randn_like(param))
    if model.normalizer is not None:
        model.normalizer.update(3 * torch.randn(20, 5) + 1)
    if not model.state_size:
        return Method(model, lambda m, obs: m(obs)), lambda: (observations(space, N),)
    if part == "step":
        module = Method(model, lambda m, obs, state: m.policy_step(obs, state))
        return module, lambda: (observations(space, N), torch.randn(N, model.state_size))
    module = Method(model, lambda m, obs, state, resets: m(obs, Sequences(state, resets, None)))
    return module, lambda: (
        observations(space, L * N),
        torch.randn(N, model.state_size),
        torch.rand(L, N) < 0.3,
    )


def traced(module, args):
    """Return the module traced by `torch.jit.trace`, which newer PyTorch versions discourage."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(module, args, check_trace=False)


WAYS = {
    "trace": traced,
    "export": lambda module, args: torch.export.export(module, args).module(),
}
CASES = [(kind, "heads") for kind in MODELS if kind not in ("lstm", "gru")]
CASES += [(kind, part) for kind in ("lstm", "gru") for part in ("step", "sequence")]
CASES += [(kind, "critics") for kind in ("vector", "image", "dict", "masked", "running")]


@pytest.mark.parametrize(
    ("kind", "part", "way"),
    everyday(
        6,
        [
            *[("vector", "heads", "trace"), ("gru", "sequence", "trace")],
            *[(*case, "export") for case in CASES[:1] + CASES[4:]],
        ],
        are_rows=True,
    ),
)
def test_exported_network_matches_on_other_inputs(kind, part, way):
    """The exported function matches the network on other inputs than the recorded ones."""
    torch.manual_seed(0)
    module, draw = make_case(kind, part)
    args, others = draw(), draw()
    with torch.no_grad():
        exported = WAYS[way](module, args)
        torch.testing.assert_close(exported(*others), module(*others), rtol=1e-4, atol=1e-5)


def loaded(model):
    """Return a copy that loaded its weights over other weights."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(0.5)
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize(("kind", "part"), CASES)
@sweep("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), loaded])
@torch.no_grad()
def test_copied_networks_are_identical_and_independent(kind, part, copied):
    """Copies give bit-for-bit identical results and have separate weights."""
    module, draw = make_case(kind, part)
    twin, args = Method(copied(module.model), module.function), draw()
    expected = module(*args)
    torch.testing.assert_close(twin(*args), expected, rtol=0, atol=0)
    for param in module.model.parameters():
        param.add_(1.0)
    torch.testing.assert_close(twin(*args), expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    ("kind", "part"),
    [(kind, "heads") for kind in ("vector", "image", "dict", "masked")] + [("dict", "critics")],
)
def test_vmap_equals_a_loop(kind, part):
    """`vmap` over observations matches a loop."""
    torch.manual_seed(0)
    module, draw = make_case(kind, part)
    args = tree_map(lambda x: x.unsqueeze(1), draw())
    with torch.no_grad():
        rows = [module(*tree_map(lambda x, i=i: x[i], args)) for i in range(N)]
        mapped = torch.func.vmap(module)(*args)
    expected = tree_map(lambda *parts: torch.stack(parts), *rows)
    torch.testing.assert_close(mapped, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_networks_export_with_a_dynamic_batch():
    """The batch may exceed the number of images that a CPU computes at once."""
    model = build_actor_critic(settings_of("image"), IMAGE, ACTIONS, seed=1)
    batch = torch.export.Dim("batch", min=2, max=1000)
    args = (observations(IMAGE, 5),)
    exported = torch.export.export(model, args, dynamic_shapes=({0: batch},)).module()
    obs = observations(IMAGE, 70)
    torch.testing.assert_close(exported(obs), model(obs), rtol=1e-4, atol=1e-5)
