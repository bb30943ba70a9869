"""Large images: estimated duration, and the suggested setting."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import pytest
import yaml
from gymnasium import spaces
from short_runs import QUIET

from maze_train import EnvConfig, EnvFactory, MultiAgentEnv, Turn, load_config, train
from maze_train.algorithms.ppo.learner import PPOLearner
from maze_train.run.notes import start_notes
from maze_train.training import contexts as update_clock
from maze_train.training.contexts import UpdateClock
from maze_train.training.outcome import Interrupted

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = (120, 160, 3)
SMALL = {
    "algorithm.n_rollout_steps": 8,
    "algorithm.batch_size": 8,
    "algorithm.n_optimization_epochs": 4,
    "algorithm.epoch_length": 1,
    "runner.concurrency": 1,
    "evaluation.n_episodes": 0,
    "env.max_episode_steps": 5,
}


class Screen(gymnasium.Env[Any, Any]):
    """Environment with a large image as observation."""

    observation_space = spaces.Box(0, 255, SHAPE, np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Start an episode."""
        super().reset(seed=seed)
        return np.zeros(SHAPE, np.uint8), {}

    def step(self, action: Any) -> Any:
        """Return another image."""
        return np.full(SHAPE, 9, np.uint8), 1.0, False, False, {}


class Screens(MultiAgentEnv):
    """Multi-agent environment with two agents that observe large images."""

    possible_agents = ("left", "right")

    def observation_space(self, agent: str) -> Any:
        """Return an image space."""
        return spaces.Box(0, 255, SHAPE, np.uint8)

    def action_space(self, agent: str) -> Any:
        """Return a space of two actions."""
        return spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Turn:
        """Start an episode."""
        return Turn({agent: np.zeros(SHAPE, np.uint8) for agent in self.possible_agents})

    def step(self, actions: dict[str, Any]) -> Turn:
        """Return the same observations."""
        return self.reset()


@pytest.mark.parametrize("env", [Screen, Screens])
def test_the_line_of_the_note_works(env: Any) -> None:
    """The suggested `env.wrappers` resizes images in single-agent and multi-agent environments."""
    config = load_config({"env": env, "algorithm": "ppo"})
    space = EnvFactory(config.env)().observation_space
    (note,) = (note for note in start_notes(config, space) if "pixels" in note)
    assert "is an image of 120 x 160 pixels" in note
    found = re.search(r"60 x 80 is faster: 'env\.wrappers=(.*)'$", note)
    assert found is not None
    wrappers = yaml.safe_load(found[1])
    made = EnvFactory(EnvConfig(target=config.env.target, wrappers=wrappers))()
    obs, _ = made.reset(seed=0)
    assert made.observation_space.contains(obs)
    image = obs if env is Screen else obs["agents"]["left"]
    assert image.shape == (60, 80, 3)
    assert not [note for note in start_notes(config, made.observation_space) if "pixels" in note]


@pytest.mark.exhaustive
def test_a_signal_in_a_long_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The second minibatch reports the duration of the update, and the signal the time left."""
    policy_loss, calls = PPOLearner.policy_loss, 0

    def slow(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:  # two of four minibatches remain
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.8)
        return policy_loss(self, *args)

    monkeypatch.setattr(PPOLearner, "policy_loss", slow)
    monkeypatch.setattr(update_clock, "LONG_UPDATE_S", 2.0)
    with pytest.raises(Interrupted):
        train(Screen, "ppo", run_dir=tmp_path / "run", total_steps=64, **SMALL, **QUIET)
    told = capfd.readouterr().err
    order = (
        r"is an image of 120 x 160 pixels[\s\S]*note: an update takes about 0:00:\d\d\n[\s\S]*"
        r"SIGTERM: finishing the update, at most about 0:00:\d\d more \(send it again .*\)\n"
    )
    assert re.search(order, told), told
    assert told.count("an update takes") == 1


def test_an_update_without_known_minibatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The duration is reported after the first update and predicts the next one."""
    now, told = [0.0], list[str]()
    clock = UpdateClock(told.append, lambda: now[0])
    for seconds in (30.0, 90.0):
        with clock.update(1):
            first = clock.remaining()
            now[0] += seconds
    assert told == ["an update takes about 0:00:30"]
    assert first == ", at most about 0:00:30 more"
    assert clock.remaining() == ""
