"""NaN and infinities in what environments return are named, or their episodes given up."""

from __future__ import annotations

import warnings

import gymnasium
import numpy as np
import pytest
from cases import sweep
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_envs import CountingEnv, SpoiltEnv
from vector_cases import FORKS, PLACES, here

from maze_train import EnvFactory
from maze_train.envs.atari import EpisodicLifeWrapper
from maze_train.envs.faults import FiniteCheck
from maze_train.envs.foreign import ForeignVectorEnv
from maze_train.envs.repair import episode_seed
from maze_train.errors import EnvError

BAD = [float("nan"), float("inf"), float("-inf")]


def between(*spoilt):
    """Two good environments around others."""
    return [SpoiltEnv, *[lambda k=k: SpoiltEnv(**k) for k in spoilt], SpoiltEnv]


pytestmark = FORKS


@pytest.mark.parametrize("make", PLACES)
@sweep("value", BAD)
@sweep(
    "case",
    [
        ("speed", r"observation 'speed' is {} at index \(1, 2\)"),
        ("temperature", r"observation 'temperature' is {}, expected"),
        ("reward", r"reward is {}, expected"),
    ],
)
def test_it_is_named(case, value, make):
    """Environment, episode, step, leaf, value and index."""
    where, words = case
    with make(between({"where": where, "value": value})) as vector:
        vector.reset(seed=1)
        vector.step([0] * 3)
        vector.step([0] * 3)
        name = (
            rf"environment 1 failed at step 3 of the episode with seed {episode_seed(1, 1, 3, 1)}"
        )
        with pytest.raises(EnvError, match=f"{name}: NonFiniteError: {words.format(value)}"):
            vector.step([0] * 3)


@pytest.mark.parametrize("make", PLACES)
@sweep("where", ["speed", "temperature", "reward"])
@sweep("at", [3, 5])
def test_an_episode_is_given_up(where, at, make):
    """In the middle, or where the episode is truncated; the next one begins, with its own seed."""
    with make(between({"where": where, "at": at}), on_non_finite="skip") as vector:
        vector.reset(seed=1)
        for _ in range(at - 1):
            assert vector.step([0] * 3)[4] == {}
        obs, rewards, terminated, truncated, infos = vector.step([0] * 3)
        assert infos["lost"].tolist() == infos["ignored"].tolist() == [False, True, False]
        assert rewards.tolist() == [1.0, 0.0, 1.0]
        assert not terminated.any()
        assert truncated.tolist() == [at == 5, False, at == 5]
        assert obs["count"].tolist() == ([0, 0, 0] if at == 5 else [3, 0, 3])
        assert obs["speed"][1].tolist() == np.zeros((2, 3)).tolist()
        if at == 5:
            assert infos["_final_obs"].tolist() == [True, False, True]
            assert infos["_final_info"].tolist() == [True, False, True]
        else:
            assert sorted(infos) == ["ignored", "lost"]
        assert vector.state_dict()["envs"][1]["episodes"] == 2
        assert vector.state_dict()["envs"][1]["steps"] == 0
        infos = vector.step([0] * 3)[4]
        assert infos == {}


def test_seeds_of_the_next_episode():
    """Giving up an episode uses up its seed and no other; others are left alone."""

    class SpoiltCounting(CountingEnv):
        def step(self, action):
            obs, reward, *rest = super().step(action)
            return obs, float("nan") if self.t == 2 and len(self.seeds) < 4 else reward, *rest

    with here([CountingEnv, SpoiltCounting], on_non_finite="skip") as vector:
        vector.reset(seed=3)
        lost = [vector.step([0, 0])[4].get("lost", [False] * 2)[1] for _ in range(9)]
        assert lost == [False, True] * 3 + [False] * 3
        seeds = [episode_seed(3, 1, 2, k) for k in range(1, 5)]
        assert vector.envs[1].seeds == seeds
        state = vector.state_dict()
        with here([CountingEnv] * 2) as other:
            assert other.load_state_dict(state)[0].tolist() == vector._observations().tolist()


class LivesEnv(CountingEnv):
    """A game of three lives of two steps each; the reward of the second step is not finite."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return obs, {**info, "lives": 3}

    def step(self, action):
        obs, reward, *_ = super().step(action)
        spoilt = self.t == 2 and len(self.seeds) == 1
        lives = 3 - self.t // 2
        reward = float("inf") if spoilt else reward
        return obs, reward, lives == 0, False, {"lives": lives}


def test_a_game_that_went_wrong_does_not_go_on():
    """Where a life is lost in a step that is given up, a new game begins, not only an episode."""
    with here([lambda: EpisodicLifeWrapper(LivesEnv())], on_non_finite="skip") as vector:
        vector.reset(seed=1)
        vector.step([0])
        obs, _, _, _, infos = vector.step([0])
        assert infos["lost"].tolist() == [True]
        assert obs.tolist() == [[episode_seed(1, 0, 1, 2) % 1000, 0.0]]
        vector.step([0])
        obs, _, terminated, _, _ = vector.step([0])  # The next life goes on with the same game.
        assert terminated.tolist() == [True]
        assert obs[0, 1] == 3.0
        record = vector.state_dict()["envs"][0]
        assert (record["base_episodes"], record["episodes"]) == (2, 3)


def test_all_at_once():
    """Several environments in one step, one of them at the end of its episode."""
    spoilt = between(
        {"where": "speed", "at": 3},
        {"where": "reward", "at": 3, "value": float("inf")},
        {"where": "reward", "at": 3, "value": float("-inf"), "length": 3},
        {"where": "speed", "at": 3, "length": 3, "truncate": False},
    )
    with here(spoilt, on_non_finite="skip") as vector:
        vector.reset(seed=1)
        vector.step([0] * 6)
        vector.step([0] * 6)
        obs, rewards, terminated, truncated, infos = vector.step([0] * 6)
        assert infos["lost"].tolist() == [False, True, True, True, False, False]
        assert terminated.tolist() == [False, False, False, False, True, False]
        assert not truncated.any()
        assert rewards.tolist() == [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]
        assert infos["_final_obs"].tolist() == terminated.tolist()
        assert obs["count"].tolist() == [3, 0, 0, 0, 0, 3]


@sweep("policy", ["raise", "skip"])
@pytest.mark.parametrize("make", PLACES)
def test_the_first_observation_is_always_an_error(make, policy):
    """At the first reset, after the end of an episode, and after one that was given up."""
    with (
        make(between({"where": "speed", "at": 0}), on_non_finite=policy) as vector,
        pytest.raises(EnvError, match=r"environment 1 failed in the reset.*'speed' is nan"),
    ):
        vector.reset(seed=1)

    class Later(SpoiltEnv):
        def observe(self):
            obs = super().observe()
            if self.begun == 2 and self.t == 0:
                obs["speed"][0, 0] = np.inf
            return obs

    words = r"environment 0 failed in the reset.*'speed' is inf at index \(0, 0\)"
    for spoilt in ({}, {"where": "reward", "at": 5}):
        with here([lambda s=spoilt: Later(**s)], on_non_finite=policy) as vector:
            vector.reset(seed=1)
            for _ in range(4):
                vector.step([0])
            if spoilt and policy == "raise":
                words = "reward is nan"
            with pytest.raises(EnvError, match=words):
                vector.step([0])


def test_terminal_observations_do_not_matter():
    """Nobody asks for the value of a terminal state."""
    with here(between({"where": "speed", "at": 5, "truncate": False})) as vector:
        vector.reset(seed=1)
        for _ in range(5):
            result = vector.step([0] * 3)
        assert result[2][1]
    with here(between({"where": "speed", "at": 5})) as vector:
        vector.reset(seed=1)
        for _ in range(4):
            vector.step([0] * 3)
        with pytest.raises(EnvError, match=r"step 5.*final observation 'speed' is nan at index"):
            vector.step([0] * 3)


def test_monitored_returns_of_lost_episodes_are_not_reported():
    """The report of an episode that was given up is not told at the reset."""
    factory = EnvFactory.from_any(SpoiltEnv, where="reward")
    factory.config.training_wrappers = [
        {"_target_": "maze_train.RewardScalingWrapper", "scale": 2.0}
    ]
    with here([factory], on_non_finite="skip", step_infos=True) as vector:
        vector.reset(seed=1)
        for _ in range(3):
            infos = vector.step([0])[4]
        assert infos["lost"].tolist() == [True]
        assert "episode" not in infos
        for _ in range(5):
            infos = vector.step([0])[4]
        assert infos["final_info"]["episode"]["r"].tolist() == [5.0]


@given(
    st.integers(1, 40),
    st.sampled_from([np.float16, np.float32, np.float64]),
    st.lists(st.tuples(st.integers(0, 39), st.sampled_from([*BAD, 1e30, 0.0])), max_size=4),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_quick_test_is_exact(size, dtype, changes):
    """It says what numpy.isfinite says, also for the largest numbers there are."""
    with warnings.catch_warnings():
        column = np.full((size, 1), np.finfo(dtype).max, dtype)
        column[::2] *= -1
        for i, value in changes:
            with np.errstate(over="ignore"):
                column[i % size] = np.float64(value).astype(dtype)
        check = FiniteCheck({"a": column, "count": np.zeros(3, np.int64)})
        warnings.simplefilter("error" if size % 2 else "ignore")
        assert check.passes() == bool(np.isfinite(column).all())


@sweep("at", [0, 8191, 8192, 19_999])
def test_long_columns(at):
    """Every part of a long column is looked at, and changes are seen."""
    column = np.zeros((2, 10_000), np.float32)
    check = FiniteCheck({"": column})
    assert check.passes()
    column.reshape(-1)[at] = np.inf
    assert not check.passes()


def foreign(mode, **spoilt):
    """A vector environment of gymnasium, whose second environment is spoilt."""
    return ForeignVectorEnv(
        gymnasium.vector.SyncVectorEnv(
            [SpoiltEnv, lambda: SpoiltEnv(**spoilt)], autoreset_mode=mode
        )
    )


@sweep("mode", list(AutoresetMode))
@sweep(
    "case",
    [
        ("speed", 0, r"at step 0 .*observation 'speed' is nan at index \(1, 2\)"),
        ("speed", 2, r"at step 2 .*observation 'speed' is nan at index \(1, 2\)"),
        ("temperature", 2, r"at step 2 .*observation 'temperature' is nan, expected"),
        ("reward", 2, "at step 2 .*reward is nan"),
        ("reward", 5, "at step 5 .*reward is nan"),
        ("speed", 5, r"at step 5 .*observation 'speed' is nan at index \(1, 2\)"),
    ],
)
def test_foreign_environments(mode, case):
    """They are named in every mode, final observations of truncated episodes too."""
    where, at, words = case
    vector = foreign(mode, where=where, at=at)
    with pytest.raises(EnvError, match=f"environment 1 failed {words}"):  # noqa: PT012
        vector.reset(seed=1)
        for _ in range(5):
            vector.step([0, 0])
    vector.close()


@sweep("mode", list(AutoresetMode))
def test_foreign_terminal_observations_do_not_matter(mode):
    """Nor what an environment returns for the step that only resets it."""
    vector = foreign(mode, where="speed", at=5, truncate=False, episodes=99)
    vector.reset(seed=1)
    ends = sum(int(vector.step([0, 0])[2].sum()) for _ in range(17))
    assert ends > 2
    vector.close()


@sweep("mode", list(AutoresetMode))
def test_foreign_resets(mode):
    """The first observation of a later episode is looked at as well."""
    env = foreign(mode)
    inner = env._env.envs[1]
    plain = inner.observe

    def observe():
        obs = plain()
        if inner.begun == 2 and inner.t == 0:
            obs["temperature"] = np.float64("-inf")
        return obs

    inner.observe = observe
    env.reset(seed=1)
    for _ in range(4):
        env.step([0, 0])
    with pytest.raises(EnvError, match=r"environment 1 .*'temperature' is -inf"):  # noqa: PT012
        env.step([0, 0])
        env.step([0, 0])
    env.close()
