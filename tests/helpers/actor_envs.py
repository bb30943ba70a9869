"""Importable environments, models and seeds for tests of actors."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from maze_train import SequentialVectorEnv
from maze_train.collect.collector import RolloutCollector
from maze_train.core.seeding import Seeds
from maze_train.core.types import tree_leaves, tree_map
from maze_train.envs.wrappers import ObservationStackWrapper
from maze_train.nets.acting import Actor
from maze_train.nets.actor_critic import build_actor_critic
from maze_train.nets.config import ModelConfig, RecurrentConfig

ENDS = ("terminated", "truncated")
T, E = 5, 2
"""Steps of a rollout, and environments of an actor."""

SEED_OF = Seeds(11).integer

INF_BOX = spaces.Box(-np.inf, np.inf, (3,), np.float64)
OBSERVATIONS = {
    "box": INF_BOX,
    "dict": spaces.Dict({"a": INF_BOX, "b": spaces.Discrete(7)}),
    "image": spaces.Box(0, 255, (6, 5), np.uint8),
    "mask": spaces.Dict({"action_mask": spaces.MultiBinary(3), "a": INF_BOX}),
}
ACTIONS = {
    "discrete": spaces.Discrete(3, start=1),
    "box": spaces.Box(-0.5, 0.25, (2,), np.float32),
    "dict": spaces.Dict({"gear": spaces.Discrete(3), "force": spaces.Box(-1.0, 1.0, (2,))}),
}


def number_of(action):
    """Return one value for an action of any space."""
    return float(sum(np.sum(part) for part in tree_leaves(action)))


class ActorEnv(gymnasium.Env):
    """Environment with episodes of 1 to 6 steps that depend on the seed and the actions.

    Args:
        obs: Key of `OBSERVATIONS`.
        actions: Key of `ACTIONS`.
        ends: How episodes may end: `terminated`, `truncated`, `both`.
    """

    def __init__(self, obs="box", actions="discrete", ends=("terminated", "truncated", "both")):
        self.observation_space = OBSERVATIONS[obs]
        self.action_space = ACTIONS[actions]
        self.obs, self.ends = obs, ends
        self.steps = 0

    def observe(self):
        """Return the observation."""
        box = np.array([self.mark, self.t / 10, self.last])
        if self.obs == "dict":
            return {"a": box, "b": self.t}
        if self.obs == "image":
            return np.full((6, 5), int(100 * abs(self.mark) + 10 * self.t) % 256, np.uint8)
        if self.obs == "mask":
            mask = np.ones(3, np.int8)
            mask[(self.t + int(self.mark > 0)) % 3] = 0
            return {"action_mask": mask, "a": box}
        return box

    def reset(self, *, seed=None, options=None):
        """Begin an episode."""
        super().reset(seed=seed)
        self.t, self.last = 0, 0.0
        self.mark = float(self.np_random.standard_normal())
        self.length = int(self.np_random.integers(1, 7))
        self.how = str(self.np_random.choice(self.ends))
        return self.observe(), {}

    def step(self, action):
        """Step; the reward and the next observation depend on the action."""
        assert self.action_space.contains(action), action
        self.t += 1
        self.steps += 1
        self.last = number_of(action)
        reward = self.mark + self.last + float(self.np_random.random())
        flags = [self.t == self.length and self.how in (name, "both") for name in ENDS]
        info = {"is_success": self.mark > 0} if sum(flags) == 1 else {}
        return self.observe(), reward, *flags, info


def is_first(marker):
    """Return whether this call, among all processes, is the first to create the file."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class FaultyEnv(ActorEnv):
    """Environment that fails at every step whose number is a multiple of `at`.

    Args:
        how: `raise`, `exit`, `leave`, `kill`, `hang` or `lost`; `nothing` never fails.
        at: Interval of the failing steps, counted over all episodes.
        marker: File that limits failures to a single one; None: no limit.
    """

    def __init__(self, how, at, marker=None):
        super().__init__()
        self.how_it_fails, self.at, self.marker = how, at, marker

    def is_due(self):
        """Return whether this step fails."""
        return self.steps % self.at == 0

    def step(self, action):
        """Step, or fail."""
        obs, reward, *rest = super().step(action)
        if not self.is_due() or not (self.marker is None or is_first(self.marker)):
            return (obs, reward, *rest)
        if self.how_it_fails == "raise":
            raise RuntimeError("the wheel came off")
        if self.how_it_fails == "exit":
            os._exit(7)
        if self.how_it_fails == "leave":
            sys.exit(0)
        if self.how_it_fails == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how_it_fails == "hang":
            time.sleep(600.0)
        return (obs, float("nan") if self.how_it_fails == "lost" else reward, *rest)


class FailsForSeedEnv(FaultyEnv):
    """Environment that fails at the second step of the episodes with seed `at`."""

    def reset(self, *, seed=None, options=None):
        """Begin an episode of at least three steps."""
        found = super().reset(seed=seed, options=options)
        self.is_bad = seed == self.at
        self.length = max(self.length, 3)
        return found

    def is_due(self):
        """Return whether this step fails."""
        return self.is_bad and self.t == 2


class GatedEnv(ActorEnv):
    """Environment that observes its creation number; steps wait until its gate is open.

    Args:
        folder: Directory of the number files; the file `open/{number}` opens a gate.
        gated: Numbers of the environments that have a gate.
    """

    def __init__(self, folder, gated):
        super().__init__()
        self.number = next(i for i in range(99) if is_first(folder / f"drawn{i}"))
        self.gate = folder / f"open{self.number}" if self.number in gated else None

    def observe(self):
        """Return the number in all entries."""
        return np.full(3, float(self.number))

    def step(self, action):
        """Wait for the gate, then step."""
        while self.gate is not None and not self.gate.exists():
            time.sleep(0.01)
        return super().step(action)


class BrokenLaterEnv(ActorEnv):
    """Environment whose constructor raises an error once the marker file exists."""

    def __init__(self, marker):
        super().__init__()
        if marker.exists():
            raise ValueError("no such level")


class OddOneOutEnv(ActorEnv):
    """Environment whose first instance has a different observation space."""

    def __init__(self, marker):
        super().__init__("dict" if is_first(marker) else "box")


def stacked_env(actions="discrete"):
    """Return an environment that stacks the last three images."""
    return ObservationStackWrapper(ActorEnv("image", actions), 3)


KINDS = {
    "box, discrete": (ActorEnv, {"start_method": "forkserver"}),
    "box, box": (partial(ActorEnv, "box", "box"), {}),
    "dict, dict": (partial(ActorEnv, "dict", "dict"), {}),
    "stacks, discrete": (stacked_env, {}),
    "mask, discrete, memory": (partial(ActorEnv, "mask"), {"memory": True}),
    "stacks, dict, memory": (partial(stacked_env, "dict"), {"memory": True}),
}
"""Environments and settings of their learners."""


def vector_of(make, num_envs=E, skips=False, first_env=0, *, can_be_restored=True):
    """Return `num_envs` environments in this process."""
    return SequentialVectorEnv(
        [make] * num_envs,
        on_non_finite="skip" if skips else "raise",
        can_be_restored=can_be_restored,
        first_env=first_env,
    )


def model_maker(observation_space, action_space, *, memory=False, normalises=False):
    """Return a function that builds a small model in any process."""
    config = ModelConfig(hidden_sizes=[8], rnn=RecurrentConfig(size=4) if memory else None)
    config.normalization.mode = "running" if normalises else "none"
    return partial(build_actor_critic, config, observation_space, action_space, 0)


@torch.no_grad()
def set_version(model, version):
    """Set random weights from a seed; they give diverse actions."""
    generator = torch.Generator().manual_seed(version)
    for param in model.parameters():
        param.copy_(torch.randn(param.shape, generator=generator))


def reference_collector(env, actor, generation=0):
    """Return a collector in this process that is equivalent to an actor."""
    name = f"actors/{actor}/{generation}"
    return RolloutCollector(
        env,
        T,
        env_seed=SEED_OF(f"{name}/episodes"),
        action_seed=SEED_OF(f"{name}/actions"),
        records_log_probs=True,
    )


@torch.no_grad()
def slow_log_probs(rollout, model):
    """Return the log-probabilities of the actions of a rollout, computed step by step."""
    rows = []
    for t in range(len(rollout.rewards)):
        obs = tree_map(lambda x, t=t: x[t], rollout.obs)
        actor = Actor(model, rollout.num_envs)
        if rollout.hidden_states is not None:
            actor.hidden_state = rollout.hidden_states[t]
        params = actor.act(obs, None, True).params
        rows.append(actor.model.log_probs(params, tree_map(lambda x, t=t: x[t], rollout.actions)))
    return torch.stack(rows)
