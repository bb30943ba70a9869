"""Environments that return their values in unusual forms, through both vector environments."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from maze_train import SequentialVectorEnv, SubprocVectorEnv
from maze_train.errors import EnvError


class OneBuffer:
    """Writes all observations into one array, which nobody else may write to."""

    def __init__(self, dtype):
        self.array = np.zeros(2, dtype)

    def __call__(self, values):
        self.array.flags.writeable = True
        self.array[:] = values
        self.array.flags.writeable = False
        return self.array


class Odd(gymnasium.Env):
    """Observes (k, t) in episode k, passed through functions for each of the values of a step."""

    def __init__(self, observe=np.array, reward=float, flag=bool, dtype=np.float32, buffer=None):
        self.observation_space = spaces.Box(0, 100, (2,), dtype)
        self.action_space = spaces.Discrete(2)
        self.observe = observe if buffer is None else OneBuffer(buffer)
        self.reward, self.flag = reward, flag
        self.episode, self.t = -1, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self.observe([self.episode, 0]), {}

    def step(self, action):
        self.t += 1
        obs = self.observe([self.episode, self.t])
        return obs, self.reward(self.t / 4), self.flag(self.t == 3), self.flag(False), {}


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
    """Everything that 7 steps of equal environments tell, by environment, as plain numbers."""
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


@pytest.mark.parametrize("form", FORMS + OTHER_SPACES)
def test_unusual_forms_give_the_same_numbers(form):
    """Lists, scalars, other number types, read-only and reused arrays are what they stand for."""
    expected = numbers(SequentialVectorEnv([Odd]))
    assert numbers(SequentialVectorEnv([lambda: Odd(**form)])) == expected


def test_unusual_forms_in_worker_processes():
    """The same, all at once."""
    (expected,) = numbers(SequentialVectorEnv([Odd]))
    with SubprocVectorEnv([lambda k=k: Odd(**k) for k in FORMS], n_workers=2) as vector:
        assert numbers(vector) == [expected] * len(FORMS)


REFUSED = [
    ({"observe": lambda values: [values]}, r"shape \(1, 2\), its space says \(2,\)"),
    ({"observe": lambda values: "ab"}, r"shape \(\), its space says \(2,\)"),
    ({"observe": lambda values: list("ab")}, "dtype <U1, its space says float32"),
    ({"observe": lambda values: np.array(values, object)}, "dtype object"),
    ({"dtype": np.int16, "observe": np.float32}, "dtype float32, its space says int16"),
    (
        {"reward": lambda r: [r]},
        r"failed at step 1 .*reward is \[.*expected a number",
    ),
    ({"reward": lambda r: np.ones(1)}, r"reward is array\(\[1\.\]\), expected a number"),
    ({"reward": lambda r: r * 1j}, "failed at step 1 of the episode.*reward is .*j, expected a"),
    (
        {"reward": lambda r: None},
        "failed at step 1 .*reward is None, expected a number",
    ),
    ({"reward": lambda r: -1e300}, r"at step 1 .*reward is -1e\+300, .* float32 .* 3\.4e\+38"),
    ({"flag": lambda end: np.array([end, end])}, "failed at step 1 of the episode"),
]


@pytest.mark.parametrize(("form", "message"), REFUSED)
def test_values_that_can_not_be_meant_are_refused(form, message):
    """The error names the environment and the step."""
    vector = SequentialVectorEnv([lambda: Odd(**form)])
    with pytest.raises(EnvError, match=f"environment 0.*{message}"):
        numbers(vector)


def test_refusals_reach_the_main_process():
    """A worker's error is told in the same words."""
    form, message = REFUSED[0]
    with (
        SubprocVectorEnv([Odd, lambda: Odd(**form)], n_workers=2) as vector,
        pytest.raises(EnvError, match=f"environment 1.*{message}"),
    ):
        numbers(vector)


class OutOfRange(gymnasium.Env):
    """Observations that are numbers of the right kind, but not of the space."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, space, obs):
        self.observation_space, self.obs = space, obs

    def reset(self, *, seed=None, options=None):
        return self.obs, {}

    def step(self, action):
        return self.obs, 0.0, False, False, {}


@pytest.mark.parametrize(
    ("space", "obs", "message"),
    [
        (gymnasium.spaces.Discrete(4), 4, r"is 4, which is not in Discrete\(4\)"),
        (gymnasium.spaces.Discrete(4, start=-1), np.int64(-2), "is -2"),
        (gymnasium.spaces.MultiDiscrete([2, 4]), np.array([1, -1]), r"is \[ 1 -1\]"),
        (gymnasium.spaces.Box(0, 255, (2,), np.uint8), np.array([300, 1]), "uint8 can not hold"),
    ],
)
def test_numbers_out_of_range_are_refused(space, obs, message):
    """They would be stored as other numbers, or read as other categories."""
    vector = SequentialVectorEnv([lambda: OutOfRange(space, obs)])
    with pytest.raises(EnvError, match=message):
        vector.reset(seed=0)
