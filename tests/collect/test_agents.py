"""Agents: custom policies of all kinds, random policies, models."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from actor_envs import ACTIONS, OBSERVATIONS, ActorEnv
from es_problems import WalkEnv, model_for
from gymnasium import spaces

from maze_train.collect.custom_policies import UniformPolicy
from maze_train.collect.play import Episode
from maze_train.collect.row_policies import UserRows, model_rows, random_rows
from maze_train.core.errors import ConfigError, SpaceError
from maze_train.envs.faults import EpisodeError
from maze_train.envs.slice import EnvSlice
from maze_train.nets.actor_critic import ActorCriticModel, build_actor_critic
from maze_train.nets.config import ModelConfig, RecurrentConfig
from maze_train.training.policy_files import TrainedPolicy


def started(make, count=3):
    """Return environments with a running episode each."""
    envs = EnvSlice.for_playing([make] * count)
    for i in range(count):
        envs.start(i, 10 + i)
    return envs


def acting(make, make_policy, count=3):
    """Return the actions of policies at the beginning of episodes."""
    envs = started(make, count)
    agent = UserRows(make_policy, envs)
    for i in range(count):
        agent.begin(i, Episode(0, 0, i))
    return agent.act()


# -- custom policies -----------------------------------------------------------------------------


def test_policies_get_copies_of_observations():
    """Policies get copies of the observations, nested and with the dtypes of the space."""
    seen = []

    def policy(observation):
        seen.append(observation)
        return {"gear": 2, "force": [0.5, -1]}

    make = partial(ActorEnv, "dict", "dict")
    envs = started(make)
    actions = UserRows(lambda: policy, envs).act()
    for column in envs.obs.values():
        column[:] = 0
    for i, observation in enumerate(seen):
        assert OBSERVATIONS["dict"].contains(observation)
        np.testing.assert_equal(observation, make().reset(seed=10 + i)[0])
    assert len(seen) == 3
    assert actions["gear"].tolist() == [2, 2, 2]
    assert actions["force"].tolist() == [[0.5, -1.0]] * 3
    assert actions["force"].dtype == np.float32


class Book:
    """Policy that records its calls."""

    calls: list[Any]

    def __init__(self):
        self.calls = []

    def act(self, observation):
        """Return action 1."""
        self.calls.append("act")
        return 1


def reset_of(reset):
    """Return a policy class with the given method `reset`."""
    return type("Policy", (Book,), {"reset": reset})


class Builtin(Book):
    """Policy whose method `reset` has no signature."""

    def __init__(self):
        super().__init__()
        self.reset = {}.clear


def reset_by_name(self, *, options=None, seed=7):
    """Record the seed, a keyword argument."""
    self.calls.append(seed)


def reset_by_place(self, number, /):
    """Record the seed, a positional argument."""
    self.calls.append(number)


def reset_alone(self, ended=None):
    """Record the call; there is no seed."""
    self.calls.append(ended or "reset")


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (reset_of(reset_by_name), [41, "act", "act", 42]),
        (reset_of(reset_by_place), [41, "act", "act", 42]),
        (reset_of(reset_alone), ["reset", "act", "act", "reset"]),
        (Builtin, ["act", "act"]),
        (Book, ["act", "act"]),
    ],
)
def test_policy_reset_is_called_at_episode_starts(policy, expected):
    """`reset` is called at each episode start, with a seed if it takes one."""
    built = []

    def make_policy():
        built.append(policy())
        return built[-1]

    envs = EnvSlice.for_playing([WalkEnv] * 3)
    envs.start(1, 10)
    agent = UserRows(make_policy, envs)
    assert len(built) == 3
    agent.begin(1, Episode(0, 0, 41))
    agent.act()
    agent.act()
    agent.begin(1, Episode(0, 0, 42))
    assert [one.calls for one in built] == [[], expected, []]


def test_one_object_for_several_episodes_is_refused():
    """A factory that returns the same object twice raises ConfigError."""
    shared = reset_of(reset_by_name)()
    with pytest.raises(ConfigError, match="same object twice; it must create a new object"):
        UserRows(lambda: shared, started(WalkEnv))


@pytest.mark.parametrize(
    ("actions", "given", "expected"),
    [
        ("discrete", np.int8(3), 3),
        ("discrete", np.array(2), 2),
        ("discrete", True, 1),
        ("box", (0.25, -0.5), [0.25, -0.5]),
        ("box", np.array([0, 0]), [0.0, 0.0]),
        ("box", np.array([0.1, 0.2]), [np.float32(0.1), np.float32(0.2)]),
    ],
)
def test_actions_of_other_dtypes_are_converted(actions, given, expected):
    """Actions of other dtypes are converted if their value is preserved."""
    found = acting(partial(WalkEnv, "box", actions), lambda: lambda _: given)
    assert found.dtype == ACTIONS[actions].dtype
    assert found.tolist() == [expected] * 3


LEARNED = torch.ones((), requires_grad=True)
NO_ACTIONS = {
    "discrete": [0, 4, 1.0, [1], None, "1", 2**70],
    "box": [
        *([0.3, 0.0], [float("nan"), 0.0], [float("-inf"), 0.0], [0.0], [[0.0], [0.0, 0.1]], 0.0),
        LEARNED,
    ],
    "dict": [{"gear": 1}, {"gear": 3, "force": [0, 0]}, [0, 0, 0], {"gear": LEARNED}],
}


@pytest.mark.parametrize(
    ("actions", "given"), [(kind, given) for kind in NO_ACTIONS for given in NO_ACTIONS[kind]]
)
def test_invalid_actions_raise(actions, given):
    """Invalid actions raise an error that names policy, action, space, step and seed."""

    def stubborn(observation):
        return given

    with pytest.raises(EpisodeError) as caught:
        acting(partial(WalkEnv, "box", actions), lambda: stubborn)
    told = str(caught.value)
    name = "test_agents.test_invalid_actions_raise.<locals>.stubborn"
    assert told.startswith(f"policy {name} failed at step 1 of the episode with seed 10: ")
    wrong = f" returned {given!r}, which is not in the action space {ACTIONS[actions]}"
    unread = "the action is invalid: RuntimeError: Can't call numpy"
    assert (unread if given is LEARNED else wrong) in told
    assert caught.value.seed == 10


def test_actions_out_of_range_raise():
    """Out-of-range values raise an error instead of wrapping around or becoming infinite."""

    class Boxed(WalkEnv):
        def __init__(self, *arguments):
            super().__init__()
            self.action_space = spaces.Box(*arguments)

    byte = partial(Boxed, 0, 255, (1,), np.uint8)
    free = partial(Boxed, -np.inf, np.inf, (1,), np.float32)
    assert acting(byte, lambda: lambda _: [44]).tolist() == [[44]] * 3
    for make, given in ((byte, [300]), (byte, [-1]), (free, [1e300])):
        with pytest.raises(EpisodeError, match="not in the action space"):
            acting(make, lambda given=given: lambda _: given)


# -- random policies -----------------------------------------------------------------------------


def test_random_actions_are_uniform():
    """Random actions are uniform over the legal ones and depend only on the seed of the episode."""
    space = spaces.Dict({"action_mask": spaces.MultiBinary(5)})
    actions = spaces.MultiDiscrete([3, 2], start=[4, 7])
    policy = UniformPolicy(space, actions)
    policy.reset(3)
    mask = np.array([1, 0, 1, 0, 1], np.int8)
    drawn = [tuple(policy.act({"action_mask": mask}).tolist()) for _ in range(600)]
    found = Counter(drawn)
    assert found.keys() == {(4, 8), (6, 8)}
    assert max(found.values()) < 360
    policy.reset(3)
    assert [tuple(policy.act({"action_mask": mask}).tolist()) for _ in range(600)] == drawn
    policy.reset(4)
    assert [tuple(policy.act({"action_mask": mask}).tolist()) for _ in range(600)] != drawn
    with pytest.raises(SpaceError, match="no action of choice 1 is legal"):
        policy.act({"action_mask": np.array([1, 0, 1, 0, 0], np.int8)})


@pytest.mark.parametrize("kind", ACTIONS)
def test_random_actions_cover_the_space(kind):
    """Random actions cover the whole action space."""
    envs = started(partial(WalkEnv, "box", kind), 8)
    agent = random_rows(envs)
    for i in range(8):
        agent.begin(i, Episode(0, 0, i))
    drawn = [agent.act() for _ in range(40)]
    if kind == "box":
        found = np.concatenate(drawn)
        assert -0.5 <= found.min() < -0.45
        assert 0.2 < found.max() <= 0.25
        assert len(np.unique(found)) == found.size
    else:
        choices = [actions["gear"] if kind == "dict" else actions for actions in drawn]
        assert set(np.ravel(choices)) == ({0, 1, 2} if kind == "dict" else {1, 2, 3})


# -- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["plain", "memory", "own"])
def test_frozen_models_act_unchanged(policy):
    """Frozen models act the same way; mode and weights are not changed."""
    model = model_for(WalkEnv, policy)
    envs = started(WalkEnv)
    expected = model_rows(model, envs).act()
    frozen = model_for(WalkEnv, policy).requires_grad_(False)
    agent = model_rows(frozen, envs)
    np.testing.assert_array_equal(agent.act(), expected)
    assert agent._population._memory.nbytes == 0  # one copy of the weights for all rows
    assert envs.action.space.contains(expected[0])


@pytest.mark.parametrize(
    ("memory", "shared"), [(None, True), (None, False), (RecurrentConfig(cell="gru", size=5), True)]
)
def test_actor_critic_acts_like_its_policy(memory, shared):
    """An actor-critic acts like its policy; the model is not changed."""
    envs = started(WalkEnv)
    found = envs.observation.space, envs.action.space
    config = ModelConfig(hidden_sizes=[6], rnn=memory, shared_trunk=shared)
    model = build_actor_critic(config, *found, seed=3).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    agent, expected = model_rows(model, envs), TrainedPolicy(model, *found)
    for _ in range(5):
        actions = agent.act()
        assert isinstance(actions, np.ndarray)
        np.testing.assert_array_equal(actions[:3], expected.act(envs.obs[""]))
        envs.actions[""][:] = actions[:3]
        envs.step()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert type(model) is ActorCriticModel
    assert model.training
