"""Checks of environments on request: `check_env` and `maze-run check`."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from agent_envs import Heaps, LuckyHeaps
from own_envs import newest
from short_runs import QUIET
from toy_envs import CountingEnv, JitterEnv, NestedEnv

from maze_train import ActionMaskWrapper, ConfigError, check_env, train
from maze_train.cli import main
from maze_train.envs.agents import JointEnv


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


REPEATED = "the same seed and actions lead to another episode"
SHARED = "environments in one process change each other's observations"


def checked(make: Any) -> str:
    """Return the failed checks of an environment, except those of Gymnasium."""
    problems = check_env(make, n_steps=20).problems
    return "\n".join(text for text in problems if not text.startswith("Gymnasium"))


@pytest.mark.parametrize(
    "make",
    [
        CountingEnv,
        NestedEnv,
        RoundedEnv,
        lambda: ActionMaskWrapper(gymnasium.make(newest("Taxi"))),
        lambda: JointEnv(Heaps()),
        lambda: JointEnv(LuckyHeaps()),  # saves its state
    ],
    ids=["counting", "nested", "rounded", "masked", "agents", "with a state"],
)
def test_reproducible_environments_have_no_problems(make: Any) -> None:
    """Masks, agents, nested spaces, rounding and saved states are supported."""
    assert checked(make) == ""


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (ChanceEnv, REPEATED),
        (LastingEnv, REPEATED),
        (SharedEnv, SHARED),
        (StolenEnv, "a second environment in one process fails (environment 0 failed"),
        (GlobalEnv, "global random generators (random)"),
    ],
)
def test_irreproducible_and_shared_environments_are_reported(make: Any, problem: str) -> None:
    """Each kind of problem is found."""
    assert problem in checked(make)


def test_nondeterministic_environments_are_not_reported_as_shared() -> None:
    """Observations of an environment with noise differ beside a second one, and without it."""
    assert SHARED not in checked(JitterEnv)


def test_gymnasiums_checker_is_included() -> None:
    """Its errors are problems, its warnings are notes."""
    report = check_env("CartPole-v1")
    assert report.problems == ()
    assert any("infinity" in note for note in report.notes)
    assert report.step_s > 0.0
    assert report.reset_s > 0.0
    problems = check_env(LastingEnv, n_steps=5).problems
    assert any(text.startswith("Gymnasium's checker") for text in problems)


def test_third_party_vector_environments_raise() -> None:
    """Only single environments can be checked."""
    with pytest.raises(ConfigError, match=r"env.backend"):
        check_env(gymnasium.make_vec("CartPole-v1", 2))


def test_check_command_exits_with_1_on_problems(capfd: pytest.CaptureFixture[str]) -> None:
    """The exit code is 1 with the problems, otherwise 0."""
    assert main(["check", "env=CartPole-v1"]) == 0
    assert "CartPole-v1: 0 problems; reset" in capfd.readouterr().out
    assert main(["check", "env._target_=toy_envs.JitterEnv", "n_check_steps=9"]) == 1
    assert REPEATED in capfd.readouterr().err


class CountedEnv(CountingEnv):
    """Environment that counts its instances and steps."""

    built = stepped = 0

    def __init__(self) -> None:
        super().__init__()
        CountedEnv.built += 1

    def step(self, action: Any) -> Any:
        """Count a step."""
        CountedEnv.stepped += 1
        return super().step(action)


def test_training_takes_no_other_steps(tmp_path: Any) -> None:
    """A run without evaluation builds its environments only, and takes no other steps."""
    train(
        CountedEnv,
        "ppo",
        run_dir=tmp_path / "run",
        total_steps=64,
        overrides={
            **QUIET,
            "runner.concurrency": 2,
            "algorithm.n_rollout_steps": 16,
            "algorithm.batch_size": 8,
            "evaluation.n_episodes": 0,
            "model.normalization.mode": "none",
        },
    )
    assert (CountedEnv.built, CountedEnv.stepped) == (2, 64)
