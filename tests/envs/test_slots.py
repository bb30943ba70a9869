"""Slots: one episode at a time in each, the one that it is told to play."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cases import sweep
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from toy_envs import CountingEnv, FailingEnv, LivesEnv, NestedEnv, SpoiltEnv, assert_same

from maze_train.core.errors import EnvError
from maze_train.core.step_end import StepEnd
from maze_train.envs.atari import EpisodicLifeWrapper
from maze_train.envs.monitoring import MonitoringWrapper
from maze_train.envs.stepped import EnvSlots, EpisodeError
from maze_train.envs.wrappers import RewardScalingWrapper

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = 6


class PlannedEnv(CountingEnv):
    """Episodes as their seed says.

    Seed s: s mod 7 + 1 steps, which end terminated (s mod 3 = 0), truncated (1) or both (2). The
    reward is a function of seed, step and action; it or the observation may be spoilt in a step.
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


class SlowSlot:
    """A slot of `PlannedEnv` in plain Python."""

    def __init__(self, seed: int) -> None:
        self.env = PlannedEnv()
        self.start(seed)

    def start(self, seed: int) -> None:
        self.seed, self.total, self.length = seed, 0.0, 0
        self.lost = self.is_blank = False
        self.obs, _ = self.env.reset(seed=seed)
        self.ends: list[bool] = [False, False]
        self.info: Any = None

    def step(self, action: int) -> bool:
        """Whether the episode is over."""
        self.obs, reward, *self.ends, info = self.env.step(action)
        self.length += 1
        self.info = info if any(self.ends) else None
        self.lost = self.is_blank = bool(
            np.isnan(reward) or (np.isnan(self.obs["plan"][0]) and not self.info)
        )
        self.total += 0.0 if self.lost else reward
        return self.lost or any(self.ends)

    @property
    def end(self) -> StepEnd:
        ends = (self.lost, *self.ends, True)
        codes = (StepEnd.DROPPED, StepEnd.TERMINATED, StepEnd.TRUNCATED, StepEnd.RUNNING)
        return codes[ends.index(True)]


def slots_of(make: Callable[[], Any], count: int = 3, **settings: Any) -> EnvSlots:
    """Slots with environments of one kind, and some rows more."""
    return EnvSlots([make] * count, ROWS, **settings)


def assert_equal_slots(slots: EnvSlots, slow: list[SlowSlot]) -> None:
    """All that is reported of slots is what is reported of the slow ones."""
    for i, one in enumerate(slow):
        assert slots.seeds[i] == one.seed
        assert slots.returns[i] == pytest.approx(one.total, rel=1e-14)
        assert (slots.lengths[i], slots.end[i]) == (one.length, one.end)
        assert slots.final_infos.get(i) == one.info
        assert (i in slots.final_obs) is any(one.ends)
        if one.info is not None:
            assert_same(slots.final_obs[i]["plan"], one.obs["plan"])
        if one.is_blank or one.info is None:
            expected = {"kind": 5, "plan": np.zeros(3)} if one.is_blank else one.obs
            assert slots.obs["kind"][i] == expected["kind"]
            assert_same(slots.obs["plan"][i], expected["plan"])


def leave(slots: EnvSlots, slow: list[SlowSlot], i: int) -> None:
    """What is seen of an episode that ended: a copy of its last observation, if that is finite."""
    if slow[i].info is None:
        return
    found = slots.last_observation(i)
    if np.isnan(slow[i].obs["plan"][0]):
        assert found is None
        slow[i].lost = True
        return
    assert found is not None
    assert_same(found["plan"], slow[i].obs["plan"])
    found["plan"][:] = 0
    assert_same(slots.final_obs[i]["plan"], slow[i].obs["plan"])


# -- episodes ------------------------------------------------------------------------------------


@sweep("is_dirty", [False, True])
def test_slots_are_what_slow_ones_are(is_dirty: bool) -> None:
    """Whatever is started, stepped, swapped, lost and over: all that is reported of each of them.

    What rows of no slot hold does not matter.
    """
    rng = np.random.default_rng(0)
    slots = slots_of(PlannedEnv, 4, on_non_finite="skip")
    assert slots.obs["kind"].tolist() == [5] * ROWS
    if is_dirty:
        slots.obs["plan"][-1] = np.nan
    slow = [SlowSlot(i) for i in range(4)]
    for i in range(4):
        slots.start(i, i)
    count, lost, over = 4, 0, 0
    for _ in range(600):
        actions = rng.integers(0, 5, ROWS)
        ended = slots.step(count, actions)
        assert ended == [i for i in range(count) if slow[i].step(int(actions[i]))]
        assert_equal_slots(slots, slow)
        for i in ended:
            leave(slots, slow, i)
            lost, over = lost + slow[i].lost, over + 1
        for i in reversed(ended):  # Some continue with the next episode, others to the end.
            if rng.random() < 0.7:
                restart(slots, slow, i, rng)
            else:
                count -= 1
                swap(slots, slow, i, count)
        if count < 4 and rng.random() < 0.5:
            restart(slots, slow, count, rng)
            count += 1
        if count and rng.random() < 0.2:
            swap(slots, slow, *rng.integers(0, count, 2).tolist())
            restart(slots, slow, int(rng.integers(count)), rng)
        assert_equal_slots(slots, slow)
    assert over > 300
    assert 50 < lost < over - 50


def restart(slots: EnvSlots, slow: list[SlowSlot], i: int, rng: np.random.Generator) -> None:
    """Another episode, in both."""
    seed = int(rng.integers(10_000))
    slots.start(i, seed)
    slow[i].start(seed)


def swap(slots: EnvSlots, slow: list[SlowSlot], i: int, j: int) -> None:
    """Exchange two, in both."""
    if i != j:
        slots.swap(i, j)
        slow[i], slow[j] = slow[j], slow[i]


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


@sweep("where", ["speed", "temperature"])
def test_last_observations_that_are_no_good(where: str) -> None:
    """An error where they are asked for."""
    slots = slots_of(lambda: SpoiltEnv(where, 1, length=1))
    slots.start(0, 5)
    assert slots.step(1, np.zeros(ROWS, np.int64)) == [0]
    words = rf"step 1 of the episode with seed 5: NonFiniteError: last observation '{where}' is"
    with pytest.raises(EpisodeError, match=words):
        slots.last_observation(0)
    slots.final_obs[0] = {"speed": np.zeros(3)}
    with pytest.raises(EpisodeError, match="seed 5: SpaceError"):
        slots.last_observation(0)


def test_what_environments_show() -> None:
    """Their pictures; an error names the seed."""

    class Shown(CountingEnv):
        def render(self) -> Any:
            return 10 // self.t

    slots = slots_of(Shown)
    for i in (0, 1):
        slots.start(i, 5 + i)
    with pytest.raises(EpisodeError, match=r"environment 1 .* seed 6: ZeroDivisionError") as caught:
        slots.render(1)
    assert caught.value.seed == 6
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), again.seed, str(again)) == (EpisodeError, 6, str(caught.value))
    slots.step(2, np.zeros(ROWS, np.int64))
    assert slots.render(1) == 10


def test_pictures_without_a_display() -> None:
    """Where the libraries by which MuJoCo draws fail, the error says how it draws without one."""

    class Drawn(CountingEnv):
        def render(self) -> Any:
            exec("None.eglQueryString", {"__name__": "OpenGL.EGL"})

    slots = slots_of(Drawn)
    slots.start(0, 5)
    with pytest.raises(EpisodeError, match=r"AttributeError: .*MUJOCO_GL=egl.*libosmesa6"):
        slots.render(0)


# -- wrappers ------------------------------------------------------------------------------------


def test_each_start_begins_a_new_game() -> None:
    """A life that was lost ends neither the episode nor the game, another start does."""
    slots = slots_of(lambda: EpisodicLifeWrapper(LivesEnv()))
    slots.start(0, 1)
    assert slots.step(1, np.ones(ROWS, np.int64)) == []
    assert slots.step(1, np.ones(ROWS, np.int64)) == []  # a life was lost, and the game continues
    assert not slots.end.any()
    assert (slots.lengths[0], slots.envs[0].unwrapped.t) == (2, 3)
    slots.start(0, 2)
    assert slots.envs[0].unwrapped.seeds == [1, 2]
    assert slots.obs[""][0].tolist() == [2.0, 0.0]


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
        assert (slots.returns[0], slots.lengths[0]) == (3.0, 2)
        end = StepEnd.TRUNCATED if how == "truncated" else StepEnd.TERMINATED
        assert slots.end[:2].tolist() == [end] * 2
        info = slots.final_infos[0]
        assert slots.counted[0] == (6.0, 3)
        assert (info["lives"], info["is_success"]) == (2, True)
        assert [slots.final_obs[i].tolist() for i in (0, 1)] == [[seed, 2.0], [9.0, 2.0]]
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
def test_an_episode_is_a_whole_game(limit: int) -> None:
    """Lives lost on the way are no ends; the steps that continue after them are not counted.

    A limit of steps does not start over there; one within the game has its own count.
    """

    def make() -> Any:
        return TimeLimit(EpisodicLifeWrapper(TimeLimit(LivesEnv(), 6)), limit)

    slots, rewards = slots_of(make), [1.0, 2.0, 4.0, 6.0][:limit]
    for seed in (1, 2):
        slots.start(0, seed)
        ends = [slots.step(1, np.ones(ROWS, np.int64)) for _ in rewards]
        assert ends == [[]] * (len(rewards) - 1) + [[0]]
        assert (slots.returns[0], slots.lengths[0]) == (sum(rewards), len(rewards))


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
        assert slots.counted[0] == (3.0, 2)


# -- what is wrong -------------------------------------------------------------------------------


def test_an_environment_that_raises() -> None:
    """The message names it, the step and the seed of the episode, which moved with a swap."""
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


@sweep("case", [(7, "at step 1"), (8, "in the reset")])
def test_infos_that_are_no_dicts(case: tuple[int, str]) -> None:
    """They are an error in a reset, and at the end of an episode."""
    seed, when = case

    class Odd(CountingEnv):
        def reset(self, **kwargs: Any) -> Any:
            obs, info = super().reset(**kwargs)
            return obs, "so" if seed == 8 else info

        def info(self) -> Any:
            return "so" if self.t else {}

    slots = slots_of(lambda: Odd(1))
    words = f"^environment 0 failed {when} of .* seed {seed}: TypeError: info is 'so', expected"
    with pytest.raises(EnvError, match=words):  # noqa: PT012
        slots.start(0, seed)
        slots.step(1, np.zeros(ROWS, np.int64))


@sweep("on_non_finite", ["raise", "skip"])
def test_first_observations_have_to_be_finite(on_non_finite: str) -> None:
    """There is no episode that could be given up."""
    slots = slots_of(lambda: SpoiltEnv("temperature", 0), on_non_finite=on_non_finite)
    with pytest.raises(EnvError, match=r"^environment 1 failed in the reset of the episode with "):
        slots.start(1, 4)
