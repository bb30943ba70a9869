"""Slots: one episode at a time in each, the one that it is told to play."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import pytest
from cases import sweep
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from toy_envs import CountingEnv, FailingEnv, NestedEnv, SpoiltEnv

from maze_train.envs.atari import EpisodicLifeWrapper
from maze_train.envs.monitoring import MonitoringWrapper
from maze_train.envs.slots import EnvSlots, EpisodeError, blank
from maze_train.envs.wrappers import RewardScalingWrapper
from maze_train.errors import EnvError

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = 6
BAD = [float("nan"), float("inf"), float("-inf")]


class PlannedEnv(gymnasium.Env[Any, Any]):
    """Episodes as their seed says, with everything in the numbers; keeps a book of its calls.

    Seed s: s mod 7 + 1 steps, which end terminated (s mod 3 = 0), truncated (1) or both (2). The
    reward is a function of seed, step and action.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.action_space = spaces.Discrete(5)
        self.calls: list[Any] = []
        self.seed, self.t, self.last = 0, 0, 0

    def observe(self) -> Any:
        return np.array([self.seed, self.t, self.last], np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.calls.append(("reset", seed, options))
        self.seed, self.t, self.last = int(seed or 0), 0, 0
        return self.observe(), {"begins": True}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.calls.append(("step", int(action)))
        self.t, self.last = self.t + 1, int(action)
        ended = self.t == self.seed % 7 + 1
        ends = (ended and self.seed % 3 != 1, ended and self.seed % 3 != 0)
        reward = np.sin(self.seed + 0.3 * self.t) + 0.1 * self.last
        return self.observe(), reward, *ends, {"t": self.t, "seed": self.seed}

    def close(self) -> None:
        self.calls.append("close")


class LivesEnv(PlannedEnv):
    """Games of three lives, one of which is lost at every second step; tells how games began."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        obs, _ = super().reset(seed=seed, options=options)
        return obs, {"lives": 3}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, *_ = super().step(action)
        return obs, 1.0, self.t == 6, False, {"lives": 3 - self.t // 2}


def slots_of(make: Callable[[], Any], count: int = 3, **settings: Any) -> EnvSlots:
    """Slots with environments of one kind, and some rows more."""
    return EnvSlots([make] * count, ROWS, **settings)


def inner(slots: EnvSlots, i: int) -> Any:
    """The environment of a slot without its wrappers."""
    return slots.envs[i].unwrapped


def slow_episode(seed: int, actions: list[int]) -> dict[str, Any]:
    """An episode of `PlannedEnv` in a plain loop; actions beyond its end are left out."""
    env = PlannedEnv()
    observed, total, info = [env.reset(seed=seed)[0]], 0.0, {}
    for t, action in enumerate(actions, start=1):
        obs, reward, terminated, truncated, info = env.step(action)
        total += reward
        if terminated or truncated:
            return {"observed": observed, "return": total, "length": t, "info": info}
        observed.append(obs)
    raise AssertionError("the episode is longer")


# -- episodes ------------------------------------------------------------------------------------


def test_episodes_of_all_lengths_and_ends() -> None:
    """Each slot plays its own; what it observes and sums up is what a plain loop does."""
    slots = slots_of(PlannedEnv)
    rng = np.random.default_rng(0)
    waiting = list(range(30))
    playing: dict[int, Any] = {}
    finished = 0
    for _ in range(200):
        for i in range(3):
            if i not in playing and waiting:
                slots.start(i, waiting[0])
                playing[i] = (waiting.pop(0), [], [slots.obs[""][i].copy()])
        if len(playing) < 3:
            break
        actions = rng.integers(0, 5, ROWS)
        ended = slots.step(3, actions)
        assert ended == sorted(ended)
        for i, (seed, taken, observed) in list(playing.items()):
            taken.append(int(actions[i]))
            if i not in ended:
                observed.append(slots.obs[""][i].copy())
                assert i not in slots.final_infos
                continue
            expected = slow_episode(seed, taken)
            assert slots.returns[i] == pytest.approx(expected["return"], rel=1e-14)
            assert slots.lengths[i] == expected["length"] == seed % 7 + 1
            assert slots.final_infos[i] == expected["info"]
            np.testing.assert_array_equal(observed, expected["observed"])
            assert not slots.lost[i]
            del playing[i]
            finished += 1
    assert finished >= 27


def test_starting_forgets_the_episode_before() -> None:
    """Also one that did not end: sums, steps and infos begin anew, in this slot alone."""
    slots = slots_of(PlannedEnv)
    for i, seed in enumerate((0, 0, 6)):
        slots.start(i, seed)
    assert slots.step(3, np.full(ROWS, 1)) == [0, 1]
    returns = slots.returns.copy()
    slots.start(1, 3)
    assert slots.returns[:3].tolist() == [returns[0], 0.0, returns[2]]
    assert slots.lengths.tolist() == [1, 0, 1, 0, 0, 0]
    assert list(slots.final_infos) == [0]
    assert slots.obs[""][1].tolist() == [3.0, 0.0, 0.0]
    slots.start(2, 6)
    assert slots.lengths[2] == slots.returns[2] == 0
    slots.step(3, np.zeros(ROWS, np.int64))
    assert slots.lengths.tolist() == [2, 1, 1, 0, 0, 0]


def test_only_the_first_slots_are_stepped() -> None:
    """The others cost nothing and stay as they are, whatever rows there are for them."""
    slots = slots_of(PlannedEnv)
    for i in range(3):
        slots.start(i, 5 + i)
    before = slots.obs[""].copy()
    for count in (2, 1, 0):
        slots.step(count, np.arange(ROWS) % 5)
    assert slots.lengths.tolist() == [2, 1, 0, 0, 0, 0]
    assert inner(slots, 0).calls[1:] == [("step", 0)] * 2
    assert inner(slots, 1).calls[1:] == [("step", 1)]
    assert inner(slots, 2).calls[1:] == []
    np.testing.assert_array_equal(slots.obs[""][2:], before[2:])
    assert slots.obs[""][1].tolist() == [6.0, 1.0, 1.0]
    assert slots.returns[1] == pytest.approx(np.sin(6.3) + 0.1)
    assert not slots.returns[2:].any()
    assert not slots.obs[""][3:].any()


def test_what_slots_tell_about_themselves() -> None:
    """Their number, spaces, and arrays with a row for each, and more."""
    slots = slots_of(NestedEnv, 2)
    env = slots.envs[0]
    assert len(slots) == len(slots.envs) == 2
    assert slots.env_observation_space == env.observation_space
    assert slots.single_action_space == env.action_space
    assert list(slots.single_observation_space.spaces) == ["image", "robot/0", "robot/1"]
    described = {key: (column.shape, column.dtype.name) for key, column in slots.obs.items()}
    assert described == {
        "image": ((ROWS, 3, 4, 1), "uint8"),
        "robot/0": ((ROWS, 2, 2), "float64"),
        "robot/1": ((ROWS,), "int64"),
    }


def test_nested_observations_and_actions() -> None:
    """Leaves go to their columns, and actions come back in the form of the space."""
    slots, twin = slots_of(NestedEnv), NestedEnv()
    for i in range(3):
        slots.start(i, 20 + i)
    actions = {
        "0": np.array([2, 0, 1, 0, 0, 0]),
        "1/force": np.arange(12, dtype=np.float32).reshape(6, 2) / 12,
    }
    for _ in range(2):
        slots.step(3, {key: column.copy() for key, column in actions.items()})
    twin.reset(seed=22)
    for _ in range(2):
        force = actions["1/force"][2].copy()
        obs, reward, *_ = twin.step((1, {"force": force}))
    assert slots.returns[2] == 2 * reward
    np.testing.assert_array_equal(slots.obs["image"][2], obs["image"])
    np.testing.assert_array_equal(slots.obs["robot/0"][2], obs["robot"][0])
    assert slots.obs["robot/1"][2] == obs["robot"][1]


def test_swapping_moves_everything() -> None:
    """Environment, observation, sums, seed, info; what is played on is as if nothing was moved."""
    slots = slots_of(PlannedEnv)
    for i, seed in enumerate((8, 0, 15)):
        slots.start(i, seed)
    slots.step(3, np.array([4, 3, 2, 0, 0, 0]))
    slots.lost[1] = True
    envs = list(slots.envs)
    rows = [[column[i].copy() for column in columns_of(slots)] for i in range(3)]
    info = slots.final_infos[1]
    assert info["seed"] == 0
    slots.swap(0, 1)
    slots.swap(1, 2)
    assert slots.envs == [envs[1], envs[2], envs[0]]
    assert slots.final_infos == {0: info}
    for i, old in enumerate((1, 2, 0)):
        for column, expected in zip(columns_of(slots), rows[old], strict=True):
            np.testing.assert_array_equal(column[i], expected)
    slots.start(0, 6)
    slots.swap(1, 0)
    assert slots.step(3, np.zeros(ROWS, np.int64)) == [0, 2]
    assert slots.returns[0] == pytest.approx(slow_episode(15, [2, 0])["return"])
    assert slots.returns[2] == pytest.approx(slow_episode(8, [4, 0])["return"])
    assert {i: info["seed"] for i, info in slots.final_infos.items()} == {0: 15, 2: 8}
    slots.swap(2, 0)
    assert {i: info["seed"] for i, info in slots.final_infos.items()} == {0: 8, 2: 15}


def columns_of(slots: EnvSlots) -> list[Any]:
    """All arrays with a row per slot."""
    flags = (slots.lost, slots.terminations, slots.truncations)
    return [*slots.obs.values(), slots.returns, slots.lengths, *flags]


def test_how_episodes_ended() -> None:
    """Flags, rewards and last observations are told until the next start, and move with swaps."""
    slots = slots_of(PlannedEnv)
    for i, seed in enumerate((0, 7, 14)):  # of one step: terminated, truncated, both
        slots.start(i, seed)
    assert slots.seeds == [0, 7, 14]
    assert slots.step(2, np.array([1, 2, 3, 0, 0, 0])) == [0, 1]
    assert slots.rewards[1] == np.sin(7.3) + 0.2
    assert slots.step(3, np.array([1, 2, 3, 0, 0, 0])) == [2]
    assert slots.terminations.tolist() == [True, False, True, False, False, False]
    assert slots.truncations.tolist() == [False, True, True, False, False, False]
    assert {i: obs.tolist() for i, obs in slots.final_obs.items()} == {
        0: [0.0, 1.0, 1.0],
        1: [7.0, 1.0, 2.0],
        2: [14.0, 1.0, 3.0],
    }
    slots.swap(0, 1)
    slots.start(1, 6)
    assert slots.seeds == [7, 6, 14]
    assert slots.terminations[:3].tolist() == [False, False, True]
    assert slots.truncations[:3].tolist() == [True, False, True]
    assert list(slots.final_obs) == [2, 0]
    slots.swap(1, 2)
    assert sorted(slots.final_obs) == [0, 1]
    found = slots.last_observation(1)
    assert found is not None
    slots.final_obs[1][:] = 0
    assert found[""].tolist() == [14.0, 1.0, 3.0]
    slots.start(1, 6)
    slots.start(0, 6)
    assert slots.final_obs == {}
    assert not slots.terminations.any()
    assert not slots.truncations.any()


@sweep("where", ["speed", "temperature"])
def test_last_observations_that_are_no_good(where: str) -> None:
    """An error where they are asked for, or a lost episode."""
    for on_non_finite in ("raise", "skip"):
        slots = slots_of(lambda: SpoiltEnv(where, 1, length=1), on_non_finite=on_non_finite)
        slots.start(0, 5)
        assert slots.step(1, np.zeros(ROWS, np.int64)) == [0]
        if on_non_finite == "skip":
            assert slots.last_observation(0) is None
            assert slots.lost[0]
            continue
        words = rf"step 1 of the episode with seed 5: NonFiniteError: last observation '{where}' is"
        with pytest.raises(EpisodeError, match=words):
            slots.last_observation(0)
        slots.final_obs[0] = {"speed": np.zeros(3)}
        with pytest.raises(EpisodeError, match="seed 5: SpaceError"):
            slots.last_observation(0)


def test_what_environments_show() -> None:
    """Their pictures; an error names the seed."""

    class Shown(PlannedEnv):
        def render(self) -> Any:
            return 10 // self.t

    slots = slots_of(Shown)
    slots.start(1, 6)
    with pytest.raises(EpisodeError, match=r"environment 1 .* seed 6: ZeroDivisionError") as caught:
        slots.render(1)
    assert caught.value.seed == 6
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), again.seed, str(again)) == (EpisodeError, 6, str(caught.value))
    slots.step(2, np.zeros(ROWS, np.int64))
    assert slots.render(1) == 10


# -- wrappers ------------------------------------------------------------------------------------


def test_each_start_begins_a_new_game() -> None:
    """A life that was lost ends neither the episode nor the game, another start does."""
    slots = slots_of(lambda: EpisodicLifeWrapper(LivesEnv()))
    slots.start(0, 1)
    assert slots.step(1, np.ones(ROWS, np.int64)) == []
    assert slots.step(1, np.ones(ROWS, np.int64)) == []  # a life was lost, and the game goes on
    assert not slots.terminations.any()
    assert slots.lengths[0] == 2
    slots.start(0, 2)
    assert inner(slots, 0).calls[-1] == ("reset", 2, None)
    assert [call[0] for call in inner(slots, 0).calls].count("step") == 3
    assert slots.obs[""][0].tolist() == [2.0, 0.0, 0.0]


def test_an_episode_is_a_whole_game() -> None:
    """Lives lost on the way are no ends; the step that goes on after one is not counted."""
    slots = slots_of(lambda: EpisodicLifeWrapper(LivesEnv()))
    slots.start(0, 1)
    ends = [slots.step(1, np.ones(ROWS, np.int64)) for _ in range(4)]
    assert ends == [[], [], [], [0]]
    assert (slots.returns[0], slots.lengths[0]) == (4.0, 4)


class NoLifeEnv(LivesEnv):
    """The step without action after the first lost life ends the game."""

    how = "terminated"

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, *_, info = super().step(action)
        if self.t != 3:
            return obs, reward, False, False, info
        ends = (self.how in ("terminated", "both"), self.how in ("truncated", "both"))
        return obs, reward, *ends, {**info, "is_success": True}


@sweep("how", ["terminated", "truncated", "both"])
def test_a_game_that_ends_while_it_goes_on(how: str) -> None:
    """The episode ends there: nothing of a second game is in it, and the next one is a new one."""

    class Env(NoLifeEnv):
        pass

    Env.how = how
    slots = slots_of(lambda: TimeLimit(EpisodicLifeWrapper(MonitoringWrapper(Env())), 50))
    for seed in (1, 2):
        slots.start(0, seed)
        slots.start(1, 9)
        ends = [slots.step(2, np.array([1, 2, 0, 0, 0, 0])) for _ in range(2)]
        assert ends == [[], [0, 1]]
        assert (slots.returns[0], slots.lengths[0]) == (2.0, 2)
        assert slots.terminations[:2].tolist() == [how in ("terminated", "both")] * 2
        assert slots.truncations[:2].tolist() == [how in ("truncated", "both")] * 2
        info = slots.final_infos[0]
        assert info["episode"] == {"r": 3.0, "l": 3}
        assert (info["lives"], info["is_success"]) == (2, True)
        assert slots.final_obs[0].tolist() == [seed, 2.0, 1.0]
        assert slots.final_obs[1].tolist() == [9.0, 2.0, 2.0]
    slots.swap(0, 1)
    slots.start(0, 4)
    assert slots.step(1, np.zeros(ROWS, np.int64)) == []
    assert slots.step(1, np.zeros(ROWS, np.int64)) == [0]


def test_infos_where_a_game_goes_on() -> None:
    """They have to be dicts as well."""

    class Odd(EpisodicLifeWrapper):
        def reset(self, **kwargs: Any) -> Any:
            goes_on = self.goes_on
            obs, info = super().reset(**kwargs)
            return obs, "so" if goes_on else info

    slots = slots_of(lambda: Odd(LivesEnv()))
    slots.start(0, 1)
    slots.step(1, np.ones(ROWS, np.int64))
    with pytest.raises(
        EnvError, match=r"at step 2 .*seed 1: TypeError: info is 'so', expected a d"
    ):
        slots.step(1, np.ones(ROWS, np.int64))


@sweep("limit", [1, 2, 3, 4, 5])
def test_a_limit_of_steps_is_one_of_the_whole_game(limit: int) -> None:
    """It does not begin anew where a life is lost; a limit within the game has its own count."""

    def make() -> Any:
        return TimeLimit(EpisodicLifeWrapper(TimeLimit(LivesEnv(), 6)), limit)

    slots = slots_of(make)
    for seed in (1, 2):
        slots.start(0, seed)
        ends = [slots.step(1, np.ones(ROWS, np.int64)) for _ in range(min(limit, 4))]
        assert ends == [[]] * (min(limit, 4) - 1) + [[0]]
        assert slots.lengths[0] == min(limit, 4)


@sweep("length", [9, 2])
def test_raw_returns_are_told(length: int) -> None:
    """Of whole episodes, and of those that a time limit around the monitor cuts."""
    slots = slots_of(
        lambda: TimeLimit(RewardScalingWrapper(MonitoringWrapper(CountingEnv(length)), 0.1), 2)
    )
    for seed in (5, 6):
        slots.start(0, seed)
        assert slots.step(1, np.zeros(ROWS, np.int64)) == []
        assert slots.step(1, np.zeros(ROWS, np.int64)) == [0]
        assert slots.returns[0] == pytest.approx(0.3)
        assert slots.final_infos[0]["episode"] == {"r": 3.0, "l": 2}


def test_rows_of_no_slot_can_be_read() -> None:
    """They hold the first category where there are categories."""
    slots = slots_of(lambda: CountingEnv(3))
    assert not slots.obs[""].any()
    assert blank(spaces.Discrete(3, start=5)) == 5
    assert blank(spaces.MultiDiscrete([2, 3], start=[4, -1])).tolist() == [4, -1]


# -- what is wrong -------------------------------------------------------------------------------


def test_an_environment_that_raises() -> None:
    """The message names it, the step and the seed of the episode, which move with a swap."""
    slots = slots_of(FailingEnv, first=10)
    for i in range(3):
        slots.start(i, 70 + i)
    slots.step(3, np.zeros(ROWS, np.int64))
    slots.step(2, np.zeros(ROWS, np.int64))
    slots.swap(0, 2)
    words = "environment 11 failed at step 3 of the episode with seed 71: RuntimeError: the wheel"
    with pytest.raises(EnvError, match=f"^{words}") as caught:
        slots.step(3, np.zeros(ROWS, np.int64))
    assert isinstance(caught.value.__cause__, RuntimeError)
    words = "environment 12 failed at step 3 of the episode with seed 70: RuntimeError: the wheel"
    slots.swap(1, 0)
    slots.start(1, 75)
    slots.start(0, 76)
    with pytest.raises(EnvError, match=f"^{words}"):
        slots.step(3, np.zeros(ROWS, np.int64))


def start_and_step(slots: EnvSlots, seed: int) -> list[int]:
    """The first step of an episode in slot 0."""
    slots.start(0, seed)
    return slots.step(1, np.zeros(ROWS, np.int64))


def test_infos_that_are_no_dicts() -> None:
    """They are an error in a reset, and at the end of an episode."""

    class Odd(PlannedEnv):
        def reset(self, **kwargs: Any) -> Any:
            obs, info = super().reset(**kwargs)
            return obs, "so" if self.seed == 8 else info

        def step(self, action: Any) -> Any:
            *result, _ = super().step(action)
            return *result, "so"

    for seed, when in ((7, "at step 1"), (8, "in the reset")):
        words = f"^environment 0 failed {when} of .* seed {seed}: TypeError: info is 'so', expected"
        with pytest.raises(EnvError, match=words):
            start_and_step(slots_of(Odd), seed)


@sweep("value", BAD)
@sweep("where", ["speed", "temperature", "reward"])
def test_numbers_that_are_not_finite(where: str, value: float) -> None:
    """They are an error that names environment, step and seed, or lose the episode alone."""
    spoilt = [SpoiltEnv, lambda: SpoiltEnv(where, 2, value), SpoiltEnv]
    for on_non_finite in ("raise", "skip"):
        slots = EnvSlots(spoilt, ROWS, first=3, on_non_finite=on_non_finite)
        for i in range(3):
            slots.start(i, i)
        assert slots.step(3, np.zeros(ROWS, np.int64)) == []
        if on_non_finite == "raise":
            words = f"environment 4 failed at step 2 of the episode with seed 1: NonFin.*{where}"
            with pytest.raises(EnvError, match=f"{words}.* is {value}"):
                slots.step(3, np.zeros(ROWS, np.int64))
            continue
        assert slots.step(3, np.zeros(ROWS, np.int64)) == [1]
        assert slots.lost.tolist() == [False, True, False, False, False, False]
        assert slots.returns[:3].tolist() == [2.0, 1.0, 2.0]
        assert slots.lengths[:3].tolist() == [2, 2, 2]
        assert slots.final_infos == {}
        for column in slots.obs.values():
            assert not column[1].any()
            assert column[[0, 2]].all()
        slots.swap(1, 2)
        assert slots.lost.tolist() == [False, False, True, False, False, False]
        ended = [slots.step(2, np.zeros(ROWS, np.int64)) for _ in range(3)]
        assert ended == [[], [], [0, 1]]
        assert slots.returns[:2].tolist() == [5.0, 5.0]
        slots.start(2, 5)
        assert not slots.lost.any()
        assert (slots.returns[2], slots.lengths[2]) == (0.0, 0)


def test_lost_episodes_one_after_the_other() -> None:
    """A slot that is not played in since it lost one does not lose another."""
    spoilt = [lambda at=at: SpoiltEnv("temperature", at) for at in (3, 2, 1)]
    slots = EnvSlots(spoilt, ROWS, on_non_finite="skip")
    for i in range(3):
        slots.start(i, i)
    ended = [slots.step(count, np.zeros(ROWS, np.int64)) for count in (3, 2, 1)]
    assert ended == [[2], [1], [0]]
    assert slots.lengths[:3].tolist() == [3, 2, 1]
    assert slots.lost[:3].all()


def test_a_lost_episode_that_ends() -> None:
    """A bad last reward loses it, too; it is among the ended ones once."""
    spoilt = [SpoiltEnv, lambda: SpoiltEnv("reward", 5)]
    slots = EnvSlots(spoilt, ROWS, on_non_finite="skip")
    slots.start(0, 0)
    slots.start(1, 0)
    for _ in range(4):
        assert slots.step(2, np.zeros(ROWS, np.int64)) == []
    assert slots.step(2, np.zeros(ROWS, np.int64)) == [0, 1]
    assert slots.lost[:2].tolist() == [False, True]
    assert slots.returns[:2].tolist() == [5.0, 4.0]


@sweep("on_non_finite", ["raise", "skip"])
@sweep("where", ["speed", "temperature"])
def test_what_does_not_matter(where: str, on_non_finite: str) -> None:
    """A last observation, and rows of no slot, whatever is looked at meanwhile."""
    spoilt = [lambda: SpoiltEnv(where, 5), SpoiltEnv]
    slots = EnvSlots(spoilt, ROWS, on_non_finite=on_non_finite)
    for column in slots.obs.values():
        column[2:] = 8 if column.dtype.kind == "i" else np.nan
    slots.start(0, 0)
    slots.start(1, 0)
    slots.step(1, np.zeros(ROWS, np.int64))
    ended = [slots.step(2, np.zeros(ROWS, np.int64)) for _ in range(4)]
    assert ended == [[], [], [], [0]]
    slots.start(0, 0)
    assert slots.step(2, np.zeros(ROWS, np.int64)) == [1]
    assert not slots.lost.any()
    assert slots.returns[1] == 5.0


@sweep("on_non_finite", ["raise", "skip"])
def test_first_observations_have_to_be_finite(on_non_finite: str) -> None:
    """There is no episode that could be given up."""
    slots = slots_of(lambda: SpoiltEnv("temperature", 0), on_non_finite=on_non_finite)
    with pytest.raises(EnvError, match=r"^environment 1 failed in the reset of the episode with "):
        slots.start(1, 4)
