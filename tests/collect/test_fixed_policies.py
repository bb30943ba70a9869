"""Policies without networks among those of several agents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maze_train.collect.collector import Actor, chosen_actions, draws, env_actions
from maze_train.collect.fixed_policies import fixed_policy, random_policy
from maze_train.collect.league import LeagueModel
from maze_train.core.errors import ConfigError
from maze_train.nets.joint import JointModel
from maze_train.spaces.describe import unflatten_value
from maze_train.spaces.tensors import part_of

SEEN = spaces.Box(-1.0, 1.0, (2,), np.float32)
ACTIONS = [
    spaces.Discrete(4, start=2),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary(3),
    spaces.Box(-2.0, 3.0, (2,), np.float32),
    spaces.Box(-np.inf, np.inf, (1,), np.float32),
    spaces.Dict({"go": spaces.Box(0, 9, (2,), np.int64), "say": spaces.Discrete(3)}),
]
N = 400


def actions_of(policy: Any, obs: Any, deterministic: bool) -> Any:
    """Actions of an agent with a policy, as environments get them."""
    model: Any = JointModel({"a": policy}, {"agent": "a"})
    obs = {f"agents/agent/{key}" if key else "agents/agent": x for key, x in obs.items()}
    obs["acts"] = torch.ones(N, 1)
    noise = None
    if draws(model.distribution, deterministic):
        noise = model.distribution.draw_noise((N,), torch.Generator().manual_seed(1))
    params = model.policy_params(obs)
    found = chosen_actions(model.distribution, params, noise, deterministic)
    return part_of(env_actions(model.distribution, found), "agent")  # type: ignore[arg-type]


@pytest.mark.parametrize("space", ACTIONS, ids=str)
@pytest.mark.parametrize("deterministic", [True, False])
def test_random_actions_are_in_the_space_and_differ(space: Any, deterministic: bool) -> None:
    """They are drawn where the most likely actions of the others are taken as well."""
    found = actions_of(random_policy(SEEN, space), {"": torch.zeros(N, 2)}, deterministic)
    rows = [
        unflatten_value(space, {key: x[i] for key, x in found.items()})
        if isinstance(found, dict)
        else found[i]
        for i in range(N)
    ]
    assert all(space.contains(row) for row in rows)
    assert len({str(row) for row in rows}) > 3


def test_random_actions_are_uniform_over_the_legal_ones() -> None:
    """Of four actions two are legal."""
    seen = spaces.Dict({"observation": SEEN, "action_mask": spaces.MultiBinary(4)})
    mask = torch.tensor([0.0, 1.0, 0.0, 1.0]).expand(N, 4)
    policy = random_policy(seen, spaces.Discrete(4))
    obs = {"observation": torch.zeros(N, 2), "action_mask": mask}
    counts = np.bincount(actions_of(policy, obs, True), minlength=4)
    assert counts[0] == counts[2] == 0
    assert abs(counts[1] - N / 2) < 4 * np.sqrt(N / 4)


@pytest.mark.parametrize("space", ACTIONS, ids=str)
def test_the_policy_of_a_user_acts_on_single_observations(space: Any) -> None:
    """What it returns arrives at the environment."""
    given = [space.sample() for _ in range(N)]
    node = {"_target_": f"{__name__}.Replay"}
    Replay.actions = iter(given)
    seen = spaces.Dict({"x": SEEN, "y": spaces.Discrete(3)})
    policy = fixed_policy(node, "policies.a.source", seen, space)
    found = actions_of(policy, {"x": torch.ones(N, 2), "y": torch.arange(N) % 3}, False)
    leaves = found if isinstance(found, dict) else {"": found}
    for key, column in leaves.items():
        expected = np.stack([row[key] if key else row for row in given])
        np.testing.assert_allclose(column, expected, rtol=1e-5, atol=1e-6)


class Replay:
    """Returns actions that were written down."""

    actions: Any

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self._seen = 0

    def act(self, observation: Any) -> Any:
        assert observation["x"].shape == (2,)
        assert observation["y"] == self._seen % 3
        self._seen += 1
        return next(self.actions)


class CountsTurns:
    """Acts with the number of its turns since it was reset."""

    made = 0

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        CountsTurns.made += 1

    def reset(self, seed: int | None = None) -> None:
        assert seed is None
        self.turns = 0

    def act(self, observation: Any) -> int:
        assert observation.tolist() == [1.0, 1.0]  # that of an agent that acts
        self.turns += 1
        return self.turns


class NeedsSeed(CountsTurns):
    """Cannot be reset without a seed."""

    def reset(self, seed: int) -> None:  # type: ignore[override]
        raise AssertionError


class Single(CountsTurns):
    """Is there once."""

    def __new__(cls, *spaces: Any) -> Any:
        return cls.__dict__.get("one") or super().__new__(cls)

    def reset(self, seed: int | None = None) -> None:
        type(self).one = self  # type: ignore[attr-defined]


def counting(name: str = "CountsTurns") -> Any:
    """A policy of a class of this module that two agents share, and its model."""
    node = {"_target_": f"{__name__}.{name}"}
    policy = fixed_policy(node, "policies.a.source", SEEN, spaces.Discrete(9, start=1))
    return JointModel({"a": policy}, {"first": "a", "second": "a"})


def test_a_policy_that_is_reset_hears_where_episodes_begin() -> None:
    """Each agent has one of its own in each episode, asked in its turns alone, also in a league."""
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
            params = actor.params({**seen, "acts": torch.tensor(acts)})
            found = env_actions(actor.model.distribution, actor.model.distribution.mode(params))
            count += acts
            for i, agent in enumerate(model.agents):
                chosen = found[agent] if isinstance(found, dict) else ()
                assert np.array_equal(chosen * acts[:, i], count[:, i] * acts[:, i])
            ended = (count.max(1) == 9) | (generator.random(2) < 0.2)
            actor.forget(ended)
            count[ended] = 0
    assert CountsTurns.made <= 10  # they are used again; one was made to look at it
    again = Actor(counting(), 2)
    again.hidden_state = actors[0].hidden_state.clone()
    ones = torch.ones(2, 2)
    found = again.params({"agents/first": ones, "agents/second": ones, "acts": ones})
    assert found.tolist() == [[1.0, 1.0]] * 2  # in a run that continues they start over
    first = model.by_policy["a"].policy_params(torch.ones(3, 2))
    assert first.tolist() == [[1.0]] * 3


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("NeedsSeed", r"source = 'NeedsSeed': .* missing a required argument: 'seed'"),
        ("Single", "same object twice"),
    ],
)
def test_policies_that_can_not_be_reset_are_refused(name: str, problem: str) -> None:
    """Key, value, remedy."""
    ones = torch.ones(2, 2)
    with pytest.raises(ConfigError, match=problem):
        Actor(counting(name), 2).params({"agents/first": ones, "agents/second": ones, "acts": ones})
