"""NaN and infinite values of environments raise errors or drop the episode."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from cases import sweep
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_envs import (
    ALL,
    BACKENDS,
    FORKS,
    OTHER_MODES,
    CountingEnv,
    LivesEnv,
    SpoiltEnv,
    here,
    third_party,
)

from maze_train import EnvFactory
from maze_train.core.errors import EnvError
from maze_train.core.seeding import episode_seed
from maze_train.envs.atari import EpisodicLifeWrapper
from maze_train.envs.faults import FiniteCheck, non_finite_rows

BAD = [float("nan"), float("inf"), float("-inf")]
LARGE = [1e39, -1e300]
MAX_FLOAT32 = float(np.finfo(np.float32).max)


def between(*spoilt):
    """Return environments with non-finite values, between two normal environments."""
    return [SpoiltEnv, *[lambda k=k: SpoiltEnv(**k) for k in spoilt], SpoiltEnv]


def skipping(factories):
    """Return environments in this process that drop non-finite episodes."""
    return here(factories, on_non_finite="skip")


def run(vector, steps):
    """Reset and take this number of steps."""
    vector.reset(seed=1)
    return [vector.step([0] * vector.num_envs) for _ in range(steps)]


pytestmark = FORKS


@pytest.mark.parametrize("make", BACKENDS)
@sweep(
    "spoilt",
    [
        {"where": "speed"},
        {"where": "temperature"},
        {"where": "temperature", "value": np.finfo(np.float64).max},
        {"where": "temperature", "value": -1e39},
        {"where": "reward"},
        {"where": "reward", "value": 1e39},
    ],
)
@sweep("at", [3, 5])
def test_non_finite_value_drops_the_episode(spoilt, at, make):
    """A non-finite value drops the episode, also at its truncation; the next seed follows.

    Values outside the range of float32 count as infinite.
    """
    with make(between({**spoilt, "at": at}), on_non_finite="skip") as vector:
        assert all(infos == {} for *_, infos in run(vector, at - 1))
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


@pytest.mark.parametrize("make", [*ALL, *OTHER_MODES])
@sweep(
    "case",
    [
        ("speed", 0, r"observation 'speed' is nan at index \(1, 2\)"),
        ("speed", 3, r"observation 'speed' is -inf at index \(1, 2\)"),
        ("temperature", 3, "observation 'temperature' is inf, expected"),
        ("temperature", 3, "observation 'temperature' is 1e+39, expected"),
        ("temperature", 5, "observation 'temperature' is -1e+39, expected"),
        ("reward", 3, "reward is nan, expected"),
        ("reward", 5, "reward is -inf, expected"),
        ("speed", 5, r"observation 'speed' is nan at index \(1, 2\)"),
    ],
)
def test_non_finite_value_names_environment_episode_and_leaf(case, make):
    """The error has environment, episode, step, leaf, value and index in every autoreset mode."""
    where, at, words = case
    value = float(words.split(" is ")[1].split()[0].strip(","))
    words = words.replace("e+", r"e\+")
    when = f"at step {at}" if at else "(in the reset|at step 0)"
    which = f"(the episode with seed {episode_seed(1, 1, 3, 1)}|its episode)"
    with (
        make(between({"where": where, "at": at, "value": value})) as vector,
        pytest.raises(EnvError, match=f"environment 1 failed {when} of {which}: .*{words}"),
    ):
        run(vector, 5)


@pytest.mark.parametrize("make", [here, skipping])
def test_canceling_infinite_rewards_are_detected(make):
    """Rewards outside the range of float32 are detected, even if their sum is in the range."""
    rewards = (1e39, -1e39)
    with make([lambda i=i: SpoiltEnv("reward", 2, rewards[i]) for i in range(2)]) as vector:
        vector.reset(seed=0)
        vector.step([0, 0])
        if make is skipping:
            assert vector.step([0, 0])[4]["lost"].tolist() == [True, True]
        else:
            with pytest.raises(EnvError, match=r"reward is 1e.39"):
                vector.step([0, 0])


class Later(SpoiltEnv):
    """`SpoiltEnv` whose second episode also begins with a non-finite observation."""

    def observe(self):
        obs = super().observe()
        if len(self.seeds) == 2 and self.t == 0:
            obs["speed"][1, 2] = np.nan
        return obs


@pytest.mark.parametrize(
    ("make", "spoilt"),
    [(make, {}) for make in (here, third_party)]
    + [pytest.param(*mode.values, {}, id=mode.id) for mode in OTHER_MODES]
    + [(skipping, {}), (skipping, {"where": "reward", "at": 5})]
    + [(skipping, {"where": "speed", "at": 0})],
)
def test_non_finite_first_observation_raises(make, spoilt):
    """Non-finite first observations always raise an error."""
    when = "in the reset" if make in (here, skipping) else r"at step \d"
    words = rf"environment 1 failed {when} of .*'speed' is nan at index \(1, 2\)"
    with (
        make([SpoiltEnv, lambda: Later(**spoilt)]) as vector,
        pytest.raises(EnvError, match=words),
    ):
        run(vector, 6)


def test_dropped_episode_uses_one_seed():
    """A dropped episode uses exactly one seed; other environments are not affected."""

    class SpoiltCounting(CountingEnv):
        def reward(self, action):
            return float("nan") if self.t == 2 and len(self.seeds) < 4 else super().reward(action)

    with skipping([CountingEnv, SpoiltCounting]) as vector:
        vector.reset(seed=3)
        lost = [vector.step([0, 0])[4].get("lost", [False] * 2)[1] for _ in range(9)]
        assert lost == [False, True] * 3 + [False] * 3
        seeds = [episode_seed(3, 1, 2, k) for k in range(1, 5)]
        assert vector.envs[1].seeds == seeds
        state = vector.state_dict()
        with here([CountingEnv] * 2) as other:
            assert other.load_state_dict(state)[0].tolist() == vector._observations().tolist()


def test_dropped_step_starts_a_new_game():
    """If a life is lost in a dropped step, a new game begins."""

    class SpoiltLives(LivesEnv):
        def reward(self, action):
            return float("inf") if self.t == 2 and len(self.seeds) == 1 else 1.0

    with skipping([lambda: EpisodicLifeWrapper(SpoiltLives())]) as vector:
        obs, _, _, _, infos = run(vector, 2)[-1]
        assert infos["lost"].tolist() == [True]
        assert obs.tolist() == [[episode_seed(1, 0, 1, 2) % 1000, 0.0]]
        vector.step([0])
        obs, _, terminated, _, _ = vector.step([0])  # The next life continues the same game.
        assert terminated.tolist() == [True]
        assert obs[0, 1] == 3.0
        record = vector.state_dict()["envs"][0]
        assert (record["base_episodes"], record["episodes"]) == (2, 3)


@pytest.mark.parametrize("make", [*ALL, *OTHER_MODES])
@sweep("where", ["speed", "temperature"])
def test_non_finite_terminal_observations_are_allowed(where, make):
    """Non-finite terminal observations are allowed, and so are observations of mere resets.

    Networks read all rows, so returned observations are always finite, even if the mode returns
    the terminal observation before the reset.
    """
    value = 1e39 if where == "temperature" else np.nan
    spoilt = {"where": where, "value": value, "at": 5, "truncate": False, "episodes": 99}
    with make(between(spoilt)) as vector:
        vector.reset(seed=1)
        ends = 0
        for _ in range(17):
            obs, _, terminated, _, infos = vector.step([0] * 3)
            assert (np.abs(obs[where]) <= MAX_FLOAT32).all()
            if terminated[1]:
                ends += 1
                last = infos["final_obs"][1][where].flat[-1]
                assert not abs(last) <= MAX_FLOAT32
        assert ends > 1


@pytest.mark.parametrize("make", [here, skipping, third_party])
def test_stored_terminal_observations_must_be_finite(make):
    """Terminal observations must be finite if they are kept, as for hindsight relabelling."""
    spoilt = {"where": "temperature", "value": 1e39, "at": 5, "truncate": False}
    factories = [SpoiltEnv, lambda: SpoiltEnv(**spoilt), SpoiltEnv]
    settings = {"on_non_finite": "skip"} if make is skipping else {}
    if make is third_party:
        vector = third_party(factories)
        vector.keeps_terminal_obs = True
    else:
        vector = here(factories, keeps_terminal_obs=True, **settings)
    with vector:
        run(vector, 4)
        if make is skipping:
            _, _, terminated, _, infos = vector.step([0] * 3)
            assert (infos["lost"].tolist(), terminated[1]) == ([False, True, False], False)
        else:
            with pytest.raises(EnvError, match=r"environment 1 .* final observation 'temperature'"):
                vector.step([0] * 3)


def test_returns_of_dropped_episodes_are_not_reported():
    """Monitored returns of dropped episodes are not reported."""
    factory = EnvFactory.from_any(SpoiltEnv, where="reward")
    factory.config.training_wrappers = [
        {"_target_": "maze_train.RewardScalingWrapper", "scale": 2.0}
    ]
    with here([factory], on_non_finite="skip", step_infos=True) as vector:
        infos = run(vector, 3)[-1][4]
        assert infos["lost"].tolist() == [True]
        assert "episode" not in infos
        for _ in range(5):
            infos = vector.step([0])[4]
        assert infos["final_info"]["episode"]["r"].tolist() == [5.0]


@given(
    st.integers(1, 40),
    st.sampled_from([np.float16, np.float32, np.float64]),
    st.lists(st.tuples(st.integers(0, 39), st.sampled_from([*BAD, *LARGE, 1e30, 0.0])), max_size=4),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_quick_finite_check_is_exact(size, dtype, changes):
    """The quick check finds all values that are infinite in float32.

    Large finite values may fail it; they are then checked one by one.
    """
    largest = min(np.finfo(dtype).max, np.finfo(np.float32).max, key=float)
    with warnings.catch_warnings():
        column = np.full((size, 1), largest, dtype)
        column[::2] *= -1
        for i, value in changes:
            with np.errstate(over="ignore"):
                column[i % size] = np.float64(value).astype(dtype)
        check = FiniteCheck({"a": column, "count": np.zeros(3, np.int64)})
        warnings.simplefilter("error" if size % 2 else "ignore")
        are_finite = bool(not non_finite_rows({"": column}).any())
        assert are_finite == (np.abs(column.astype(np.float64)) <= MAX_FLOAT32).all()
        large = np.count_nonzero(np.abs(column.astype(np.float64)) > 1e19)
        if not are_finite or dtype is not np.float64 or large < 2:
            assert check.passes() == are_finite
