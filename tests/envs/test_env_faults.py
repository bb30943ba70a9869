"""Error messages for failing environments, with remedies."""

from __future__ import annotations

import re
import sys
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from cases import sweep
from toy_envs import CountingEnv

from maze_train import SequentialVectorEnv
from maze_train.core.errors import EnvError
from maze_train.core.targets import InlineObject
from maze_train.envs.config import EnvConfig
from maze_train.envs.factory import EnvFactory
from maze_train.envs.slice import EnvSlice
from maze_train.envs.wrappers import MonitoringWrapper, RewardScalingWrapper

SCALED = partial(RewardScalingWrapper, scale=1.0)


class Panic(BaseException):
    """Exception that does not derive from Exception, as raised by some native libraries."""


class FragileEnv(CountingEnv):
    """Environment that raises an error in one of its methods.

    Args:
        where: Name of the method.
        error: The error.
    """

    def __init__(self, where: str = "", error: BaseException | None = None) -> None:
        super().__init__()
        self.error = error
        if where == "init":
            self.fail()
        if where:
            setattr(self, where, self.fail)

    def fail(self, *_: Any, **__: Any) -> Any:
        assert self.error is not None
        raise self.error

    def render(self) -> None: ...


def run_vector(make: Any) -> None:
    """Build, reset, step and close an environment in a vector environment."""
    vector = SequentialVectorEnv([make])
    vector.reset(seed=0)
    vector.step([0])
    vector.close()


def run_episodes(make: Any) -> None:
    """Build, start, step, render and close an environment in a slice."""
    envs = EnvSlice.for_playing([make])
    envs.start(0, 0)
    envs.step()
    envs.render(0)
    envs.close()


@pytest.mark.parametrize(
    ("run", "where"),
    [(run_vector, w) for w in ("init", "reset", "step", "close")]
    + [(run_episodes, w) for w in ("init", "reset", "step", "render", "close")],
)
@sweep("error", [SystemExit(0), Panic("index"), GeneratorExit()])
def test_environment_exceptions_become_env_error(
    run: Any, where: str, error: BaseException
) -> None:
    """All exceptions become EnvError, including SystemExit, which would look like a normal exit."""
    text = re.escape(f"{type(error).__name__}: {error}")
    with pytest.raises(EnvError, match=text) as caught:
        run(partial(FragileEnv, where, error))
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("run", "where"),
    [(run_vector, w) for w in ("init", "reset", "step")] + [(run_episodes, "step")],
)
def test_keyboard_interrupt_is_not_an_env_error(run: Any, where: str) -> None:
    """KeyboardInterrupt is not converted to EnvError."""
    with pytest.raises(KeyboardInterrupt):
        run(partial(FragileEnv, where, KeyboardInterrupt()))


@pytest.mark.parametrize(
    "settings",
    [{"target": InlineObject(lambda: sys.exit(0), "x.Y")}, {"id": "Fragile-v0"}],
    ids=str,
)
def test_exiting_constructor_names_the_environment(
    settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a constructor exits, the error names the environment, registered or not."""
    spec = gymnasium.envs.registration.EnvSpec("Fragile-v0", entry_point=lambda: sys.exit(0))
    monkeypatch.setitem(gymnasium.registry, "Fragile-v0", spec)
    factory = EnvFactory(EnvConfig(**settings))
    with pytest.raises(EnvError, match=r"building (x\.Y|Fragile-v0) .* failed: SystemExit: 0"):
        factory()


class Reward(CountingEnv):
    """Environment that returns a given reward."""

    def __init__(self, reward: Any) -> None:
        super().__init__()
        self.given = reward

    def reward(self, action: Any) -> Any:
        return self.given


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        (None, "reward is None, expected a number"),
        ([0.25], r"reward is \[0\.25\], expected a number"),
        (
            np.ones(1),
            r"reward is array\(\[1\.\]\), expected a number: return float",
        ),
        ("1,0", "reward is '1,0', expected a number"),
        (1e300, r"reward is 1e\+300, expected a finite number in the range of float32, up to 3"),
    ],
    ids=str,
)
@sweep("run", [run_vector, run_episodes])
@sweep("wrap", [lambda env: env, MonitoringWrapper, SCALED])
def test_invalid_reward_names_environment_and_step(
    run: Any, wrap: Any, reward: Any, told: str
) -> None:
    """An invalid reward raises an error with the environment and the step, with any wrappers."""
    if isinstance(reward, np.ndarray) and np.lib.NumpyVersion(np.__version__) < "2.4.0":
        pytest.skip("older versions of NumPy take it for a number, with a warning")
    with pytest.raises(EnvError, match=f"environment 0 failed at step 1 of the .*: {told}"):
        run(lambda: wrap(Reward(reward)))


class OldStep(CountingEnv):
    """Environment whose `step` returns four values, as in Gym up to 0.25."""

    def step(self, action: Any) -> Any:
        return super().step(action)[:4]


class OldReset(CountingEnv):
    """Environment whose `reset` returns an observation only."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0]


class OldSeed(CountingEnv):
    """Environment whose `reset` takes no seed."""

    def reset(self) -> Any:  # type: ignore[override]  # intended
        return super().reset()[0]


@pytest.mark.parametrize("kind", [OldStep, OldReset, OldSeed])
@sweep("run", [run_vector, run_episodes])
@sweep("wrap", [lambda env: env, partial(gymnasium.wrappers.TimeLimit, max_episode_steps=9)])
def test_old_gym_signatures_name_the_compatibility_wrapper(run: Any, kind: Any, wrap: Any) -> None:
    """The error for old Gym signatures names the expected ones and the compatibility wrapper."""
    words = r"expected reset\(.* -> \(observation, info\) and step.*shimmy\.GymV21Compat"
    with pytest.raises(EnvError, match=words):
        run(lambda: wrap(kind()))


def test_classes_of_gym_name_the_compatibility_wrapper() -> None:
    """The error for classes not derived from `gymnasium.Env` names the compatibility wrapper."""
    with pytest.raises(EnvError, match=r"expected a gymnasium\.Env.*shimmy\.GymV21Compat"):
        EnvFactory.from_any(lambda: object())()


def test_environment_errors_get_no_advice() -> None:
    """Errors within an environment do not mention the compatibility wrapper."""

    class Unpacks(CountingEnv):
        def step(self, action: Any) -> Any:
            _, _ = (1,)

    with pytest.raises(EnvError, match="expected 2, got 1") as caught:
        run_vector(Unpacks)
    assert "shimmy" not in str(caught.value)


def test_errors_number_environments_over_actors() -> None:
    """Messages use the index of an environment among all actors."""
    numbers = [SequentialVectorEnv([partial(Reward, None)], first_env=first) for first in (0, 6)]
    told = []
    for vector in numbers:
        vector.reset(seed=3)
        with pytest.raises(EnvError) as caught:
            vector.step([0])
        told.append(str(caught.value))
    assert told[0].replace("environment 0", "environment 6") == told[1]
    with pytest.raises(EnvError, match="environment 6 could not be built"):
        SequentialVectorEnv([partial(FragileEnv, "init", Panic())], first_env=6)


@pytest.mark.parametrize("name", ["terminated", "truncated"])
def test_flag_per_agent_is_named(name: str) -> None:
    """The error shows the flag that is an array with one entry per agent."""

    class Team(CountingEnv):
        def step(self, action: Any) -> Any:
            obs, reward, *flags, info = super().step(action)
            flags[name == "truncated"] = np.zeros(2, bool)
            return obs, reward, *flags, info

    words = rf"failed at step 1 .*{name} is array\(\[False, False\]\), expected True or False"
    with pytest.raises(EnvError, match=words):
        run_vector(Team)
