"""Small environments with known behaviour."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from maze_train import SequentialVectorEnv, SubprocVectorEnv
from maze_train.envs.third_party import GymVectorEnv

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class CountingEnv(gymnasium.Env[Any, Any]):
    """Environment that observes (episode seed mod 1000, step) and rewards the step number.

    Subclasses change observations, rewards or infos.
    """

    def __init__(self, length: int = 5, truncate: bool = False) -> None:
        self.observation_space: spaces.Space[Any] = spaces.Box(-1.0, 1e6, (2,), np.float32)
        self.action_space: spaces.Space[Any] = spaces.Discrete(3)
        self.length = length
        self.truncate = truncate
        self.seeds: list[int | None] = []
        self.t = 0

    def observe(self) -> Any:
        return np.array([(self.seeds[-1] or 0) % 1000, self.t], np.float32)

    def reward(self, action: Any) -> float:
        return float(self.t)

    def info(self) -> dict[str, Any]:
        return {"t": self.t, "half": 0.5 * self.t}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.t = 0
        return self.observe(), {"options": str(options), **self.info()}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        ended = self.t >= self.length
        ends = ended and not self.truncate, ended and self.truncate
        return self.observe(), self.reward(action), *ends, self.info()


class AwkwardEnv(CountingEnv):
    """Environment that reuses one read-only float64 buffer for its observations."""

    def observe(self) -> Any:
        if not hasattr(self, "buffer"):
            self.buffer = np.zeros(2, np.float64)
        self.buffer.flags.writeable = True
        self.buffer[:] = super().observe()
        self.buffer.flags.writeable = False
        return self.buffer


class JitterEnv(CountingEnv):
    """Environment whose observations after reset do not follow from the seed."""

    def observe(self) -> Any:
        obs = super().observe()
        obs[0] += 1000 * (os.getpid() % 1000) + id(self) // 16 % 1000 if self.t else 0
        return obs


class NestedEnv(CountingEnv):
    """Environment with nested random observations, and nested actions that determine the reward."""

    def __init__(self, length: int = 7) -> None:
        super().__init__(length)
        robot = spaces.Tuple((spaces.Box(0.0, 1.0, (2, 2), np.float64), spaces.Discrete(10)))
        image = spaces.Box(0, 255, (3, 4, 1), np.uint8)
        self.observation_space = spaces.Dict({"robot": robot, "image": image})
        arm = spaces.Dict({"force": spaces.Box(-1.0, 1.0, (2,), np.float32)})
        self.action_space = spaces.Tuple((spaces.Discrete(3), arm))

    def observe(self) -> Any:
        return {
            "robot": (self.np_random.random((2, 2)), int(self.np_random.integers(10))),
            "image": self.np_random.integers(0, 256, (3, 4, 1), dtype=np.uint8),
        }

    def reward(self, action: Any) -> float:
        gear, arm = action
        reward = float(gear) + float(arm["force"].sum())
        arm["force"] += 100.0  # Environments may overwrite the actions they receive.
        return reward


def lose_wheel() -> None:
    """Raise an error."""
    raise RuntimeError("the wheel came off")


FAILURES = {
    "raise": lose_wheel,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": partial(os._exit, 7),
    "hang": partial(time.sleep, 60.0),
}


class FailingEnv(CountingEnv):
    """Environment that fails at a step of its episodes, in its constructor or at reset.

    Args:
        how: A key of `FAILURES`, or `constructor`, `spaces`, `reset`, `nan`.
        at: Number of the failing step in the episode.
        marker: File created at a failure; if the file exists, the environment does not fail.
        length: Number of steps of an episode.
    """

    def __init__(
        self, how: str = "raise", at: int = 3, marker: Path | None = None, length: int = 100
    ) -> None:
        super().__init__(length)
        self.how, self.at, self.marker = how, at, marker
        if how == "constructor":
            raise ValueError("no such level")
        if how == "spaces":
            self.observation_space = spaces.Box(-1.0, 1e6, (3,), np.float32)

    def fails_now(self, how: str) -> bool:
        fails = self.how == how and not (self.marker and self.marker.exists())
        if fails and self.marker:
            self.marker.touch()
        return fails

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if self.fails_now("reset"):
            raise RuntimeError("the door is locked")
        return super().reset(seed=seed, options=options)

    def reward(self, action: Any) -> float:
        if self.t == self.at and self.how in FAILURES and self.fails_now(self.how):
            FAILURES[self.how]()
        return float("nan") if self.how == "nan" and self.t == self.at else super().reward(action)


class OddInfoEnv(CountingEnv):
    """Environment whose infos differ in types and shapes between instances."""

    def __init__(self, index: int, kind: Any = None) -> None:
        super().__init__(length=1)
        self.index, self.kind = index, kind

    def info(self) -> dict[str, Any]:
        scores = {"score": [0, 0.5, 2][self.index], "path": np.zeros(self.index + 1)}
        return {**scores, "kind": self.kind}


class LivesEnv(CountingEnv):
    """Environment that reports the remaining lives by step in its infos."""

    def __init__(
        self,
        lives: Sequence[int] = (3, 3, 2, 2, 1, 1, 0),
        length: int = 6,
        truncate: bool = False,
    ) -> None:
        super().__init__(length, truncate)
        self.lives = lives

    def info(self) -> dict[str, Any]:
        return {"lives": self.lives[self.t]}


class SpoiltEnv(CountingEnv):
    """Environment with dict observations and a non-finite value at a step of its first episodes."""

    def __init__(
        self,
        where: str = "",
        at: int = 3,
        value: float = float("nan"),
        episodes: int = 1,
        length: int = 5,
        truncate: bool = True,
    ) -> None:
        super().__init__(length, truncate)
        self.observation_space = spaces.Dict(
            {
                "count": spaces.Discrete(1000),
                "speed": spaces.Box(-np.inf, np.inf, (2, 3), np.float32),
                "temperature": spaces.Box(-np.inf, np.inf, (), np.float64),
            }
        )
        self.where, self.at, self.value, self.episodes = where, at, value, episodes

    def spoils(self, where: str) -> bool:
        return self.where == where and self.t == self.at and len(self.seeds) <= self.episodes

    def observe(self) -> Any:
        speed = np.full((2, 3), self.t, np.float32)
        if self.spoils("speed"):
            speed[1, 2] = self.value
        temperature = np.float64(self.value if self.spoils("temperature") else self.t)
        return {"count": self.t, "speed": speed, "temperature": temperature}

    def reward(self, action: Any) -> float:
        return self.value if self.spoils("reward") else 1.0


class AddOne(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Wrapper that adds a constant to every observation."""

    def __init__(self, env: gymnasium.Env[Any, Any], amount: float = 1.0) -> None:
        super().__init__(env)
        self.amount = amount

    def observation(self, observation: Any) -> Any:
        return observation + np.float32(self.amount)


def not_an_env() -> str:
    """Return a string instead of an environment."""
    return "hello"


class ThreadCountingEnv(CountingEnv):
    """Environment that imports torch or OpenCV and observes its number of threads."""

    def __init__(self, package: str) -> None:
        super().__init__()
        found = importlib.import_module(package)
        self.count = found.get_num_threads if package == "torch" else found.getNumThreads

    def observe(self) -> Any:
        return np.full(2, self.count(), np.float32)


class LateTorchEnv(CountingEnv):
    """Environment that imports torch at reset; observes whether it was new, and a random value."""

    def observe(self) -> Any:
        is_new = "torch" not in sys.modules
        return np.array([is_new, importlib.import_module("torch").rand(())], np.float32)


# -- Vector environments of all backends, and comparisons of their steps ---------------------------


START_METHODS = ["fork", "forkserver"]

FORKS = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


AS_IN_TRAINING = {"copy": False, "step_infos": False}


def here(factories: Any, **settings: Any) -> Any:
    """Return environments in this process, with the settings of training."""
    return SequentialVectorEnv(factories, **{**AS_IN_TRAINING, **settings})


def workers(factories: Any, **settings: Any) -> Any:
    """Return environments in two worker processes, unless `n_workers` is given."""
    settings = {"n_workers": 2, "start_method": "fork", **AS_IN_TRAINING, **settings}
    return SubprocVectorEnv(factories, **settings)


def restarted(factories: Any, **settings: Any) -> Any:
    """Return environments in worker processes that are restarted when they fail."""
    return workers(factories, on_worker_failure="restart", **settings)


def third_party(factories: Any, mode: Any = AutoresetMode.SAME_STEP) -> Any:
    """Return a vector environment of Gymnasium, wrapped as a third-party environment."""
    return GymVectorEnv(SyncVectorEnv(factories, autoreset_mode=mode), **AS_IN_TRAINING)


BACKENDS = [here, pytest.param(workers, marks=pytest.mark.slow)]
ALL = [*BACKENDS, third_party]
OTHER_MODES = [
    pytest.param(partial(third_party, mode=mode), id=mode.name)
    for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED)
]


def columns(tree: Any) -> dict[str, Any]:
    """Return arrays by key; a single array has the key ''."""
    return tree if isinstance(tree, dict) else {"": tree}


def play(vector: Any, steps: int) -> None:
    """Take random steps."""
    for _ in range(steps):
        vector.step(vector.action_space.sample())


def state_after(factories: Any, steps: int) -> Any:
    """Return the state of environments in this process after random steps."""
    with here(factories) as one:
        one.reset(seed=5)
        play(one, steps)
        return one.state_dict()


def assert_same(one: Any, other: Any) -> None:
    """Check that keys, dtypes and bytes are equal."""
    assert columns(one).keys() == columns(other).keys()
    for key, column in columns(one).items():
        expected = np.asarray(columns(other)[key])
        assert column.dtype == expected.dtype
        assert column.tobytes() == expected.tobytes(), key


def assert_equal_steps(one: Any, other: Any) -> None:
    """Check that two steps returned the same bytes and infos."""
    for a, b in zip(one[:4], other[:4], strict=True):
        assert_same(a, b)
    assert_same_infos(one[4], other[4])


def assert_same_infos(ours: Any, theirs: Any) -> None:
    """Check that keys, dtypes and values are equal at every level."""
    assert sorted(ours) == sorted(theirs)
    for key, value in theirs.items():
        if isinstance(value, dict):
            assert_same_infos(ours[key], value)
            continue
        assert ours[key].dtype == value.dtype
        for a, b in zip(ours[key], value, strict=True):
            if isinstance(b, dict):
                assert_same(a, b)
            else:
                np.testing.assert_array_equal(a, b)
