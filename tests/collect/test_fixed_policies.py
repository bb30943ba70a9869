"""Acting models without networks: random and custom policies, also multi-agent."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from actor_envs import ActorEnv, number_of
from gymnasium import spaces

from maze_train import SequentialVectorEnv
from maze_train.collect.collector import RolloutCollector
from maze_train.collect.fixed_policies import (
    RandomPolicy,
    WrappedPolicy,
    fixed_policy,
    random_policy,
)
from maze_train.core.errors import ConfigError, ShapeError, SpaceError
from maze_train.core.types import leaves_by_key, tree_leaves, tree_map
from maze_train.distributions.mapping import distribution_for
from maze_train.nets.acting import Actor, as_arrays
from maze_train.nets.joint import JointModel
from maze_train.spaces.describe import flatten_value
from maze_train.training.league import LeagueModel

SEEN = spaces.Box(-1.0, 1.0, (2,), np.float32)
CPU = torch.device("cpu")
SAMPLES = 20_000


class CountsTurns:
    """Policy whose action is the number of its turns since reset."""

    made = 0

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        CountsTurns.made += 1

    def reset(self, seed: int | None = None) -> None:
        assert seed is None
        self.turns = 0

    def act(self, observation: Any) -> int:
        assert observation.tolist() == [1.0, 1.0]  # observation of an acting agent
        self.turns += 1
        return self.turns


class NeedsSeed(CountsTurns):
    """Policy whose `reset` requires a seed."""

    def reset(self, seed: int) -> None:  # type: ignore[override]
        raise AssertionError


class Single(CountsTurns):
    """Policy class with a single instance."""

    def __new__(cls, *spaces: Any) -> Any:
        return cls.__dict__.get("one") or super().__new__(cls)

    def reset(self, seed: int | None = None) -> None:
        type(self).one = self  # type: ignore[attr-defined]


def counting(name: str = "CountsTurns") -> Any:
    """Return a model in which two agents share a policy class of this module."""
    node = {"_target_": f"{__name__}.{name}"}
    policy = fixed_policy(node, "policies.a.source", SEEN, spaces.Discrete(9, start=1))
    return JointModel({"a": policy}, {"first": "a", "second": "a"})


def test_policy_objects_are_reset_per_agent_and_episode() -> None:
    """Each agent and episode has a policy object that acts only in its turns, also in leagues."""
    CountsTurns.made = 0
    model = counting()
    actors = [Actor(kind, 2) for kind in (model, LeagueModel(model, []))]
    turns = {actor: np.zeros((2, 2), int) for actor in actors}
    generator = np.random.default_rng(0)
    for _ in range(40):
        for actor, count in turns.items():
            acts = generator.integers(2, size=(2, 2))
            obs = {f"agents/{agent}": acts[:, i : i + 1] for i, agent in enumerate(model.agents)}
            seen: Any = {key: torch.tensor(x).expand(2, 2).float() for key, x in obs.items()}
            acted = actor.act({**seen, "acts": torch.tensor(acts)}, None, True)
            found = as_arrays(acted.env_actions)
            count += acts
            for i, agent in enumerate(model.agents):
                chosen = found[agent] if isinstance(found, dict) else ()
                assert np.array_equal(chosen * acts[:, i], count[:, i] * acts[:, i])
            ended = (count.max(1) == 9) | (generator.random(2) < 0.2)
            actor.forget(ended)
            count[ended] = 0
    assert CountsTurns.made <= 10  # objects are reused; one was built for inspection
    again = Actor(counting(), 2)
    again.hidden_state = actors[0].hidden_state.clone()
    ones = torch.ones(2, 2)
    obs = {"agents/first": ones, "agents/second": ones, "acts": ones}
    sent: Any = again.act(obs, None, True).env_actions  # a resumed run resets policies
    assert [sent[agent].tolist() for agent in ("first", "second")] == [[1, 1]] * 2
    alone: Any = Actor(model.by_policy["a"], 3).act(torch.ones(3, 2), None, True).env_actions
    assert alone.tolist() == [1] * 3


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("NeedsSeed", r"source = 'NeedsSeed': .* missing a required argument: 'seed'"),
        ("Single", "same object twice"),
    ],
)
def test_policies_without_reset_raise(name: str, problem: str) -> None:
    """A policy that cannot be reset raises ConfigError with key, value and remedy."""
    ones = torch.ones(2, 2)
    obs = {"agents/first": ones, "agents/second": ones, "acts": ones}
    with pytest.raises(ConfigError, match=problem):
        Actor(counting(name), 2).act(obs, None, True)


# -- one agent ---------------------------------------------------------------------------------

INF = np.inf


def draw(policy, obs, seed=0):
    """Return the actions of a policy, as stored and as sent to the environment."""
    n = len(tree_leaves(obs)[0])
    noise = policy.draw_noise((n,), torch.Generator().manual_seed(seed), CPU)
    acted = Actor(policy, n).act(obs, noise, False)
    return acted.actions, as_arrays(acted.env_actions)


def random_actions(space, overrides=None, n=SAMPLES, seed=0):
    """Return random actions of a space as sent to the environment."""
    policy = RandomPolicy(distribution_for(space, overrides), space)
    return draw(policy, torch.zeros(n, 3), seed)[1]


def assert_distributed(samples, distribution_function):
    """Check the distribution of samples with a Kolmogorov-Smirnov test at level 1e-4.

    The maximum distance is sqrt(-log(level / 2) / 2n).
    """
    points = np.sort(samples.astype(np.float64))
    expected = distribution_function(points)
    steps = np.arange(len(points) + 1) / len(points)
    distance = max(np.abs(expected - steps[1:]).max(), np.abs(expected - steps[:-1]).max())
    assert distance < math.sqrt(-math.log(1e-4 / 2) / (2 * len(points)))


def normal_function(x):
    """Distribution function Φ of the standard normal distribution."""
    return 0.5 * (1.0 + torch.erf(torch.from_numpy(x) / math.sqrt(2.0)).numpy())


def test_random_box_actions_follow_their_bounds():
    """Entries are uniform between two bounds, exponential with one bound, normal without bounds."""
    low = np.array([[-1.0, 2.0], [-INF, -INF]], np.float32)
    high = np.array([[3.0, INF], [-5.0, INF]], np.float32)
    space = spaces.Box(low, high)
    actions = random_actions(space)
    assert actions.shape == (SAMPLES, 2, 2)
    assert actions.dtype == np.float32
    assert all(space.contains(action) for action in actions[:1000])
    assert_distributed(actions[:, 0, 0], lambda x: (x + 1.0) / 4.0)
    assert_distributed(actions[:, 0, 1], lambda x: 1.0 - np.exp(2.0 - x))
    assert_distributed(actions[:, 1, 0], lambda x: np.exp(x + 5.0))
    assert_distributed(actions[:, 1, 1], normal_function)
    assert np.abs(np.corrcoef(actions.reshape(SAMPLES, 4).T) - np.eye(4)).max() < 0.04


def test_random_actions_of_the_widest_box_are_finite():
    """With the widest bounds, actions are finite and within the bounds."""
    limit = np.finfo(np.float32).max
    ends = torch.tensor([[0.0], [0.5], [1.0 - 2.0**-24]])
    for bound in (limit, INF):
        space = spaces.Box(-bound, bound, (1,), np.float32)
        policy = RandomPolicy(distribution_for(space), space)
        acted = Actor(policy, 3).act(torch.zeros(3, 2), ends, False)
        assert acted.actions.isfinite().all()
        sent = acted.env_actions.numpy()
        assert all(space.contains(action) for action in sent)
        if bound == limit:
            np.testing.assert_allclose(sent / limit, [[-1.0], [0.0], [1.0]], atol=1e-6)


@pytest.mark.parametrize("family", ["diagonal_gaussian", "squashed_gaussian", "beta"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int16])
def test_random_actions_do_not_depend_on_the_distribution(family, dtype):
    """The environment gets the same random actions for every family; stored actions differ."""
    space = spaces.Box(
        np.array([-2, 10, 0], dtype), np.array([5, 12, 100], dtype), (3,), dtype=dtype
    )
    expected = random_actions(space, n=500)
    assert expected.dtype == dtype
    policy = RandomPolicy(distribution_for(space, {"Box": family}), space)
    stored, actions = draw(policy, torch.zeros(500, 3))
    assert stored.dtype == torch.float32
    tolerance = 0 if dtype == np.int16 else 1e-5
    np.testing.assert_allclose(actions, expected, rtol=tolerance, atol=10 * tolerance)
    log_probs = distribution_for(space, {"Box": family}).log_prob(torch.zeros(500, 6), stored)
    assert log_probs.isfinite().all()


@pytest.mark.parametrize(
    ("space", "kinds"),
    [
        (spaces.Discrete(5, start=-3), 5),
        (spaces.MultiDiscrete([2, 4], start=[1, 5]), 8),
        (spaces.MultiBinary((2, 2)), 16),
        *((spaces.Box(3, 8, (1,), dtype), 6) for dtype in (np.uint8, np.int32, np.int64)),
    ],
)
def test_random_discrete_actions_are_uniform(space, kinds):
    """All discrete actions are equally frequent, including the bounds of integer Boxes."""
    actions = random_actions(space)
    assert actions.dtype == space.dtype
    assert all(space.contains(action) for action in actions[:200])
    codes, counts = np.unique(actions.reshape(SAMPLES, -1), axis=0, return_counts=True)
    assert len(codes) == kinds
    # Five standard deviations.
    assert np.abs(counts - SAMPLES / kinds).max() < 5 * math.sqrt(SAMPLES / kinds * (1 - 1 / kinds))


NESTED = spaces.Dict(
    {
        "gear": spaces.Discrete(4, start=1),
        "arm": spaces.Tuple(
            (spaces.Box(-2.0, 1.0, (2,), np.float32), spaces.MultiDiscrete([3, 2]))
        ),
        "lamps": spaces.MultiBinary(2),
    }
)


@pytest.mark.parametrize("state_dependent_std", [False, True])
def test_random_nested_actions_are_independent(state_dependent_std):
    """Components of nested actions are drawn independently, with any layout of parameters."""
    override = {"name": "diagonal_gaussian", "state_dependent_std": state_dependent_std}
    policy = RandomPolicy(distribution_for(NESTED, {"Box": override}), NESTED)
    actions = draw(policy, {"a": torch.zeros(SAMPLES, 3), "b": torch.zeros(SAMPLES)})[1]
    assert list(actions) == list(flatten_value(NESTED, NESTED.sample()))
    assert sorted(set(actions["gear"].tolist())) == [1, 2, 3, 4]
    assert sorted(set(map(tuple, actions["arm/1"].tolist()))) == [
        (i, k) for i in range(3) for k in range(2)
    ]
    for i in range(2):
        assert_distributed(actions["arm/0"][:, i], lambda x: (x + 2.0) / 3.0)
        assert abs(actions["lamps"][:, i].mean() - 0.5) < 0.02
    table = np.concatenate([part.reshape(SAMPLES, -1) for part in actions.values()], axis=1)
    assert np.abs(np.corrcoef(table.T) - np.eye(table.shape[1])).max() < 0.04


def test_random_actions_respect_masks():
    """Masked components are uniform over the legal actions; others are not restricted."""
    action_space = spaces.Dict(
        {"a": spaces.Discrete(4, start=2), "b": spaces.MultiDiscrete([2, 3])}
    )
    observation_space = spaces.Dict(
        {"x": spaces.Box(-1.0, 1.0, (1,)), "action_mask": spaces.Dict({"b": spaces.MultiBinary(5)})}
    )
    policy = random_policy(observation_space, action_space)
    masks = torch.tensor([[1, 0, 1, 0, 1], [0, 1, 0, 1, 0]], dtype=torch.int8).repeat(
        SAMPLES // 2, 1
    )
    actions = draw(policy, {"x": torch.zeros(SAMPLES, 1), "action_mask/b": masks})[1]
    first, second = actions["b"][::2], actions["b"][1::2]
    assert not first[:, 0].any()
    assert sorted(set(first[:, 1].tolist())) == [0, 2]
    assert abs((first[:, 1] == 2).mean() - 0.5) < 0.03
    assert (second == [1, 1]).all()
    counts = np.bincount(actions["a"], minlength=6)
    assert not counts[:2].any()
    assert np.abs(counts[2:] - SAMPLES / 4).max() < 5 * math.sqrt(SAMPLES / 4)


def test_random_actions_depend_on_the_generator():
    """Noise depends only on the given generator, not on the global one."""
    policy = RandomPolicy(distribution_for(NESTED), NESTED)
    noises = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(noises))
        before = torch.get_rng_state()
        generator = torch.Generator().manual_seed(seed)
        noises.append(policy.draw_noise((7, 3), generator, CPU))
        assert torch.equal(torch.get_rng_state(), before)
    assert noises[0].shape[:2] == (7, 3)
    assert torch.equal(noises[0], noises[1])
    assert (noises[0] != noises[2]).all()


class Recording:
    """Policy that applies a function to observations and records them."""

    def __init__(self, function):
        self.function = function
        self.seen = []

    def act(self, observations):
        self.seen.append(observations)
        return self.function(observations)


def rollout_of(given, make, family="diagonal_gaussian", num_envs=3, num_steps=8):
    """Return a rollout of environments with a custom policy."""
    env = SequentialVectorEnv([make] * num_envs)
    space = env.single_action_space
    distribution = distribution_for(space, {"Box": family})
    policy = WrappedPolicy(given, distribution, env.env_observation_space, space)
    return RolloutCollector(env, num_steps, env_seed=5, action_seed=7).collect_steps(policy)[0]


def by_marks(obs, actions):
    """Return actions that differ between states."""
    marks = (obs["a"] if isinstance(obs, dict) else obs)[:, 0]
    choice = (np.abs(marks) * 10).astype(np.int32) % 3
    force = np.stack([marks.clip(-0.5, 0.25), 0.1 * np.ones(len(marks))], axis=1)
    return {"discrete": 1 + choice, "box": force, "dict": {"gear": choice, "force": force}}[actions]


@pytest.mark.parametrize("obs", ["box", "dict"])
@pytest.mark.parametrize("family", ["diagonal_gaussian", "squashed_gaussian"])
@pytest.mark.parametrize("actions", ["discrete", "box", "dict"])
def test_custom_policies_act_in_rollouts(actions, family, obs):
    """Custom policies get observations as in the environment, which receives their actions."""
    given = Recording(partial(by_marks, actions=actions))
    rollout = rollout_of(given, partial(ActorEnv, obs, actions), family)
    assert len(given.seen) == 8
    goes_on = ~(rollout.terminated | rollout.truncated)
    following = leaves_by_key(rollout.obs)["a" if obs == "dict" else ""]
    for t, seen in enumerate(given.seen):
        stored = leaves_by_key(rollout.obs)
        assert leaves_by_key(seen).keys() == stored.keys()
        for key, leaf in leaves_by_key(seen).items():
            assert leaf.dtype == (np.int64 if key == "b" else np.float64)
            np.testing.assert_array_equal(leaf, stored[key][t])
        wanted = given.function(seen)
        for i in goes_on[t].nonzero().flatten().tolist():
            number = number_of(tree_map(lambda x, i=i: x[i], wanted))
            assert float(following[t + 1, i, 2]) == pytest.approx(number, abs=1e-5)


BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
PAIR = spaces.Dict({"gear": spaces.Discrete(3, start=1), "force": BOX})
REST = np.zeros((3, 2))


@pytest.mark.parametrize(
    ("space", "returned", "error", "words"),
    [
        (BOX, np.zeros((4, 2)), ShapeError, r"shape \(4, 2\), expected \(3, 2\)"),
        (BOX, np.zeros(2), ShapeError, r"shape \(2,\), expected \(3, 2\)"),
        (BOX, None, ShapeError, r"shape \(\), expected \(3, 2\)"),
        (BOX, [[0.0], [0.0, 1.0], [0.0]], ShapeError, r"not an array of shape \(3, 2\)"),
        (BOX, np.full((3, 2), "left"), SpaceError, r"dtype <U4, expected float32"),
        (BOX, np.array([[0, 0], [0, 0], [0, np.nan]]), SpaceError, r"nan\] for observation 2"),
        (BOX, np.full((3, 2), np.inf), SpaceError, r"inf inf\] for observation 0"),
        (spaces.Discrete(3), np.zeros(3), SpaceError, "dtype float64, expected int64"),
        (spaces.Discrete(3), [0, 3, 0], SpaceError, r": 3 for observation 1 is not in Disc"),
        (spaces.Discrete(3, start=1), [1, 0, 1], SpaceError, r": 0 for observation 1"),
        (spaces.MultiDiscrete([2, 3]), [[0, 1], [2, 2], [0, 0]], SpaceError, r"\[2 2\] for obs"),
        (spaces.MultiBinary(2), [[0, 1], [0, 2], [0, 0]], SpaceError, r"\[0 2\] for obs"),
        (PAIR, {"gear": [1, 1, 1]}, SpaceError, "incomplete actions: the leaf 'force' is missing"),
        (PAIR, REST, SpaceError, "incomplete actions: the leaf"),
        (PAIR, {"gear": [1, 1, 4], "force": REST}, SpaceError, r"\['gear'\]: 4 for"),
    ],
)
def test_invalid_actions_of_custom_policies_raise(space, returned, error, words):
    """Invalid actions raise an error that names the policy and the problem."""
    observation_space = spaces.Box(-1.0, 1.0, (1,))
    policy = WrappedPolicy(
        Recording(lambda obs: returned), distribution_for(space), observation_space, space
    )
    with pytest.raises(error, match=rf"^Recording\.act\(\).*{words}"):
        Actor(policy, 3).act(torch.zeros(3, 1), None, True)


@pytest.mark.parametrize(
    ("space", "returned"),
    [
        (BOX, np.zeros((3, 2), np.int64)),
        (BOX, torch.full((3, 2), 7.0)),
        (spaces.Discrete(3), np.array([0, 1, 2], np.uint8)),
        (spaces.MultiBinary(2), np.ones((3, 2), bool)),
        (PAIR, {"gear": [1, 2, 3], "force": [[0.0, 1.0]] * 3}),
    ],
)
def test_convertible_actions_of_custom_policies_are_accepted(space, returned):
    """Lists, tensors and other dtypes are accepted; values beyond bounds are clipped."""
    distribution = distribution_for(space)
    policy = WrappedPolicy(
        Recording(lambda obs: returned), distribution, spaces.Box(0, 1, (1,)), space
    )
    assert policy.draw_noise((4, 3), None, CPU).shape == (4, 3, 0)
    noise = policy.draw_noise((3,), None, CPU)
    sent = Actor(policy, 3).act(torch.zeros(3, 1), noise, False).env_actions
    returned = flatten_value(space, returned)
    for key, part in (sent if isinstance(sent, dict) else {"": sent}).items():
        wanted = np.asarray(returned[key] if key else returned, np.float64)
        leaf = space[key] if key else space
        if isinstance(leaf, spaces.Box):
            wanted = wanted.clip(leaf.low, leaf.high)
        assert part.numpy().dtype == leaf.dtype
        np.testing.assert_array_equal(part.numpy(), wanted)
