"""Detection of state shared by the environments of a process."""

from __future__ import annotations

import random
import re
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from agent_envs import Heaps, LuckyHeaps
from own_envs import newest
from toy_envs import CountingEnv, JitterEnv, NestedEnv

from maze_train import ActionMaskWrapper, SequentialVectorEnv
from maze_train.core.errors import EnvError
from maze_train.envs.agents import JointEnv
from maze_train.run.examination import Findings, examine, notes, replay_difference


class SharedEnv(CountingEnv):
    """Environment whose simulator is shared by all instances in a process."""

    simulator: ClassVar[dict[str, int]] = {"t": 0}

    def reset(self, **seed_and_options: Any) -> Any:
        """Reset the simulator."""
        self.simulator["t"] = 0
        return super().reset(**seed_and_options)

    def observe(self) -> Any:
        """Return the step of the simulator."""
        self.simulator["t"] += 1
        return np.array([0.0, self.simulator["t"]], np.float32)


class LonelyEnv(CountingEnv):
    """Environment whose second instance cannot be built."""

    built: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        if self.built:
            raise RuntimeError("one emulator per process")
        self.built.append(1)


class StolenEnv(CountingEnv):
    """Environment whose second instance takes over the simulator of the first one."""

    owner: ClassVar[list[Any]] = [None]

    def __init__(self) -> None:
        super().__init__()
        self.owner[0] = self

    def observe(self) -> Any:
        """Raise an error if another instance was built."""
        if self.owner[0] is not self:
            raise RuntimeError("the connection is closed")
        return super().observe()


class GlobalEnv(CountingEnv):
    """Environment that draws from the global generator of Python."""

    def observe(self) -> Any:
        """Return a random observation."""
        return np.array([0.0, random.random()], np.float32)


class ChanceEnv(CountingEnv):
    """Environment with a generator that is not seeded by reset."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng()

    def observe(self) -> Any:
        """Return a random observation."""
        return np.array([0.0, self.rng.random()], np.float32)


class LastingEnv(CountingEnv):
    """Environment that observes its number of episodes."""

    def observe(self) -> Any:
        """Return the count."""
        return np.array([len(self.seeds), self.t], np.float32)


class RoundedEnv(CountingEnv):
    """Environment whose instances differ by rounding errors."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = gymnasium.spaces.Box(-1.0, 1e6, (2,), np.float64)
        RoundedEnv.count += 1
        self.error = RoundedEnv.count * 2e-14

    def observe(self) -> Any:
        """Return the step."""
        return np.array([0.5, self.t + self.error], np.float64)


@pytest.mark.parametrize(
    ("make", "difference"),
    [
        (CountingEnv, ""),
        (NestedEnv, ""),
        (RoundedEnv, ""),
        (lambda: ActionMaskWrapper(gymnasium.make(newest("Taxi"))), ""),
        (lambda: JointEnv(Heaps()), ""),
        (ChanceEnv, "after 0 actions in the episode with seed .*observation differs by up to 0"),
        (LastingEnv, "the observation differs by up to"),
        (lambda: JointEnv(LuckyHeaps()), ""),  # has a state
    ],
)
def test_whether_an_episode_is_repeated(make: Any, difference: str) -> None:
    """Episodes can be replayed in a second instance, as on resume."""
    found = replay_difference(make)
    assert bool(found) == bool(difference)
    assert re.search(difference, found)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (CountingEnv, Findings()),
        (NestedEnv, Findings()),
        (lambda: gymnasium.make("CartPole-v1"), Findings()),
        (SharedEnv, Findings(shares_state=True)),
        (GlobalEnv, Findings(generators=("random",))),
        (JitterEnv, None),
    ],
)
def test_what_is_found(make: Any, found: Findings | None) -> None:
    """Shared state and global generators are detected, except in nondeterministic environments."""
    result = examine(make)
    assert result == found or (found is None and not result.shares_state)


@pytest.mark.parametrize(
    ("make", "problem"), [(LonelyEnv, "one emulator per process"), (StolenEnv, "is closed")]
)
def test_a_second_one_fails(make: Any, problem: str) -> None:
    """Failures of a second instance are reported, at construction or later."""
    assert problem in examine(make).second_fails
    with pytest.raises(EnvError):
        examine(LonelyEnv)
    LonelyEnv.built.clear()
    with pytest.raises(EnvError, match=r"emulator.*runner=local runner.n_workers=<runner"):
        SequentialVectorEnv([LonelyEnv] * 2)


@pytest.mark.parametrize(
    ("sizes", "is_told"),
    [
        ((4, 10, 0), True),
        ((4, 10, 4), True),
        ((1, 1, 0), True),
        ((4, 4, 4), False),
        ((1, 1, 1), False),
        ((1, 0, 0), False),
    ],
)
def test_the_remedy_is_named(sizes: tuple[int, int, int], is_told: bool) -> None:
    """The remedy is printed unless each environment already has its process."""
    for findings in (Findings("boom"), Findings(shares_state=True)):
        lines = notes(findings, *sizes)
        assert len(lines) == is_told
        for line in lines:
            assert f"runner=local runner.n_workers={sizes[0]} " in line
            assert f"evaluation.concurrency={sizes[0]}" in line
    assert notes(Findings(), *sizes) == []
    assert "np.random" in notes(Findings(generators=("np.random",)), *sizes)[0]
