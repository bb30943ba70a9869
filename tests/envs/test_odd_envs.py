"""Environments with unusual return values, or without a legal action."""

from __future__ import annotations

import re
from inspect import signature
from typing import Any

import numpy as np
import pytest
from agent_envs import Heaps
from cases import sweep
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from toy_envs import ALL, BACKENDS, FORKS, OTHER_MODES, CountingEnv, here

from maze_train import train
from maze_train.collect.recording import frames_per_second
from maze_train.core.errors import ConfigError, EnvError
from maze_train.envs.agents import JointEnv
from maze_train.envs.slice import EnvSlice
from maze_train.envs.third_party import GymVectorEnv, autoreset_mode
from maze_train.envs.wrappers import (
    ActionMaskWrapper,
    AllLegalWrapper,
    MonitoringWrapper,
    ObservationStackWrapper,
)

pytestmark = FORKS


class OneBuffer:
    """Function that returns all observations in one read-only array."""

    def __init__(self, dtype):
        self.array = np.zeros(2, dtype)

    def __call__(self, values):
        self.array.flags.writeable = True
        self.array[:] = values
        self.array.flags.writeable = False
        return self.array


class Odd(CountingEnv):
    """Environment that observes (k, t) in episode k and converts its results by functions."""

    def __init__(self, observe=np.array, reward=float, flag=bool, dtype=np.float32, buffer=None):
        super().__init__(length=3)
        self.observation_space = spaces.Box(0, 100, (2,), dtype)
        self.form = observe if buffer is None else OneBuffer(buffer)
        self.reward_form, self.flag = reward, flag

    def observe(self):
        return self.form([len(self.seeds) - 1, self.t])

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, self.reward_form(reward / 4), self.flag(terminated), self.flag(truncated), {}


FORMS = [
    {"observe": list},
    {"observe": tuple},
    {"observe": lambda values: [np.float32(v) for v in values]},
    {"observe": lambda values: np.array(values, np.float64)},
    {"buffer": np.float32},
    {"buffer": np.float64},
    {"buffer": np.int64},
    {"reward": np.array},
    {"reward": np.float32},
    {"flag": np.bool_},
    {"flag": np.array},
    {"flag": int},
]
OTHER_SPACES = [
    {"dtype": np.float64, "observe": lambda values: np.array(values, np.float64)},
    {"dtype": np.float64, "buffer": np.float64},
    {"dtype": np.float64, "observe": list},
    {"dtype": np.int16, "observe": list},
]


def numbers(vector):
    """Return all results of 7 steps by environment, as plain values."""
    obs, _ = vector.reset(seed=0)
    seen = [[row.tolist()] for row in obs]
    for _ in range(7):
        *columns, infos = vector.step(np.zeros(vector.num_envs, np.int64))
        dtypes = [vector.single_observation_space.dtype, np.float64, np.bool_, np.bool_]
        assert [column.dtype for column in columns] == dtypes
        for i, told in enumerate(seen):
            told += [column[i].tolist() for column in columns]
            if columns[2][i]:
                told.append(infos["final_obs"][i].tolist())
    return seen


@pytest.mark.parametrize("make", BACKENDS)
@sweep("forms", [FORMS, *([form] for form in OTHER_SPACES)])
def test_unusual_return_types_give_identical_results(forms, make):
    """Lists, scalars, other dtypes, read-only and reused arrays are accepted."""
    (expected,) = numbers(here([Odd]))
    with make([lambda k=k: Odd(**k) for k in forms]) as vector:
        assert numbers(vector) == [expected] * len(forms)


class NoMetadata(CountingEnv):
    """Environment whose metadata is None, as in robosuite and shimmy."""

    metadata = None


@pytest.mark.parametrize("make", BACKENDS)
def test_environments_without_metadata(make):
    """Environments without metadata are supported, also in wrappers and vector environments."""
    with make([NoMetadata]) as plain, make([CountingEnv]) as usual:
        assert numbers(plain) == numbers(usual)
    with make([lambda: MonitoringWrapper(ObservationStackWrapper(NoMetadata(), 2))]) as vector:
        assert vector.monitored
        assert vector.frame_stack == {"": 2}
    agents = Heaps()
    agents.metadata = None
    assert list(JointEnv(agents).metadata) == ["agents", "teams"]
    assert frames_per_second(NoMetadata()) == 30
    native = SyncVectorEnv([CountingEnv])  # has the mode as an attribute, too
    native.metadata = None
    assert autoreset_mode(native) is AutoresetMode.NEXT_STEP


REFUSED = [
    ({"observe": lambda values: [values]}, r"shape \(1, 2\), its space has \(2,\)"),
    ({"observe": lambda values: "ab"}, r"shape \(\), its space has \(2,\)"),
    ({"observe": lambda values: list("ab")}, "dtype <U1, its space has float32"),
    ({"observe": lambda values: np.array(values, object)}, "dtype object"),
    ({"dtype": np.int16, "observe": np.float32}, "dtype float32, its space has int16"),
    ({"reward": lambda r: r * 1j}, "failed at step 1 of the episode.*reward is .*j, expected a"),
    ({"flag": lambda end: np.array([end, end])}, "failed at step 1 of the episode"),
    ({"flag": lambda end: "yes"}, "at step 1 .*terminated is 'yes', expected True or False"),
    ({"flag": lambda end: [end]}, r"at step 1 .*terminated is \[.*\], expected True or False"),
]


@sweep("case", REFUSED)
def test_invalid_environment_values_raise(case):
    """Invalid values raise an error that names the environment and the step."""
    form, message = case
    with pytest.raises(EnvError, match=f"environment 0.*{message}"):
        numbers(here([lambda: Odd(**form)]))


OUTSIDE = r"the observation contains -?\d+.*, which is not in Box"


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize(
    ("form", "told"),
    [
        ({}, ""),
        ({"observe": list}, "the observation is a list, which is converted"),
        ({"observe": lambda values: np.array(values) - 1}, OUTSIDE),
        ({"observe": lambda values: np.array(values) * 51}, OUTSIDE),
        ({"dtype": np.int64, "observe": lambda values: np.array(values) * 51}, OUTSIDE),
    ],
)
def test_observations_of_another_form_are_noted_once(make, form, told):
    """A note names the observation once: in the first reset, or soon after the first step."""
    notes = []
    with make([lambda: Odd(**form)] * 2) as vector:
        vector.notify = notes.append
        for _ in range(2):
            numbers(vector)
    assert len(notes) == bool(told)
    assert not told or re.match(told, notes[0])


class Team(CountingEnv):
    """Environment that returns a reward for each of two agents."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def reward(self, action):
        return self.form([0.0, 1.0])


@pytest.mark.parametrize("form", [list, tuple, np.array, lambda x: dict(enumerate(x))])
def test_several_rewards_suggest_multi_agent_env(form):
    """The error for several rewards names `MultiAgentEnv`; other errors do not."""
    with pytest.raises(EnvError, match=r"expected a number; if each agent .*MultiAgentEnv"):
        numbers(here([lambda: Team(form)]))
    with pytest.raises(EnvError, match=r"expected a number$"):
        numbers(here([lambda: Team(lambda _: None)]))


class Counter(CountingEnv):
    """Environment whose final observation is one step outside its discrete spaces."""

    def __init__(self, truncate, beyond=0):
        super().__init__(length=4, truncate=truncate)
        self.observation_space = spaces.Dict(
            {
                "left": spaces.Discrete(4, start=1),
                "made": spaces.MultiDiscrete([9, 4]),
            }
        )
        self.beyond = beyond

    def observe(self):
        ended = self.beyond if self.t == 4 else 0
        return {"left": 4 - self.t - ended, "made": np.array([self.t, self.t])}


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("truncate", [False, True])
def test_final_observation_is_clipped_to_nearest_category(make, truncate):
    """The final observation is clipped to the nearest category; other values raise an error."""
    with make([lambda: Counter(truncate)] * 2) as vector:
        vector.reset(seed=0)
        for _ in range(4):
            infos = vector.step([0, 0])[4]
        last = infos["final_obs"][1]
        assert vector.single_observation_space.contains(last)
        assert (last["left"], last["made"].tolist()) == (1, [4, 3])
    envs = EnvSlice.for_playing([lambda: Counter(truncate)], final_obs="all")
    envs.start(0, 3)
    while envs.playing:
        envs.step()
    assert envs.final_obs["made"][0].tolist() == [4, 3]
    with make([lambda: Counter(truncate, beyond=1)]) as vector:
        vector.reset(seed=0)
        for _ in range(3):
            vector.step([0])
        with pytest.raises(EnvError, match=r"at step 4 .*'left' is -1, which is not in Discrete"):
            vector.step([0])


class Fixed(CountingEnv):
    """Environment whose observations are constant."""

    def __init__(self, space, obs):
        super().__init__()
        self.observation_space, self.observe = space, lambda: obs


HAS_DTYPE = "dtype" in signature(spaces.Discrete).parameters
"""Discrete spaces of gymnasium 1.1 have no dtype, and `contains` overflows."""
NARROW = (
    [
        (spaces.Discrete(6, start=250, dtype=np.uint8), [250, 255], [249, 0]),
        (spaces.Discrete(2, start=2**63 - 2), [2**63 - 2, 2**63 - 1], [2**63 - 3, 0]),
    ]
    if HAS_DTYPE
    else []
)


@pytest.mark.parametrize(
    ("space", "legal", "illegal"),
    [
        *NARROW,
        (spaces.Discrete(3, start=-(2**63)), [-(2**63), 2 - 2**63], [3 - 2**63, 2**63 - 1]),
        (spaces.MultiDiscrete([6, 2], np.uint8, start=[250, 0]), [[250, 0], [255, 1]], [[250, 2]]),
        (spaces.MultiDiscrete([2], np.int64, start=[2**63 - 2]), [[2**63 - 1]], [[0]]),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_categories_up_to_the_dtype_limit_are_valid(space, legal, illegal, nested):
    """Exactly the elements of the space are valid, although `start + n` exceeds the dtype."""
    outer = spaces.Dict({"level": space}) if nested else space
    for values, is_legal in ((legal, True), (illegal, False)):
        for value in values:
            obs = np.asarray(value, space.dtype)
            assert space.contains(obs) is is_legal
            with here([lambda obs=obs: Fixed(outer, {"level": obs} if nested else obs)]) as vector:
                if is_legal:
                    vector.reset(seed=0)
                    vector.step(vector.action_space.sample())
                else:
                    with pytest.raises(EnvError, match="is not in"):
                        vector.reset(seed=0)


@sweep(
    "case",
    [
        (spaces.Discrete(4), 4, r"is 4, which is not in Discrete\(4\)"),
        (spaces.Discrete(4, start=-1), np.int64(-2), "is -2"),
        (spaces.MultiDiscrete([2, 4]), np.array([1, -1]), r"is \[ 1 -1\]"),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([300, 1]), "outside the range of uint8"),
    ],
)
def test_observations_out_of_range_raise(case):
    """Values outside the space raise an error instead of wrapping around."""
    space, obs, message = case
    with pytest.raises(EnvError, match=message):
        here([lambda: Fixed(space, obs)]).reset(seed=0)


# -- masks ----------------------------------------------------------------------------------------


class MaskedEnv(CountingEnv):
    """Environment with two masks; at `bad_step` of the second episode, one mask is all zero.

    Step 0 is the reset. An episode ends after 5 steps; the final observation has empty masks.
    """

    def __init__(self, bad_step: int | None = None) -> None:
        super().__init__()
        masks = spaces.Dict({"x": spaces.MultiBinary(3), "y": spaces.Box(0, 1, (2, 2), np.int8)})
        self.observation_space = spaces.Dict(
            {"action_mask": masks, "position": spaces.Box(0, 9, (1,))}
        )
        self.action_space = spaces.Dict(
            {"x": spaces.Discrete(3), "y": spaces.MultiDiscrete([2, 2]), "z": spaces.Box(-1, 1)}
        )
        self.bad = 2, bad_step

    def observe(self) -> Any:
        masks = {"x": np.array([0, 1, 0], np.int8), "y": np.eye(2, dtype=np.int8)}
        if (len(self.seeds), self.t) == self.bad:
            masks["x"] = masks["x"] * 0
        if self.t == 5:
            masks = {key: 0 * mask for key, mask in masks.items()}
        return {"action_mask": masks, "position": np.array([self.t], np.float32)}


def actions(n: int) -> dict[str, Any]:
    """Return actions for n environments."""
    return {"x": np.ones(n, int), "y": np.ones((n, 2), int), "z": np.zeros((n, 1), np.float32)}


def play(vector: Any, steps: int) -> None:
    """Reset and take steps."""
    vector.reset(seed=0)
    for _ in range(steps):
        vector.step(actions(vector.num_envs))


@pytest.mark.parametrize("make", [*ALL, *OTHER_MODES])
@sweep("bad_step", [0, 3])
def test_empty_mask_raises_in_every_backend(make: Any, bad_step: int) -> None:
    """An empty mask raises an error in every backend and autoreset mode, except at the end."""
    message = rf"environment 1 failed (in the reset|at step {bad_step}) .*: no action of part 'x'"
    with make([MaskedEnv, lambda: MaskedEnv(bad_step)]) as vector:
        # If the reset takes a step, the second episode begins one step later.
        delay = vector.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        play(vector, 4 + bad_step + delay)
        with pytest.raises(EnvError, match=message):
            vector.step(actions(2))


@pytest.mark.parametrize("bad_step", [0, 3])
@pytest.mark.parametrize("mode", [None, *AutoresetMode])
def test_empty_mask_all_legal_allows_all_actions(mode: Any, bad_step: int) -> None:
    """`empty_mask=all_legal` makes all actions of the affected choice legal."""
    if mode is None:
        makers = [
            lambda: AllLegalWrapper(MaskedEnv()),
            lambda: AllLegalWrapper(MaskedEnv(bad_step)),
        ]
        vector = here(makers)
    else:
        source = SyncVectorEnv([MaskedEnv, lambda: MaskedEnv(bad_step)], autoreset_mode=mode)
        vector = GymVectorEnv(source, empty_mask="all_legal")
    with vector:
        found = [vector.reset(seed=0)[0]["action_mask/x"].copy()]
        for _ in range(14):
            obs, *_, infos = vector.step(actions(2))
            found.append(obs["action_mask/x"].copy())
            if mode is not AutoresetMode.NEXT_STEP or not infos:
                assert obs["action_mask/y"].tolist() == np.eye(2)[None].repeat(2, 0).tolist()
    delay = mode is AutoresetMode.NEXT_STEP
    for step, (good, bad) in enumerate(found):
        is_last = delay and step % 6 == 5
        assert good.tolist() == ([1, 1, 1] if is_last else [0, 1, 0])
        is_empty = is_last or step == 5 + delay + bad_step
        assert bad.tolist() == ([1, 1, 1] if is_empty else [0, 1, 0])


def test_empty_mask_error_names_the_setting(tmp_path: Any) -> None:
    """The error for an empty mask names `env.empty_mask`, which requires an action mask."""
    given: dict[str, Any] = {"total_steps": 64, "run_dir": str(tmp_path / "run"), "seed": 0}
    given |= {"algorithm.n_rollout_steps": 16, "runner.concurrency": 2, "algorithm": "ppo"}
    given |= {"evaluation.n_episodes": 2, "tracking.progress": "quiet", "tracking.plot": False}
    env = {"_target_": "test_odd_envs.MaskedEnv", "kwargs": {"bad_step": 3}}
    with pytest.raises(EnvError, match=r"no action of part 'x' .*env\.empty_mask=all_legal"):
        train(env, **given)
    given["run_dir"] = str(tmp_path / "other")
    assert train({**env, "empty_mask": "all_legal"}, **given).history
    with pytest.raises(ConfigError, match=r"env\.empty_mask = 'all_legal': .* no action_mask"):
        train({"id": "CartPole-v1", "empty_mask": "all_legal"}, **{**given, "run_dir": None})


class Stones(CountingEnv):
    """Environment with masks in its infos, except in the last one."""

    def __init__(self, truncate=False, missing=5):
        super().__init__(truncate=truncate)
        self.missing = missing

    def info(self):
        return {} if self.t == self.missing else {"action_mask": np.array([1, 0, 1])}


@pytest.mark.parametrize("truncate", [False, True])
def test_last_info_needs_no_mask(truncate: bool) -> None:
    """The last info of an episode needs no mask; all others do."""
    with here([lambda: ActionMaskWrapper(Stones(truncate))]) as vector:
        vector.reset(seed=0)
        for _ in range(11):
            obs = vector.step([0])[0]
            assert obs["action_mask"].tolist() == [[1, 0, 1]]
    with here([lambda: ActionMaskWrapper(Stones(truncate, missing=3))]) as vector:
        vector.reset(seed=0)
        for _ in range(2):
            vector.step([0])
        with pytest.raises(EnvError, match=r"at step 3 .*info has no 'action_mask'"):
            vector.step([0])
