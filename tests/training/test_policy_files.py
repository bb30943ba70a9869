from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from maze_train.algorithms.ppo.config import PPOAlgorithmConfig
from maze_train.core.errors import ConfigError, RunDirectoryError, ShapeError, SpaceError
from maze_train.nets.actor_critic import build_actor_critic
from maze_train.nets.config import ModelConfig, RecurrentConfig
from maze_train.nets.joint import JointModel
from maze_train.nets.policy_model import build_policy
from maze_train.spaces.agents import AgentSpaces
from maze_train.training import models, policy_files
from maze_train.training import multi_agent_models as several_agents
from maze_train.training.evaluators import copy_of_weights
from maze_train.training.policy_files import (
    PolicyWriter,
    TrainedPolicy,
    read_score,
    read_spaces,
    read_weights,
)

BOX = spaces.Box(-np.inf, np.inf, (3,), np.float64)
IMAGE = spaces.Box(0, 255, (2, 2, 3), np.uint8)
NESTED = spaces.Dict({"pose": spaces.Tuple((BOX, spaces.Discrete(3, start=2))), "image": IMAGE})
FORCE = spaces.Box(np.array([-0.1, -2.0], np.float32), np.array([0.1, 0.5], np.float32))
ARM = spaces.Tuple((spaces.Discrete(3), spaces.Dict({"force": FORCE})))
MASKED = (
    spaces.Dict({"action_mask": spaces.MultiBinary(3), "place": BOX}),
    spaces.Discrete(3),
)

CASES = {
    "box-discrete": (BOX, spaces.Discrete(4, start=2)),
    "discrete-box": (spaces.Discrete(5, start=-1), FORCE),
    "image-multi": (IMAGE, spaces.MultiDiscrete([2, 3])),
    "nested-nested": (NESTED, ARM),
}


def make_model(observation_space, action_space, seed=1):
    """Return a model whose actions differ between observations."""
    model = build_actor_critic(
        ModelConfig(hidden_sizes=[8], branch_size=4), observation_space, action_space, seed
    )
    with torch.no_grad():
        for param in model.policy.parameters():
            param.mul_(30.0)
    return model


def saved(tmp_path, name):
    """Return a policy and the same policy after saving and loading."""
    observation_space, action_space = CASES[name]
    model = make_model(observation_space, action_space)
    writer = PolicyWriter(observation_space, action_space, "seed: 1\n")
    writer(tmp_path, copy_of_weights(model), {"score": 2.0})
    restored = make_model(*read_spaces(tmp_path), seed=2)
    restored.load_state_dict(read_weights(tmp_path))
    return TrainedPolicy(model, observation_space, action_space), TrainedPolicy(
        restored, *read_spaces(tmp_path)
    )


def observations(space, n):
    """Return samples of an observation space."""
    space.seed(0)
    return [space.sample() for _ in range(n)]


def batch(space, values):
    """Return observations in the batched format of Gymnasium."""
    return concatenate(space, values, create_empty_array(space, len(values)))


@pytest.mark.parametrize("name", CASES)
def test_loaded_policy_returns_the_same_actions(tmp_path, name):
    """Loaded policies return the same actions for single and batched observations."""
    policy, restored = saved(tmp_path, name)
    space, action_space = policy.observation_space, policy.action_space
    assert restored.observation_space == space
    assert restored.action_space == action_space
    obs = observations(space, 6)
    ours, theirs = ([p.act(x) for x in obs] for p in (policy, restored))
    assert all(action_space.contains(action) for action in ours)
    assert len({str(action) for action in ours}) > 1
    batched = restored.act(batch(space, obs))
    rows = list(iterate(batch_space(action_space, 6), batched))
    for a, b, c in zip(ours, theirs, rows, strict=True):
        for x, y, z in zip(*map(flat, (a, b, c)), strict=True):
            np.testing.assert_array_equal(x, y)
            np.testing.assert_allclose(x, z, rtol=1e-5, atol=1e-6)


def flat(value):
    """Return the arrays of a nested value."""
    if isinstance(value, dict):
        return [x for part in value.values() for x in flat(part)]
    return [x for part in value for x in flat(part)] if isinstance(value, tuple) else [value]


def test_batch_of_one_observation_returns_a_batch(tmp_path):
    """A batch of one observation returns a batch of one action."""
    policy, _ = saved(tmp_path, "box-discrete")
    obs = np.zeros(3)
    assert np.shape(policy.act(obs)) == ()
    assert np.shape(policy.act(obs[None])) == (1,)
    assert policy.act([0.0, 0.0, 0.0]) == policy.act(obs)


def test_sampled_actions_use_the_generator_of_the_policy():
    """Policies with the same seed sample equal actions; deterministic actions use no generator."""
    observation_space, action_space = CASES["box-discrete"]
    model = build_actor_critic(ModelConfig(), observation_space, action_space, 0)
    a, b, c = (TrainedPolicy(model, observation_space, action_space, seed=s) for s in (1, 1, 2))
    state = torch.get_rng_state()
    drawn = [[int(p.act(np.zeros(3), deterministic=False)) for _ in range(30)] for p in (a, b, c)]
    assert torch.equal(torch.get_rng_state(), state)
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(drawn[0]) == {2, 3, 4, 5}
    assert len({int(a.act(np.zeros(3))) for _ in range(10)}) == 1


def test_observations_of_wrong_shape_raise(tmp_path):
    """The error contains the shape and the space; all leaves of a batch are batched."""
    policy, _ = saved(tmp_path, "box-discrete")
    for obs in (np.zeros((2, 2, 3)), np.float64(1.0), np.zeros(4), np.zeros((2, 4))):
        with pytest.raises(SpaceError, match=r"neither one observation of Box.* nor a batch"):
            policy.act(obs)
    policy, _ = saved(tmp_path, "nested-nested")
    (obs,) = observations(NESTED, 1)
    with pytest.raises(SpaceError, match="neither one observation"):
        policy.act({**obs, "image": obs["image"][None]})
    with pytest.raises(SpaceError, match="'image' is missing"):
        policy.act({"pose": obs["pose"]})


def test_observation_without_legal_action_raises():
    """The error names the row of the batch; other observations are accepted."""
    policy = TrainedPolicy(make_model(*MASKED), *MASKED)
    masks = np.array([[0, 1, 0], [0, 0, 1], [0, 0, 0]], np.int8)
    places = np.zeros((3, 3))
    assert policy.act({"action_mask": masks[:2], "place": places[:2]}).tolist() == [1, 2]
    with pytest.raises(SpaceError, match="observation 2: no action is legal"):
        policy.act({"action_mask": masks, "place": places})
    with pytest.raises(SpaceError, match="no action is legal"):
        policy.act({"action_mask": masks[2], "place": places[2]})


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_non_finite_observation_raises(number):
    """Non-finite observations raise an error that names the position."""
    policy = TrainedPolicy(make_model(NESTED, ARM), NESTED, ARM)
    (obs,) = observations(NESTED, 1)
    obs["pose"][0][1] = number
    with pytest.raises(SpaceError, match=rf"'pose/0' is {number} at index \(0, 1\), expected a f"):
        policy.act(obs)


MULTI = spaces.MultiDiscrete([2, 3])
REFUSED = {
    "floats in an image": (IMAGE, np.full((2, 2, 3), 0.9), "dtype float64, its space has uint8"),
    "beyond a byte": (IMAGE, np.full((2, 2, 3), 300), "outside the range of uint8"),
    "below a byte": (IMAGE, [[[-1] * 3] * 2] * 2, "outside the range of uint8"),
    "a missing category": (spaces.Discrete(5), 5, r"is 5, which is not in Discrete\(5\)"),
    "one in a batch": (spaces.Discrete(5, start=1), [1, 5, 0], "is 0, which is not in Discrete"),
    "another entry's category": (MULTI, [2, 0], r"is \[2 0\], which is not in MultiDiscrete"),
    "a batch of those": (MULTI, [[0, 2], [2, 0]], r"is \[2 0\], which is not in MultiDiscrete"),
    "a float category": (spaces.Discrete(5), 1.5, "dtype float64, its space has int64"),
    "None": (BOX, [None, 0.0, 1.0], "dtype object, its space has float64"),
    "text": (BOX, ["1", "2", "3"], "dtype <U1, its space has float64"),
    "None alone": (spaces.Discrete(5), None, "dtype object, its space has int64"),
    "unequal rows": (BOX, [[1.0, 2.0, 3.0], [3.0]], "not a numeric array: .*inhomogeneous"),
    "what reset returns": (BOX, (np.zeros(3), {}), r"obs, info = env.reset\(\); policy.act\(obs\)"),
    "that of a Dict": (NESTED, ({"pose": ()}, {}), r"obs, info = env.reset\(\); policy.act\(obs\)"),
    "batches of two sizes": (
        spaces.Dict({"a": BOX, "b": spaces.Discrete(2)}),
        {"a": np.zeros((3, 3)), "b": np.zeros(2, int)},
        r"shape {'a': \[3, 3\], 'b': \[2\]} is neither",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_observations_raise_in_act(case):
    """Observations are validated in the same way in training and in `act`."""
    space, observation, problem = REFUSED[case]
    policy = TrainedPolicy(make_model(space, spaces.Discrete(2)), space, spaces.Discrete(2))
    for ask in (policy.act, policy.probabilities, policy.values):
        with pytest.raises(SpaceError, match=problem):
            ask(observation)


def remembering_policy():
    """Return a recurrent policy whose actions depend on its state; all calls are equal."""
    action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    config = ModelConfig(hidden_sizes=[8], rnn=RecurrentConfig(size=4))
    return TrainedPolicy(build_actor_critic(config, BOX, action_space, 1), BOX, action_space)


def test_reset_clears_states_of_ended_episodes():
    """`reset(ended)` resets only the states of ended episodes."""
    first, second = np.random.default_rng(0).normal(size=(2, 2, 3))
    new, kept, policy = (remembering_policy() for _ in range(3))
    for seen in (kept, policy):
        seen.act(first)
    policy.reset([True, False])
    actions = policy.act(second)
    begun, continued = new.act(second), kept.act(second)
    assert (begun != continued).all()
    np.testing.assert_array_equal(actions, [begun[0], continued[1]])


@pytest.mark.parametrize("rnn", [RecurrentConfig(size=4), None], ids=["recurrent", "feed-forward"])
def test_predict_equals_act_with_explicit_state(rnn):
    """As in Stable-Baselines3, `predict` keeps no state and starts episodes with zeros."""
    model = build_actor_critic(ModelConfig(hidden_sizes=[8], rnn=rnn), BOX, FORCE, 1)
    kept, passed = TrainedPolicy(model, BOX, FORCE), TrainedPolicy(model, BOX, FORCE)
    state, new = None, TrainedPolicy(model, BOX, FORCE)
    starts = np.array([[False, False], [False, False], [False, True], [False, False]])
    for obs, flags in zip(np.random.default_rng(0).normal(size=(4, 2, 3)), starts, strict=True):
        kept.reset(flags)
        actions, state = passed.predict(obs, state, episode_start=flags, deterministic=True)
        assert np.array_equal(actions, kept.act(obs))
    assert (None if state is None else state.shape) == (rnn and (2, 8))
    one, state = passed.predict(obs[0], deterministic=True)
    assert np.array_equal(one, new.act(obs[0]))
    assert (None if state is None else state.shape) == (rnn and (1, 8))
    assert not np.array_equal(one, passed.predict(obs[0])[0])  # sampled by default


def test_predict_with_wrong_number_of_rows_raises():
    """The message names the argument."""
    policy, obs = remembering_policy(), np.zeros((2, 3))
    with pytest.raises(ShapeError, match=r"state has shape \[1, 8\], expected \[2, 8\]"):
        policy.predict(obs, np.zeros((1, 8)))
    with pytest.raises(ShapeError, match=r"episode_start has shape \[3\], expected \[2\]"):
        policy.predict(obs, episode_start=[True] * 3)


def test_loaded_policy_returns_actions_of_waiting_agents():
    """Loaded and exported policies also return actions of agents that do not act."""
    agents = [f"a{i}" for i in range(64)]
    joint = AgentSpaces(dict.fromkeys(agents, BOX), dict.fromkeys(agents, spaces.Discrete(4)))
    model = JointModel({"main": make_model(BOX, spaces.Discrete(4))}, dict.fromkeys(agents, "main"))
    policy = TrainedPolicy(model, joint.observation_space, joint.action_space)
    joint.observation_space.seed(1)
    observation = joint.observation_space.sample()
    batch = {key: np.stack([value] * 8) for key, value in observation.items() if key != "agents"}
    batch["agents"] = {key: np.stack([x] * 8) for key, x in observation["agents"].items()}
    found = policy.act({**batch, "acts": np.zeros((8, 64), np.int8)})
    expected = policy.act({**batch, "acts": np.ones((8, 64), np.int8)})
    assert all(np.array_equal(found[agent], expected[agent]) for agent in agents)
    assert len({int(found[agent][0]) for agent in agents}) > 1


def test_reset_with_wrong_number_of_flags_raises(tmp_path):
    """The error contains both sizes, for recurrent and feedforward policies."""
    for policy in (remembering_policy(), saved(tmp_path, "box-discrete")[0]):
        policy.act(np.zeros((2, 3)))
        for ended in ([True], [True, False, True], True, [[True, False]]):
            with pytest.raises(ShapeError, match=r"ended has shape \[.*\], expected \[2\]"):
                policy.reset(ended)


def test_policy_files_contain_tensors_and_text_only(tmp_path):
    """Files contain tensors and text only; later training does not change them."""
    observation_space, action_space = CASES["box-discrete"]
    model = make_model(observation_space, action_space)
    writer = PolicyWriter(observation_space, action_space, "seed: 1\n")
    writer(tmp_path, copy_of_weights(model), {"score": 2.0, "epoch": 3})
    names = {"policy.pt", "spaces.json", "config.yaml", "score.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    sha256 = hashlib.sha256((tmp_path / "policy.pt").read_bytes()).hexdigest()
    assert read_score(tmp_path) == {"score": 2.0, "epoch": 3, "sha256": sha256}
    assert (tmp_path / "config.yaml").read_text() == "seed: 1\n"
    weights = read_weights(tmp_path)
    assert set(weights) == set(model.state_dict())
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert any(value.any() for value in read_weights(tmp_path).values())


@pytest.mark.parametrize("count", range(4))
def test_killed_replacement_keeps_old_or_new_policy(tmp_path, monkeypatch, count):
    """Either the old or the new weights exist, with the matching score or none."""
    spaces_of_it, replace = CASES["box-discrete"], os.replace
    both = [make_model(*spaces_of_it, seed) for seed in (1, 2)]
    writer = PolicyWriter(*spaces_of_it, "seed: 1\n")
    writer(tmp_path, copy_of_weights(both[0]), {"score": 0})
    left = [None] * count

    def replace_or_end(source, target, **folders):
        left.pop()
        replace(source, target, **folders)

    monkeypatch.setattr(os, "replace", replace_or_end)
    with pytest.raises(IndexError):
        writer(tmp_path, copy_of_weights(both[1]), {"score": 1})
    found, score = read_weights(tmp_path), read_score(tmp_path)
    same = [all(torch.equal(found[k], v) for k, v in m.state_dict().items()) for m in both]
    assert same == [count < 3, count == 3]
    assert score.get("score") in (None, same.index(True))
    assert not list(tmp_path.glob(".*"))  # no temporary file remains


def test_score_and_weights_read_together_match(tmp_path, monkeypatch):
    """Score and weights that are read belong together."""
    spaces_of_it = CASES["box-discrete"]
    both = [make_model(*spaces_of_it, seed) for seed in (1, 2)]
    writer = PolicyWriter(*spaces_of_it, "seed: 1\n")
    writer(tmp_path, copy_of_weights(both[0]), {"score": 0})
    read = policy_files.read_regular

    def replaced_before(path, *args):
        if path.name == "policy.pt" and read_score(tmp_path)["score"] == 0:
            writer(tmp_path, copy_of_weights(both[1]), {"score": 1})
        return read(path, *args)

    monkeypatch.setattr(policy_files, "read_regular", replaced_before)
    found = read_weights(tmp_path)
    assert all(torch.equal(found[key], value) for key, value in both[1].state_dict().items())
    (tmp_path / "policy.pt").write_bytes(b"damaged")
    with pytest.raises(RunDirectoryError, match="its sha256 differs"):
        read_weights(tmp_path)


ONE = torch.ones(2)
WEIGHTS = {
    "sparse": lambda: {"w": ONE.to_sparse()},
    "meta": lambda: {"w": ONE.to("meta")},
    "quantized": lambda: {"w": torch.quantize_per_tensor(ONE, 1.0, 0, torch.quint8)},
    "nested": lambda: {"w": torch.nested.nested_tensor([ONE, torch.ones(1)])},
    "repeated memory": lambda: {"w": ONE[:1].expand(1 << 40)},
    "a number": lambda: {"w": 1.0},
    "a list": lambda: [ONE],
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_other_than_dense_tensors_are_damaged(tmp_path, name):
    """Untrusted weights do not reach the model, and do not allocate memory."""
    torch.save(WEIGHTS[name](), tmp_path / "policy.pt")
    with pytest.raises(RunDirectoryError, match=r"policy\.pt is damaged: expected a mapping"):
        read_weights(tmp_path)


def test_state_dicts_are_weights(tmp_path):
    """Weights may be the result of `state_dict`, which has attributes."""
    model = torch.nn.Linear(2, 3)
    torch.save(model.state_dict(), tmp_path / "policy.pt")
    found = read_weights(tmp_path)
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[key], value) for key, value in model.state_dict().items())


def test_sparse_files_are_not_read(tmp_path):
    """A small file on disk cannot allocate gigabytes."""
    with open(tmp_path / "policy.pt", "wb") as file:
        file.truncate(1 << 31)
    with pytest.raises(RunDirectoryError, match=r"policy\.pt is .*sparse file"):
        read_weights(tmp_path)


GOOD = {"type": "Discrete", "n": 2, "start": 0, "dtype": "int64"}


def with_action_space(description):
    """Return the text of a file with an action space."""
    return json.dumps({"observation_space": GOOD, "action_space": description})


def nested(levels):
    """Return the description of a Tuple nested to a depth."""
    return {"type": "Tuple", "spaces": [nested(levels - 1)]} if levels else GOOD


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "{}", "null", "[" * 100_000, json.dumps({"observation_space": GOOD})),
        with_action_space({**GOOD, "n": 0}),
        with_action_space({"type": "Torus"}),
        with_action_space({**GOOD, "n": 10**11}),
        with_action_space({"type": "MultiBinary", "n": [10**6, 10**6]}),
        with_action_space({"type": "MultiDiscrete", "nvec": [10**11], "start": [0], "dtype": "i8"}),
        with_action_space({"type": "Box", "low": 0, "high": 1, "shape": [10**11], "dtype": "f4"}),
        with_action_space(nested(70)),
    ],
    ids=lambda text: text[-40:],
)
def test_damaged_spaces_file_raises(tmp_path, text):
    """The error names the missing or damaged file."""
    for _ in range(2):
        with pytest.raises(RunDirectoryError, match=r"spaces\.json"):
            read_spaces(tmp_path)
        (tmp_path / "spaces.json").write_text(text)


@pytest.mark.parametrize("name", ["box-discrete", "image-multi"])
def test_values_and_probabilities_match_the_model(name):
    """Values match the model, and the most likely action is taken."""
    observation_space, action_space = CASES[name]
    policy = TrainedPolicy(make_model(*CASES[name]), *CASES[name])
    obs = np.stack(observations(observation_space, 5))
    probs = policy.probabilities(obs)
    sizes = [4] if name == "box-discrete" else [2, 3]
    choices = np.split(probs, np.cumsum(sizes)[:-1], axis=-1)
    np.testing.assert_allclose([part.sum(-1) for part in choices], 1.0, rtol=1e-5)
    best = np.stack([part.argmax(-1) for part in choices], -1)
    taken = np.reshape(policy.act(obs), (5, -1)) - getattr(action_space, "start", 0)
    np.testing.assert_array_equal(best, taken)
    np.testing.assert_allclose(policy.probabilities(obs[0]), probs[0], rtol=1e-5)
    values = policy.values(obs)
    assert values.shape == (5,)
    assert len(set(values.tolist())) > 1
    np.testing.assert_allclose([policy.values(o) for o in obs], values, rtol=1e-4)


def test_probabilities_are_returned_by_component():
    """Probabilities by key; 0 for illegal actions; continuous actions raise an error."""
    space = spaces.Dict({"move": spaces.Discrete(3), "jump": spaces.MultiBinary(2)})
    policy = TrainedPolicy(make_model(BOX, space), BOX, space)
    found = policy.probabilities(np.zeros((2, 3)))
    assert {key: value.shape for key, value in found.items()} == {"move": (2, 3), "jump": (2, 4)}
    policy = TrainedPolicy(make_model(*MASKED), *MASKED)
    obs = {"action_mask": np.array([0, 1, 0], np.int8), "place": np.zeros(3)}
    assert policy.probabilities(obs).tolist() == [0, 1, 0]
    arm = TrainedPolicy(make_model(NESTED, ARM), NESTED, ARM)
    with pytest.raises(SpaceError, match="choices"):
        arm.probabilities(observations(NESTED, 1)[0])


def test_values_do_not_change_the_recurrent_state():
    """`values` and `probabilities` use but do not change the recurrent state."""
    first, second = np.random.default_rng(0).normal(size=(2, 2, 3))
    asked, alone = remembering_policy(), remembering_policy()
    before = asked.values(second)
    for policy in (asked, alone):
        policy.act(first)
    assert not np.allclose(asked.values(second), before)
    np.testing.assert_array_equal(asked.act(second), alone.act(second))
    config = ModelConfig(hidden_sizes=[8], rnn=RecurrentConfig(size=4))
    model = build_actor_critic(config, BOX, spaces.Discrete(3), 1)
    policies = [TrainedPolicy(model, BOX, spaces.Discrete(3)) for _ in range(2)]
    policies[0].probabilities(first)
    np.testing.assert_array_equal(*(policy.probabilities(second) for policy in policies))


def test_values_without_critic_raise():
    """The error lists algorithms with state values."""
    model = build_policy(ModelConfig(hidden_sizes=[8]), BOX, spaces.Discrete(3), 1)
    with pytest.raises(ConfigError, match="has no state values; available for A2C, PPO"):
        TrainedPolicy(model, BOX, spaces.Discrete(3)).values(np.zeros(3))


# -- weights of several modules ------------------------------------------------------------------


@dataclass(kw_only=True)
class OwnConfig(PPOAlgorithmConfig):
    """Settings of a custom algorithm."""

    name: ClassVar[str] = "own"
    supports_multi_agent: ClassVar[bool] = False


MANY, FEW = (spaces.Box(-1.0, 1.0, (size,), np.float32) for size in (4, 2))
CHOICE = spaces.Discrete(2)
SEVERAL = AgentSpaces({"a": MANY, "b": FEW, "c": FEW}, dict.fromkeys("abc", CHOICE))
ALIKE = AgentSpaces({"b": FEW, "c": FEW}, dict.fromkeys("bc", CHOICE))


@pytest.mark.parametrize(
    "pair",
    [(MANY, CHOICE), *((own.observation_space, own.action_space) for own in (SEVERAL, ALIKE))],
    ids=["one agent", "two policies", "a shared policy"],
)
def test_module_weights_are_mapped_to_model_names(pair):
    """Weights of modules are mapped to the names of the model."""
    model = several_agents.make_joint_model(
        PPOAlgorithmConfig(), ModelConfig(hidden_sizes=[3]), {}, *pair, seed=0
    )
    modules = {key: module.state_dict() for key, module in models.modules_of(model).items()}
    found, expected = several_agents.model_weights(modules, *pair), model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_single_agent_algorithm_raises_for_agents():
    """The error is raised before a model is built."""
    given = {}, SEVERAL.observation_space, SEVERAL.action_space
    with pytest.raises(
        ConfigError, match=r"algorithm = 'own': trains a single agent.*with supports_multi_agent"
    ):
        several_agents.make_joint_model(OwnConfig(), ModelConfig(), *given, seed=0)
