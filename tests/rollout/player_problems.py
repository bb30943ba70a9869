"""What tests of played episodes share: environments, policies of users, comparisons to the bit."""

from __future__ import annotations

import math
import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from actor_envs import ActorEnv
from es_problems import EndlessEnv, UnequalEnv, WalkEnv, model_for

from maze_train.rollout.agents import PolicyAgent, RandomAgent
from maze_train.rollout.episode_player import PlaySettings
from maze_train.rollout.player import RolloutPlayer
from maze_train.rollout.population import ModelAgent
from maze_train.types import tree_leaves

if TYPE_CHECKING:
    from pathlib import Path

    from maze_train.envs.slots import EnvSlots
    from maze_train.rollout.episode_player import PlayedEpisode

RECORDED = PlaySettings(record=True)


class RememberingPolicy:
    """Its actions follow from all that it saw in the episode, and from chance.

    Args:
        kind: `discrete` (1, 2, 3), `box` or `dict`: key of `actor_envs.ACTIONS`.
    """

    def __init__(self, kind: str = "discrete") -> None:
        self.kind = kind
        self.seen: list[Any] = []
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Forget, and draw other numbers."""
        self.random = np.random.default_rng(seed)
        self.seen.clear()

    def act(self, observation: Any) -> Any:
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

    def observe(self) -> Any:
        """What the agent sees, in the memory of what it saw before."""
        found = super().observe()
        self.memory = found if self.memory is None else self.memory
        self.memory[:] = found
        return self.memory

    def step(self, action: Any) -> Any:
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

    def __init__(
        self, shape: tuple[int, int] = (33, 50), render_mode: Any = "rgb_array", endless: Any = ()
    ) -> None:
        super().__init__()
        self.shape, self.render_mode, self.endless = shape, render_mode, endless

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode of three or six steps, or an endless one."""
        found = super().reset(seed=seed, options=options)
        self.length = -1 if seed in self.endless else 3 if self.length < 6 else 6
        return found

    def render(self) -> Any:
        """A picture."""
        return np.full((*self.shape, 3), 40 * min(self.t, 6), np.uint8)


class FailsForSeedEnv(UnequalEnv):
    """Fails at the second step of the episodes of one seed.

    Args:
        how: `raise`, `hang`, `kill`, or `nan`.
        bad: The seed.
        once: A file that says that it failed, so that it does not again; None: it always fails.
    """

    def __init__(self, how: str, bad: int, once: Path | None = None) -> None:
        super().__init__()
        self.how, self.bad, self.once = how, bad, once

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        found = super().reset(seed=seed, options=options)
        self.is_bad = seed == self.bad
        self.length = max(self.length, 3)
        return found

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step, or fail."""
        obs, reward, *rest = super().step(action)
        if not self.is_bad or self.t != 2 or not self._is_due():
            return (obs, reward, *rest)
        if self.how == "raise":
            raise RuntimeError("the wheel came off")
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "hang":
            time.sleep(600.0)
        return (obs, float("nan"), *rest)

    def _is_due(self) -> bool:
        if self.once is None:
            return True
        is_first = not self.once.exists()
        self.once.touch()
        return is_first


def model_agent(model: Any, deterministic: bool, slots: EnvSlots) -> ModelAgent:
    """What builds the agent of a model."""
    return ModelAgent(model, len(slots), deterministic)


def model_problem(obs: str, actions: str, policy: str, deterministic: bool = False) -> Any:
    """Environment and agent of a model."""
    make = partial(WalkEnv, obs, actions)
    return make, partial(model_agent, model_for(make, policy), deterministic)


def user_problem(obs: str, actions: str) -> Any:
    """Environment and agent of a policy with a memory."""
    policy = partial(RememberingPolicy, actions)
    return partial(WalkEnv, obs, actions), partial(PolicyAgent, policy)


PROBLEMS: dict[str, Any] = {
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


def bits(episode: PlayedEpisode) -> tuple[Any, ...]:
    """All that is told of an episode, to the bit."""
    numbers = np.array([episode.episode_return, episode.success]).tobytes()
    flags = (episode.terminated, episode.truncated, episode.lost, episode.video)
    found: list[Any] = [episode.number, episode.seed, numbers, episode.length, *flags]
    trajectory = episode.trajectory
    if trajectory is not None:
        found += [trajectory.terminated, trajectory.truncated, trajectory.seed]
        for tree in (trajectory.obs, trajectory.actions, trajectory.rewards):
            keys = list(tree) if isinstance(tree, dict) else []
            found.append(keys)
            found += [(x.shape, x.dtype.name, x.tobytes()) for x in tree_leaves(tree)]
    return tuple(found)


def play_alone(
    make: Any, make_agent: Any, seeds: Any, settings: PlaySettings = RECORDED, **kwargs: Any
) -> list[tuple[Any, ...]]:
    """Bits of episodes that are played one after the other in this process."""
    with RolloutPlayer(make, make_agent, settings, num_envs=1, **kwargs) as player:
        return [bits(episode) for episode in player.play(seeds)]


__all__ = [
    "PROBLEMS",
    "RECORDED",
    "ActorEnv",
    "EndlessEnv",
    "FailsForSeedEnv",
    "PictureEnv",
    "RememberingPolicy",
    "ReusingEnv",
    "UnequalEnv",
    "WalkEnv",
    "bits",
    "model_agent",
    "model_problem",
    "play_alone",
    "user_problem",
]
