"""What tests of played episodes share: environments, policies of users, comparisons to the bit."""

from __future__ import annotations

import math
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
from es_problems import UnequalEnv, WalkEnv, bits, model_for

from maze_train.collect.agents import PolicyAgent, RandomAgent
from maze_train.collect.episode_player import ModelAgent, PlaySettings
from maze_train.collect.player import RolloutPlayer
from maze_train.workers.process_pool import LocalProcesses

RECORDED = PlaySettings(record=True)


class RememberingPolicy:
    """Its actions follow from all that it saw in the episode, and from chance.

    Args:
        kind: `discrete` (1, 2, 3), `box` or `dict`: key of `actor_envs.ACTIONS`.
    """

    def __init__(self, kind="discrete"):
        self.kind = kind
        self.seen = []
        self.reset(0)

    def reset(self, seed):
        """Forget, and draw other numbers."""
        self.random = np.random.default_rng(seed)
        self.seen.clear()

    def act(self, observation):
        """An action."""
        self.seen.append(observation["a"] if isinstance(observation, dict) else observation)
        total = float(np.sum(self.seen)) + self.random.normal()
        choice = int(10.0 * abs(math.sin(total))) % 3
        box = -0.5 + 0.75 * abs(np.sin(total + np.arange(2)))
        if self.kind == "dict":
            return {"gear": choice, "force": box}
        return 1 + choice if self.kind == "discrete" else box


class ReusingEnv(WalkEnv):
    """Gives the same array again and again, and writes into the actions that it got."""

    memory: Any = None

    def observe(self):
        """What the agent sees, in the memory of what it saw before."""
        found = super().observe()
        self.memory = found if self.memory is None else self.memory
        self.memory[:] = found
        return self.memory

    def step(self, action):
        """Step, and spoil the action."""
        result = super().step(action.copy())
        action[:] = 7.0
        return result


class PictureEnv(UnequalEnv):
    """Shows its time as the grey of a picture.

    Args:
        shape: Height and width.
        render_mode: As in gymnasium.
        endless: Whether its episodes never end.
    """

    def __init__(self, shape=(33, 50), render_mode="rgb_array", endless=()):
        super().__init__()
        self.shape, self.render_mode, self.endless = shape, render_mode, endless

    def reset(self, *, seed=None, options=None):
        """Begin an episode of three or six steps, or an endless one."""
        found = super().reset(seed=seed, options=options)
        self.length = -1 if seed in self.endless else 3 if self.length < 6 else 6
        return found

    def render(self):
        """A picture."""
        return np.full((*self.shape, 3), 40 * min(self.t, 6), np.uint8)


def model_agent(model, deterministic, slots):
    """What builds the agent of a model."""
    return ModelAgent(model, len(slots), deterministic)


def model_problem(obs, actions, policy, deterministic=False):
    """Environment and agent of a model."""
    make = partial(WalkEnv, obs, actions)
    return make, partial(model_agent, model_for(make, policy), deterministic)


def user_problem(obs, actions):
    """Environment and agent of a recurrent policy."""
    policy = partial(RememberingPolicy, actions)
    return partial(WalkEnv, obs, actions), partial(PolicyAgent, policy)


PROBLEMS = {
    "sampled box": partial(model_problem, "box", "box", "plain"),
    "likely box": partial(model_problem, "box", "box", "plain", True),
    "sampled discrete": partial(model_problem, "box", "discrete", "normalised"),
    "masks": partial(model_problem, "mask", "discrete", "plain"),
    "dicts": partial(model_problem, "dict", "dict", "normalised"),
    "memory": partial(model_problem, "box", "discrete", "memory"),
    "random box": lambda: (partial(WalkEnv, "box", "box"), RandomAgent),
    "random dict": lambda: (partial(WalkEnv, "dict", "dict"), RandomAgent),
    "random masks": lambda: (partial(WalkEnv, "mask", "discrete"), RandomAgent),
    "user": partial(user_problem, "box", "discrete"),
    "user dict": partial(user_problem, "dict", "dict"),
}
"""Functions that give what builds an environment, and what builds an agent."""


def closing_env():
    """A class of environments, and the list of those that were closed."""
    closed = []
    return type("ClosingEnv", (WalkEnv,), {"close": lambda self: closed.append(self)}), closed


class Episodes:
    """Episodes of an agent that are played somewhere, with the calls of `es_problems.Rollouts`.

    Args:
        make: Builds an environment.
        n_workers: How many processes; 0: this one.
        num_envs: Environments of all workers together.
        make_agent: Builds the agent.
        settings: How episodes are played.
        on_non_finite: What to do about numbers that are not finite.
        **processes: Settings of the processes.
    """

    def __init__(
        self,
        make=UnequalEnv,
        n_workers=0,
        num_envs=4,
        make_agent=RandomAgent,
        settings=RECORDED,
        on_non_finite="raise",
        **processes,
    ):
        processes = {"start_method": "fork", "timeout_s": 30.0, **processes}
        place = LocalProcesses(n_workers, **processes) if n_workers else None
        self.of = RolloutPlayer(
            make, make_agent, settings, place, num_envs=num_envs, on_non_finite=on_non_finite
        )
        self.close = self.of.close

    def generate(self, expected):
        """The episodes of the first seeds, to be closed."""
        return closing(self.of.play(range(expected)))

    def take(self, count):
        """They, to the bit."""
        with self.generate(count) as episodes:
            return [bits(episode) for episode in episodes]


def play_alone(make, make_agent, seeds, settings=RECORDED, **kwargs):
    """Bits of episodes that are played one after the other in this process."""
    with RolloutPlayer(make, make_agent, settings, num_envs=1, **kwargs) as player:
        return [bits(episode) for episode in player.play(seeds)]
