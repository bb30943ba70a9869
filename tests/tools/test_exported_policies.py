"""Exported files act like their policies, for all algorithms, formats and batch sizes."""

from __future__ import annotations

import functools
import itertools
import json
import re
import sys

import numpy as np
import pytest
import torch
from cases import everyday, sweep
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from torch import nn

from maze_train.algorithms.dqn.model import build_dqn
from maze_train.algorithms.sac.model import build_soft_actor_critic
from maze_train.algorithms.td3.model import build_td3
from maze_train.collect.fixed_policies import random_policy
from maze_train.core.errors import ConfigError, ExportError, MissingExtraError
from maze_train.core.types import leaves_by_key
from maze_train.nets.actor_critic import build_actor_critic
from maze_train.nets.config import ModelConfig, ObservationNormalizationConfig, RecurrentConfig
from maze_train.nets.policy_model import build_policy
from maze_train.spaces.agents import AgentSpaces
from maze_train.spaces.describe import FlatView, flatten_value, space_from_dict, unflatten_value
from maze_train.tools import export as formats
from maze_train.tools.export import PolicyStep, drawn_observations, export_policy
from maze_train.training.config import PolicyConfig
from maze_train.training.multi_agent_models import build_joint_model
from maze_train.training.policy_files import TrainedPolicy

VECTOR = spaces.Box(-np.inf, np.inf, (5,), np.float64)
IMAGE = spaces.Box(0, 255, (40, 36, 3), np.uint8)
PARTS = spaces.Dict({"at": VECTOR, "gear": spaces.Discrete(3, start=1), "view": IMAGE})
MASKED = spaces.Dict({"at": VECTOR, "action_mask": spaces.MultiBinary(4)})
TWO_MASKS = spaces.Dict({"at": VECTOR, "action_mask": spaces.MultiBinary(5)})
FORCE = spaces.Box(np.array([-0.1, -2.0], np.float32), np.array([0.1, 0.5], np.float32))
HYBRID = spaces.Tuple((spaces.Discrete(3), spaces.Dict({"force": FORCE})))
SWITCHES = spaces.Dict({"level": spaces.Box(-5, 9, (2, 2), np.int32), "on": spaces.MultiBinary(3)})
RUNNING = ObservationNormalizationConfig(mode="running")
LSTM, GRU = (RecurrentConfig(cell=cell, size=4, layers=2) for cell in ("lstm", "gru"))
AGENTS = AgentSpaces(
    {"first": VECTOR, "second": VECTOR, "other": MASKED},
    {"first": HYBRID, "second": HYBRID, "other": spaces.Discrete(4)},
)
BETA = {"Box": {"_target_": "maze_train.Beta"}}

CASES = {
    "vector": (build_actor_critic, VECTOR, spaces.Discrete(4, start=2), {}),
    "image": (build_actor_critic, IMAGE, spaces.MultiDiscrete([2, 3]), {}),
    "impala": (build_actor_critic, IMAGE, FORCE, {"image_encoder": "impala"}),
    "lstm": (build_actor_critic, VECTOR, HYBRID, {"rnn": LSTM}),
    "gru": (build_actor_critic, PARTS, spaces.Discrete(3), {"rnn": GRU}),
    "normalized": (build_policy, PARTS, HYBRID, {"normalization": RUNNING}),
    "critic's own": (build_actor_critic, PARTS, spaces.Discrete(3), {"critic_obs": ["view", "at"]}),
    "masked": (build_actor_critic, MASKED, spaces.Discrete(4), {}),
    "two masks": (build_actor_critic, TWO_MASKS, spaces.MultiDiscrete([2, 3]), {}),
    "switches": (build_actor_critic, spaces.Discrete(7), SWITCHES, {}),
    "beta": (build_actor_critic, VECTOR, FORCE, {"distributions": BETA}),
    "sac": (build_soft_actor_critic, VECTOR, FORCE, {}),
    "sac hybrid": (build_soft_actor_critic, VECTOR, HYBRID, {}),
    "td3": (build_td3, VECTOR, FORCE, {}),
    "dqn": (build_dqn, MASKED, spaces.Discrete(4), {"num_quantiles": 3, "dueling": True}),
    "agents": (build_actor_critic, AGENTS, None, {}),
    "agents with memory": (build_actor_critic, AGENTS, None, {"rnn": GRU}),
}


def build(name, **policies):
    """Return the policy of a case, whose actions differ between observations."""
    make, *here, settings = CASES[name]
    settings, others = dict(settings), {}
    for key in ("num_quantiles", "dueling"):
        if key in settings:
            others[key] = settings.pop(key)
    config = ModelConfig(hidden_sizes=[8], branch_size=4, **settings)
    if here[0] is AGENTS:
        model = build_joint_model(make, config, AGENTS, policies, seed=1)
        here = AGENTS.observation_space, AGENTS.action_space
    else:
        model = make(config, *here, seed=1, **others)
    with torch.no_grad():
        for key, param in model.named_parameters():
            if "policy" in key:
                param.mul_(3.0)
        if name == "normalized":
            model.normalizer.update({"at": 5.0 * torch.randn(9, 5) + 2.0})
    return TrainedPolicy(model, *here)


def observations(policy, n, seed=0):
    """Return flattened observations of `n` environments; every second one allows all actions."""
    view = FlatView(policy.observation_space)
    drawn = dict(FlatView(batch_space(view.space, n)).read(sample(view.space, n, seed)))
    for key, leaf in drawn.items():
        if key.endswith("action_mask"):
            leaf[::2] = 1
            leaf[..., [0, -1]] = 1
    return drawn


def sample(space, n, seed):
    """Sample a batch of observations."""
    batched = batch_space(space, n)
    batched.seed(seed)
    return batched.sample()


def named(start, leaves):
    """Return arrays by their names in exported files."""
    return {f"{start}/{key}" if key else start: np.asarray(leaf) for key, leaf in leaves.items()}


def opened(path, kind):
    """Return the description of a file and a function that runs it, without using maze_train."""
    files = {formats.DESCRIPTION: ""}
    if kind == "onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(path)
        names = [output.name for output in session.get_outputs()]
        text = session.get_modelmeta().custom_metadata_map[formats.DESCRIPTION]
        return text, lambda arrays: dict(zip(names, session.run(names, arrays), strict=True))
    module = torch.export.load(path, extra_files=files).module()

    def run(arrays):
        found = module({name: torch.from_numpy(array) for name, array in arrays.items()})
        return {name: output.numpy() for name, output in found.items()}

    return files[formats.DESCRIPTION], run


def check_actions(policy, run, given):
    """Assert that a function returns the actions of the policy, step by step."""
    for n in (1, 6):
        policy.reset()
        state = {"state": np.zeros((n, getattr(policy.model, "state_size", 0)), np.float32)}
        for step in range(3):
            leaves = observations(policy, n, seed=step)
            expected = policy.act(unflatten_value(policy.observation_space, leaves.get("", leaves)))
            inputs = {**named("obs", leaves), **(state if "state" in given else {})}
            outputs = run({key: value for key, value in inputs.items() if key in given})
            state = {"state": outputs.get("next_state")}
            flat = leaves_by_key(flatten_value(policy.action_space, expected))
            for key, value in named("action", flat).items():
                np.testing.assert_allclose(outputs[key], value, rtol=1e-4, atol=1e-5)
                assert (outputs[key].dtype, outputs[key].shape) == (value.dtype, value.shape)


def no_constant(word):
    """Raise AssertionError for NaN and infinities, which JSON does not have."""
    raise AssertionError(word)


IN_ONNX = "masked", "sac", "two masks", "switches", "beta", "td3", "impala", "lstm", "gru", "agents"
IN_TORCH = "lstm", "vector", "image", "normalized", "sac hybrid", "td3", "dqn", "agents with memory"
EVERY = [("masked", "onnx"), ("lstm", "torch_export")]
EVERY += [(name, "onnx") for name in IN_ONNX[1:]] + [
    (name, "torch_export") for name in IN_TORCH[1:]
]


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr")  # PyTorch 2.6
@pytest.mark.filterwarnings("ignore:Node lifted_tensor")
@pytest.mark.parametrize("case", everyday(2, EVERY), ids=" as ".join)
def test_exported_file_acts_like_the_policy(tmp_path, case):
    """An exported file matches the policy at other batch sizes and in recurrent steps."""
    name, kind = case
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
    policy = build(name)
    weights = list(policy.model.state_dict())
    export = export_policy(policy, tmp_path / f"policy{formats.FORMATS[kind].suffix}", format=kind)
    assert export.differences.largest < 1e-5
    assert export.source == "the space"
    assert list(policy.model.state_dict()) == weights
    text, run = opened(export.path, kind)
    check_actions(policy, run, export.inputs)
    described = json.loads(text, parse_constant=no_constant)
    assert described["inputs"] == export.inputs
    assert described["outputs"] == export.outputs
    for key in ("observation_space", "action_space"):
        assert space_from_dict(described[key]) == getattr(policy, key)


def test_exported_inputs_exclude_unused_observations(tmp_path):
    """Critic-only observations, rewards and dones are not inputs; `acts` only for recurrent agents.

    Action masks are inputs.
    """
    step = PolicyStep(build("agents"))
    assert PolicyStep(build("critic's own")).keys == ["gear"]
    agents = ["agents/first", "agents/second", "agents/other/action_mask", "agents/other/at"]
    assert step.keys == agents
    assert PolicyStep(build("agents with memory")).keys == [*agents, "acts"]


@sweep("name", CASES)
def test_exported_file_excludes_critics_and_targets(name):
    """Critics and target networks are excluded."""
    weights = PolicyStep(build(name)).state_dict()
    assert weights
    assert not [key for key in weights if re.search("critic|target|value_head", key)]


@pytest.mark.exhaustive
def test_exported_agent_takes_its_observations_only(tmp_path):
    """The file of one agent takes only its observations; policies without networks are rejected."""
    policies = {
        "team": PolicyConfig(agents=["first", "second"]),
        "chance": PolicyConfig(agents=["other"], source="random"),
    }
    policy = build("agents with memory", **policies)
    with pytest.raises(ConfigError, match=r"policies.chance.source: is random or.*agent=<name>"):
        export_policy(policy, tmp_path / "all", format="torch_export")
    with pytest.raises(ConfigError, match=r"agent = 'firts'.*did you mean 'first'"):
        export_policy(policy, tmp_path / "one", format="torch_export", agent="firts")
    export = export_policy(policy, tmp_path / "one", format="torch_export", agent="second")
    assert list(export.inputs) == ["obs", "state"]
    own = TrainedPolicy(policy.model.policies["team"], *AGENTS.of("second"))
    check_actions(own, opened(export.path, "torch_export")[1], export.inputs)
    seen = drawn_observations(policy.observation_space, policy.action_space)
    seen["acts"][:] = [agent == "second" for agent in AGENTS.agents]
    path = tmp_path / "one"
    assert export_policy(policy, path, "torch_export", "second", None, seen).source != export.source
    with pytest.raises(ConfigError, match="agent = 'first': only for multi-agent"):
        export_policy(build("vector"), tmp_path / "none", agent="first")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


CHANGES = {
    "nothing": (lambda name, x, call: x, None),
    "rounding": (lambda name, x, call: x * (1 + 2e-5) if name == "params" else x, None),
    "five actions": (lambda name, x, call: x + (name == "action" and call < 5), None),
    "six actions": (lambda name, x, call: x + (name == "action" and call < 6), "for 6 of"),
    "numbers": (lambda name, x, call: x + 1e-3 * (name == "params"), "by up to 1.0e-03"),
    "no number": (lambda name, x, call: x * np.nan if name == "params" else x, "by up to nan"),
    "shape": (lambda name, x, call: x[:, None], "the file returns"),
    "failure": (lambda name, x, call: 1 // 0, "cannot be run: ZeroDivisionError"),
}
"""Changes to the outputs of a file, and the error; its first eight calls have one observation."""


@pytest.mark.parametrize("change", CHANGES)
def test_differing_exported_file_raises_and_is_not_written(tmp_path, monkeypatch, change):
    """Differences beyond rounding raise ExportError, and an existing file is kept."""
    function, problem = CHANGES[change]
    kind, calls = formats.FORMATS["torch_export"], itertools.count()

    def changed(run, inputs):
        call = next(calls)
        return {
            name: np.asarray(function(name, x, call)).astype(x.dtype)
            for name, x in run(inputs).items()
        }

    def load(content):
        return functools.partial(changed, kind.load(content))

    monkeypatch.setitem(formats.FORMATS, "torch_export", kind._replace(load=load))
    path, policy = tmp_path / "policy.pt2", build("vector")
    path.write_bytes(b"earlier")
    if problem is None:
        found = export_policy(policy, path, format="torch_export").differences
        assert found.other_choices == 5 * (change == "five actions")
        assert path.read_bytes() != b"earlier"
    else:
        with pytest.raises(ExportError, match=problem):
            export_policy(policy, path, format="torch_export")
        assert path.read_bytes() == b"earlier"


class Fickle(nn.Module):
    """Network with data-dependent control flow."""

    def forward(self, obs):
        values = obs[..., :4].float()
        return values if obs.sum() > 0 else -values


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("onnx", "torch.export cannot trace the policy: .*custom networks must not"),
        ("torch_export", "torch.export cannot trace the policy"),
    ],
)
def test_untraceable_network_raises_export_error(tmp_path, kind, problem):
    """ExportError is raised, and no file is written."""
    if kind == "onnx":
        pytest.importorskip("onnxscript")
    policy = build("vector")
    policy.model.policy.net = Fickle()
    with pytest.raises(ExportError, match=problem):
        export_policy(policy, tmp_path / "policy", format=kind)
    assert list(tmp_path.iterdir()) == []


def test_unsupported_exports_raise(tmp_path, monkeypatch):
    """Unknown formats, policies without networks, and missing packages raise an error."""
    policy = build("vector")
    with pytest.raises(ConfigError, match=r"format = 'onix': expected one of onnx.*mean 'onnx'"):
        export_policy(policy, tmp_path / "policy", format="onix")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtraError, match=r"format=onnx needs .*'onnx.*maze-train\[onnx\]"):
        export_policy(policy, tmp_path / "policy")
    random = TrainedPolicy(random_policy(VECTOR, FORCE), VECTOR, FORCE)
    with pytest.raises(ConfigError, match="is random or custom code"):
        export_policy(random, tmp_path / "policy")
    assert list(tmp_path.iterdir()) == []


def test_export_does_not_change_the_recurrent_state(tmp_path):
    """Exporting does not change the recurrent state of the policy."""
    policy, other = build("lstm"), build("lstm")
    seen = [observations(policy, 2, seed)[""] for seed in range(3)]
    for obs in seen[:2]:
        policy.act(obs), other.act(obs)
    export_policy(policy, tmp_path / "policy", format="torch_export")
    expected = other.act(seen[2])
    for own, action in zip(policy.act(seen[2]), expected, strict=True):
        np.testing.assert_equal(own, action)
