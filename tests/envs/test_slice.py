"""Slices of environments that play assigned episodes, one at a time."""

from __future__ import annotations

import pickle
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cases import sweep
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from toy_envs import CountingEnv, LivesEnv, assert_same

from maze_train.core.step_end import EpisodeEnd, StepEnd
from maze_train.envs.atari import EpisodicLifeWrapper
from maze_train.envs.batch import StepReport
from maze_train.envs.faults import EpisodeError
from maze_train.envs.slice import EnvSlice
from maze_train.envs.wrappers import MonitoringWrapper, RewardScalingWrapper

if TYPE_CHECKING:
    from collections.abc import Callable


class PlannedEnv(CountingEnv):
    """Environment whose episodes are determined by the seed.

    Seed s gives s mod 7 + 1 steps, ended by termination (s mod 3 = 0), truncation (1) or both (2).
    The reward depends on seed, step and action; some steps have a NaN reward or observation.
    """

    def __init__(self) -> None:
        super().__init__()
        plan = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.observation_space = spaces.Dict({"kind": spaces.Discrete(9, start=5), "plan": plan})
        self.action_space = spaces.Discrete(5)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.seed, self.last = int(seed or 0), 0
        return super().reset(seed=seed)

    def spoils(self, what: int) -> bool:
        return self.seed // 10 % 5 == what and self.t == self.seed // 50 % 7 + 1

    def observe(self) -> Any:
        number = np.nan if self.spoils(1) else self.seed
        return {"kind": 5 + self.seed % 9, "plan": np.array([number, self.t, self.last], float)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t, self.last = self.t + 1, int(action)
        ended = self.t == self.seed % 7 + 1
        ends = (ended and self.seed % 3 != 1, ended and self.seed % 3 != 0)
        reward = np.nan if self.spoils(2) else np.sin(self.seed + 0.3 * self.t) + 0.1 * self.last
        return self.observe(), reward, *ends, {"t": self.t, "seed": self.seed}


class SlowEnv:
    """Reference for the episodes of `PlannedEnv` in plain Python."""

    def __init__(self, seed: int) -> None:
        self.env = PlannedEnv()
        self.start(seed)

    def start(self, seed: int) -> None:
        self.seed, self.length = seed, 0
        self.end, self.plays = StepEnd.RUNNING, True
        self.obs, _ = self.env.reset(seed=seed)

    def step(self, action: int) -> bool:
        """Return whether the episode is over."""
        self.obs, self.reward, terminated, truncated, self.info = self.env.step(action)
        self.length += 1
        self.end = StepEnd.TERMINATED if terminated else StepEnd(2 * truncated)
        if np.isnan(self.reward) or np.isnan(self.obs["plan"][0]):
            self.end, self.reward = StepEnd.DROPPED, 0.0
        self.plays = self.end == StepEnd.RUNNING
        return not self.plays


def slice_of(make: Callable[[], Any], count: int = 3, **settings: Any) -> EnvSlice:
    """Return a slice of equal environments."""
    return EnvSlice.for_playing([make] * count, **settings)


def ends_of(envs: EnvSlice, *actions: int) -> dict[int, EpisodeEnd | None]:
    """Take a step; return the ends of episodes by environment, None for a dropped episode."""
    envs.actions[""][: len(actions)] = actions
    report = envs.step() or StepReport()
    return {**{end.env: end for end in report.ends}, **dict.fromkeys(report.dropped)}


def assert_equal(envs: EnvSlice, slow: list[SlowEnv]) -> None:
    """Check all reported values of the environments."""
    for i, one in enumerate(slow):
        assert envs.seeds[i] == one.seed
        assert (i in envs.playing, i in envs.paused) == (one.plays, not one.plays)
        if one.plays:
            assert envs.steps_of(i) == one.length
            assert envs.obs["kind"][i] == one.obs["kind"]
            assert_same(envs.obs["plan"][i], one.obs["plan"])


# -- episodes ------------------------------------------------------------------------------------


def test_slice_episodes_match_the_reference() -> None:
    """Started, stepped, dropped and ended episodes match the reference in all reported values."""
    rng = np.random.default_rng(0)
    envs = slice_of(PlannedEnv, 4, on_non_finite="skip", final_obs="all")
    assert envs.playing == []
    slow = [SlowEnv(i) for i in range(4)]
    for i in range(4):
        envs.start(i, i)
    lost, over = 0, 0
    for _ in range(600):
        actions, playing = rng.integers(0, 5, 4), envs.playing
        ends = ends_of(envs, *actions)
        assert sorted(ends) == [i for i in playing if slow[i].step(int(actions[i]))]
        assert_equal(envs, slow)
        for i in playing:
            one, end = slow[i], ends.get(i)
            assert (envs.rewards[i], StepEnd(envs.end[i])) == (one.reward, one.end)
            if end is not None:
                assert_same(envs.final_obs["plan"][i], one.obs["plan"])
                assert end.info == {}
        lost, over = lost + list(ends.values()).count(None), over + len(ends)
        for i in sorted({*ends, *envs.paused, int(rng.integers(4))}):
            if rng.random() < 0.7:
                seed = int(rng.integers(10_000))
                envs.start(i, seed)
                slow[i].start(seed)
        assert_equal(envs, slow)
    assert over > 300
    assert 50 < lost < over - 50


def test_paused_environments_do_not_step() -> None:
    """An environment is paused at the end of its episode until the next one begins."""
    envs = slice_of(lambda: CountingEnv(2), 2)
    envs.begin({0: 3})
    assert (envs.playing, envs.seeds) == ([0], [3, 0])
    ended = [[*envs.advance(np.zeros(1, np.int64))] for _ in range(2)]
    envs.begin({1: 6, 0: 4})
    ended += [[*envs.advance(np.zeros(2, np.int64))] for _ in range(2)]
    assert ended == [[], [0], [], [0, 1]]
    assert envs.playing == []
    envs.begin({0: 5})
    assert [env.unwrapped.seeds for env in envs.envs] == [[3, 4, 5], [6]]
    envs.pause_all()
    assert (envs.playing, envs.paused) == ([], {0, 1})
    assert ends_of(envs) == {}
    assert envs.envs[0].unwrapped.t == 0


def test_slice_environments_can_be_rendered() -> None:
    """Environments can be rendered; an error names the seed."""

    class Shown(CountingEnv):
        def render(self) -> Any:
            return 10 // self.t

    envs = slice_of(Shown)
    for i in (0, 1):
        envs.start(i, 5 + i)
    with pytest.raises(EpisodeError, match=r"environment 1 .* seed 6: ZeroDivisionError") as caught:
        envs.render(1)
    assert caught.value.seed == 6
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), again.seed, str(again)) == (EpisodeError, 6, str(caught.value))
    envs.step()
    assert envs.render(1) == 10


def test_rendering_without_display_names_the_remedy() -> None:
    """If MuJoCo cannot render, the error says how to render without a display."""

    class Drawn(CountingEnv):
        def render(self) -> Any:
            exec("None.eglQueryString", {"__name__": "OpenGL.EGL"})

    envs = slice_of(Drawn)
    envs.start(0, 5)
    with pytest.raises(EpisodeError, match=r"AttributeError: .*MUJOCO_GL=egl.*libosmesa6"):
        envs.render(0)


# -- wrappers ------------------------------------------------------------------------------------


def test_slice_start_begins_a_new_game() -> None:
    """A lost life ends neither the episode nor the game; a new start does."""
    envs = slice_of(lambda: EpisodicLifeWrapper(LivesEnv()))
    envs.start(0, 1)
    assert ends_of(envs, 1) == {}
    assert ends_of(envs, 1) == {}  # a life is lost, and the game continues
    assert not envs.end.any()
    assert (envs.steps_of(0), envs.envs[0].unwrapped.t) == (2, 3)
    envs.start(0, 2)
    assert envs.envs[0].unwrapped.seeds == [1, 2]
    assert envs.obs[""][0].tolist() == [2.0, 0.0]


class NoLifeEnv(LivesEnv):
    """Environment that ends the game in the no-op step after the first lost life."""

    how = "terminated"

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, *_, info = super().step(action)
        if self.t != 3:
            return obs, reward, False, False, info
        ends = (self.how in ("terminated", "both"), self.how in ("truncated", "both"))
        return obs, reward, *ends, {**info, "is_success": True}


@sweep("how", ["terminated", "truncated", "both"])
def test_game_that_ends_after_a_lost_life_ends_the_episode(how: str) -> None:
    """If the game ends after a lost life, the episode ends; the next episode starts a new game."""

    class Env(NoLifeEnv):
        pass

    Env.how = how
    limited = partial(TimeLimit, max_episode_steps=50)
    make = lambda: limited(EpisodicLifeWrapper(MonitoringWrapper(Env())))  # noqa: E731
    envs = slice_of(make, final_obs="all")
    for seed in (1, 2):
        envs.start(0, seed)
        envs.start(1, 9)
        assert ends_of(envs, 1, 2) == {}
        assert envs.rewards.tolist() == [1.0, 1.0, 0.0]
        ends = ends_of(envs, 1, 2)
        assert [*ends] == [0, 1]
        assert (envs.rewards[0], envs.steps_of(0)) == (2.0, 2)
        end = StepEnd.TRUNCATED if how == "truncated" else StepEnd.TERMINATED
        assert envs.end[:2].tolist() == [end] * 2
        assert ends[0] is not None
        assert (ends[0].counted, ends[0].info) == ((6.0, 3), {"is_success": 1.0})
        assert envs.final_obs[""][:2].tolist() == [[seed, 2.0], [9.0, 2.0]]
    envs.start(1, 4)
    assert ends_of(envs) == {}
    assert [*ends_of(envs)] == [1]


@sweep("limit", [1, 2, 3, 4, 5])
def test_slice_episode_is_a_whole_game(limit: int) -> None:
    """Lost lives do not end episodes, and the steps that continue after them are not counted.

    An outer time limit is not reset by a lost life; an inner one has a separate count.
    """

    def make() -> Any:
        return TimeLimit(EpisodicLifeWrapper(TimeLimit(LivesEnv(), 6)), limit)

    envs, rewards = slice_of(make), [1.0, 2.0, 4.0, 6.0][:limit]
    for seed in (1, 2):
        envs.start(0, seed)
        for k, reward in enumerate(rewards, start=1):
            assert [*ends_of(envs, 1)] == [0] * (k == len(rewards))
            assert (envs.rewards[0], envs.steps_of(0)) == (reward, k)


@sweep("length", [9, 2])
def test_slice_reports_raw_returns(length: int) -> None:
    """Reported returns are raw, also if a time limit outside the monitor truncates the episode."""
    envs = slice_of(
        lambda: TimeLimit(RewardScalingWrapper(MonitoringWrapper(CountingEnv(length)), 0.1), 2)
    )
    for seed in (5, 6):
        envs.start(0, seed)
        assert ends_of(envs) == {}
        end = ends_of(envs)[0]
        assert envs.rewards[0] == pytest.approx(0.2)
        assert end is not None
        assert end.counted == (3.0, 2)


# -- errors --------------------------------------------------------------------------------------
