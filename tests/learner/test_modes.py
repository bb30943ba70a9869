"""Modes of an update: training and evaluation mode, precision of matrix products."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from cases import sweep
from gymnasium import spaces
from practice_learner import LineLearner, make_data, make_module
from torch import nn

from maze_train import ConfigError, Progress, TrainingError
from maze_train.algorithms.dqn.model import build_dqn
from maze_train.algorithms.sac.model import build_soft_actor_critic
from maze_train.learner.modules import has_modes, matmul_precision
from maze_train.nets.actor_critic import build_actor_critic
from maze_train.nets.config import ModelConfig, ObservationNormalizationConfig, RecurrentConfig
from maze_train.nets.template import TemplateNet
from maze_train.spaces.describe import flat_space
from maze_train.spaces.tensors import sampled_for

BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (12, 12, 1), np.uint8)
MASKED = spaces.Dict({"at": BOX, "action_mask": spaces.MultiBinary(2)})
EYES = spaces.Dict({"at": BOX, "eye": IMAGE, "gear": spaces.Discrete(3)})
BUILDERS = {"actor_critic": build_actor_critic, "soft": build_soft_actor_critic}
ALL = {**BUILDERS, "values": partial(build_dqn, dueling=True)}


class OwnLine(nn.Module):
    """User-defined network, whose training mode may differ."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        return self.layer(x)


class OwnLinear(nn.Linear):
    """User-defined subclass of a PyTorch layer."""


class OwnTemplate(TemplateNet):
    """User-defined subclass of a template network."""


class Spy(nn.Module):
    """Network that records each switch of its mode."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.switches = []

    def forward(self, x):
        return self.layer(x)

    def train(self, mode=True):
        self.switches.append(mode)
        return super().train(mode)


class QuietSpy(Spy):
    """Spy that appears to be a network of the package."""

    __module__ = "maze_train.nets.spies"


def normalized(mode):
    """Return model settings with normalized observations."""
    return ModelConfig(normalization=ObservationNormalizationConfig(mode=mode))


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("space", [MASKED, EYES], ids=["masked", "eyes"])
@sweep(
    "config",
    [ModelConfig(hidden_sizes=[4], image_encoder="impala"), ModelConfig(), normalized("running")],
)
def test_template_networks_have_no_modes(config, space, kind):
    """Outputs of template networks are equal in training and evaluation mode."""
    model = ALL[kind](config, space, spaces.Discrete(2), 0)
    assert not has_modes(model)
    obs = sampled_for(flat_space(space), 4)
    evaluated = model.policy_params(obs)
    assert torch.equal(model.train().policy_params(obs), evaluated)


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(2, 1),
        nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.LayerNorm(3), nn.Linear(3, 1)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten()),
        nn.ModuleList([nn.ModuleDict({"a": nn.GELU()}), nn.Embedding(3, 2), nn.Identity()]),
    ],
    ids=lambda module: type(module).__name__,
)
def test_plain_layers_of_pytorch_have_no_modes(module):
    """These layers are equal in training and evaluation mode."""
    assert not has_modes(module)


@pytest.mark.parametrize(
    "module",
    [
        nn.Dropout(0.5),
        nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Identity(), nn.Dropout(0.1))),
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
        nn.ModuleList([nn.InstanceNorm2d(2)]),
        nn.RReLU(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)),
        nn.TransformerEncoderLayer(4, 2, 4),
        OwnLine(),
        OwnLinear(2, 1),
        nn.Sequential(nn.Linear(2, 1), OwnLinear(1, 1)),
        OwnTemplate(BOX, ModelConfig(), [4], 2),
        # On a GPU, recurrent layers of PyTorch only have gradients in training mode.
        nn.GRU(2, 2),
        build_actor_critic(ModelConfig(rnn=RecurrentConfig(size=4)), BOX, spaces.Discrete(2), 0),
    ],
    ids=lambda module: type(module).__name__,
)
def test_layers_with_modes_are_detected(module):
    """Dropout, batch norm and unknown modules are detected at any depth."""
    assert has_modes(module)


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_custom_network_gives_the_model_modes(kind, role):
    """A single custom network is sufficient."""
    node = {"_target_": f"{__name__}.OwnAnything"}
    model = BUILDERS[kind](ModelConfig(**{role: node}), BOX, spaces.Discrete(2), 0)
    assert has_modes(model)


class OwnAnything(nn.Module):
    """User-defined network for any role."""

    def __init__(self, observation_space, output_size, action_size=0):
        super().__init__()
        self.layer = nn.Linear(3 + action_size, output_size)

    def forward(self, obs, *actions):
        return self.layer(torch.cat([obs, *actions], -1))


def test_learner_switches_modules_with_modes_only():
    """Only modules with modes are switched, during the steps of an update."""
    learner = LineLearner({"a": Spy(), "b": QuietSpy(), "c": Spy()})
    for module in learner.modules.values():
        module.eval()
        module.switches.clear()
    for _ in range(2):
        learner.update({"a": make_data(0), "b": make_data(1)}, Progress())
    switches = {key: module.switches for key, module in learner.modules.items()}
    assert switches == {"a": [True, False, True, False], "b": [], "c": []}
    losses = sorted(call for call in learner.calls if call.startswith("loss "))
    assert losses == ["loss a train"] * 6 + ["loss b eval"] * 6


# -- precision of products -----------------------------------------------------------------------

NAMES = ["highest", "high", "medium"]


@pytest.fixture(autouse=True)
def _precision():
    """Restore the precision after each test."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("outside", NAMES)
@pytest.mark.parametrize("inside", NAMES)
def test_matmul_precision_is_restored(inside, outside):
    """The precision is restored after the block, also after an error."""
    torch.set_float32_matmul_precision(outside)
    for error in (None, KeyError("lost")):
        expected = pytest.raises(KeyError, match="lost") if error else nullcontext()
        with expected, matmul_precision(inside):
            assert torch.get_float32_matmul_precision() == inside
            if error:
                raise error
        assert torch.get_float32_matmul_precision() == outside


def test_unknown_precision_raises():
    """The error lists the allowed names."""
    with pytest.raises(ConfigError, match=r"precision = 'fast'.*medium"), matmul_precision("fast"):
        pass
    assert torch.get_float32_matmul_precision() == "highest"


class Witness(LineLearner):
    """Learner that records the precision at each call."""

    def note(self, call):
        super().note((call.rstrip(" 0123456789"), torch.get_float32_matmul_precision()))


@pytest.mark.parametrize("settings", [{"matmul_precision": name} for name in NAMES] + [{}], ids=str)
def test_precision_applies_to_learner_steps_only(settings):
    """The precision applies to losses, gradients and steps only.

    The default is the outer precision, which is restored after errors and non-finite gradients.
    """
    torch.set_float32_matmul_precision("high")
    learner = Witness(make_module(), **settings)
    data = make_data()
    data[:, 2] = torch.nan
    for experience, error in ((make_data(), None), (data, TrainingError), (data[0], IndexError)):
        learner.calls.clear()
        with pytest.raises(error) if error else nullcontext():
            learner.update(experience, Progress())
        assert torch.get_float32_matmul_precision() == "high"
        inside = settings.get("matmul_precision", "high")
        found = dict(learner.calls)
        assert found.pop("before") == "high"
        steps = {"losses"}
        if error is None:
            assert found.pop("after") == "high"
            steps = {"losses", "loss default train", "gradients", "apply", "after step"}
        assert {name: found.get(name) for name in steps} == dict.fromkeys(steps, inside)
