"""Importable environments and policies for tests of ES populations."""

from __future__ import annotations

import copy
import math
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from actor_envs import ActorEnv
from gymnasium import spaces
from own_networks import own
from torch import nn

from maze_train.algorithms.es.population import (
    ESDistributedRollouts,
    MemberRows,
    MemberSettings,
    PairDraws,
    SharedNoiseTable,
    trained_size,
)
from maze_train.collect.actors import WeightsWriter, weights_nbytes
from maze_train.collect.episode_pool import EpisodePool
from maze_train.collect.play import EpisodeQueue, EpisodeRunner
from maze_train.collect.recording import PlaySettings
from maze_train.collect.row_policies import UserRows, model_rows, random_rows
from maze_train.core.types import tree_leaves
from maze_train.envs.slice import EnvSlice
from maze_train.nets.config import ModelConfig, RecurrentConfig
from maze_train.nets.normalization import find_normalizer
from maze_train.nets.policy_model import build_policy
from maze_train.workers.backends import ThisProcess
from maze_train.workers.pool import PrivateMemory
from maze_train.workers.process_pool import LocalProcesses

SIGMA = 0.5
LIMIT = 140
"""Maximum episode length of `WalkEnv`; more than two blocks of steps that noise is drawn for."""

PLAIN = MemberSettings(seed=5, deterministic=True, action_noise_stddev=0.0)
SAMPLED = MemberSettings(seed=5, deterministic=False, action_noise_stddev=0.0)


class WalkEnv(ActorEnv):
    """Random walk that ends far from its start, after a few steps or up to `LIMIT` steps.

    Args:
        obs: Key of `actor_envs.OBSERVATIONS`.
        actions: Key of `actor_envs.ACTIONS`.
    """

    def __init__(self, obs="box", actions="discrete"):
        super().__init__(obs, actions)
        if obs == "dict":
            box, other = (spaces.Box(-np.inf, np.inf, (n,), np.float64) for n in (3, 2))
            self.observation_space = spaces.Dict({"a": box, "b": spaces.Discrete(7), "c": other})

    def observe(self):
        """Return the observation: position, time and last action."""
        self.mark = self.place
        found = super().observe()
        self.legal = found.get("action_mask") if isinstance(found, dict) else None
        if self.obs == "dict":
            return {**found, "b": self.t % 7, "c": np.array([self.t, -self.place])}
        return found

    def reset(self, *, seed=None, options=None):
        """Begin an episode."""
        self.place = 0.0
        super().reset(seed=seed, options=options)
        self.pace = float(self.np_random.uniform(0.1, 0.5))
        return self.observe(), {}

    def step(self, action):
        """Move by an amount that depends on the action."""
        assert self.action_space.contains(action), action
        assert self.legal is None or self.legal[action - 1], action
        parts = action.values() if isinstance(action, dict) else [action]
        self.t += 1
        self.steps += 1
        # Rounded, so that the last digits of an action make no difference to the episode.
        self.last = round(4.0 * float(sum(np.sum(part) for part in parts))) / 4.0
        self.place += self.pace * (math.sin(2.0 * self.last) + self.np_random.standard_normal())
        is_far, is_late = abs(self.place) > 2.0, self.t == LIMIT
        info = {"is_success": is_late} if is_late or self.place > 0 else {}
        return self.observe(), self.place + 0.1 * self.last, is_far, is_late, info


class UnequalEnv(ActorEnv):
    """Environment in which about every fourth episode is a hundred times as long as the others."""

    def reset(self, *, seed=None, options=None):
        """Begin an episode."""
        obs, info = super().reset(seed=seed, options=options)
        self.length = 200 if self.np_random.integers(4) == 0 else 2
        return obs, info


class SpoiltEnv(WalkEnv):
    """Environment that returns a non-finite value in some episodes.

    Args:
        where: Where the value is returned: `obs` or `reward` (at step 3), or `first` (at reset).
    """

    def __init__(self, where):
        super().__init__()
        self.where = where

    def reset(self, *, seed=None, options=None):
        """Begin an episode."""
        obs, info = super().reset(seed=seed, options=options)
        self.is_bad = bool(self.np_random.integers(3) == 0)
        return (obs * np.nan if self.is_bad and self.where == "first" else obs), info

    def step(self, action):
        """Step; return a non-finite value if this step of the episode is due."""
        obs, reward, *rest = super().step(action)
        if self.is_bad and self.t == 3:
            return (obs, math.inf, *rest) if self.where == "reward" else (obs * np.nan, 1.0, *rest)
        return (obs, reward, *rest)


POLICIES = {
    "plain": {},
    "normalised": {"mode": "running"},
    "memory": {"rnn": RecurrentConfig(cell="gru", size=5)},
    "normalised memory": {"mode": "running", "rnn": RecurrentConfig(size=5)},
    "wrapped": {"wrapper": own("Rule")},
    "own": {"policy": own("OddNet"), "hidden_sizes": None},
}


def model_maker(make, policy="plain"):
    """Return a function that builds a small policy in any process."""
    settings = dict(POLICIES[policy])
    mode, wrapper = settings.pop("mode", "none"), settings.pop("wrapper", None)
    config = ModelConfig(**{"hidden_sizes": [6], **settings})
    config.normalization.mode = mode
    env = make()
    found = (config, env.observation_space, env.action_space, 0)
    return partial(build_policy, *found, policy_wrapper=wrapper)


@torch.no_grad()
def set_version(model, version):
    """Set random weights and statistics from a seed; the weights give diverse actions."""
    generator = torch.Generator().manual_seed(version)
    for param in model.parameters():
        param.copy_(torch.randn(param.shape, generator=generator))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean += 0.1 * version
    normalizer = find_normalizer(model)
    if normalizer is not None:
        obs = {
            key: 1.5 * torch.randn(30, size, generator=generator) + 0.2 * version
            for key, size in (("", 3), ("a", 3), ("c", 2))
        }
        normalizer.update(obs[""] if normalizer.keys == [""] else obs)


def model_for(make, policy="plain", version=1):
    """Return a policy for an environment, with the weights of `version`."""
    model = model_maker(make, policy)()
    set_version(model, version)
    return model


def make_table(count=5_000):
    """Return a noise table for small policies."""
    return SharedNoiseTable(count, seed=3)


class Members:
    """Members of a population in this process.

    Args:
        make: Function that builds an environment.
        num_envs: Number of members that play in parallel.
        model: The policy.
        settings: Settings of the members.
        on_non_finite: What to do if a value is NaN or infinite.
    """

    def __init__(self, make, num_envs, model, settings=PLAIN, on_non_finite="raise"):
        envs = EnvSlice.for_playing([make] * num_envs, on_non_finite=on_non_finite)
        table = make_table()
        memory = PrivateMemory(weights_nbytes(model))
        self._writer = WeightsWriter(model, memory.buffer)
        self._draws = PairDraws(settings.seed, table, trained_size(model))
        self.agent = MemberRows(lambda: copy.deepcopy(model), envs, memory, table, settings)
        self.waiting = EpisodeQueue()
        self.player = EpisodeRunner(envs, self.agent, self.waiting)

    def begin(self, members, iteration=2, sigma=SIGMA):
        """Begin an iteration with the current policy and some of its members."""
        self._writer.publish(iteration)
        self.player.env.pause_all()
        self.player.clear()
        self.agent.begin_round(sigma)
        self.waiting.waiting.clear()
        self.waiting.waiting.extend(self._draws.episode(iteration, member) for member in members)

    def play(self, members, **iteration):
        """Play some members of an iteration; return results by member, in order of completion."""
        self.begin(members, **iteration)
        found = []
        while self.waiting or self.player.running:
            found += self.player.step()
        assert len(found) == len({result.number for result in found})
        return {result.number: result for result in found}


class Rollouts:
    """Distributed rollouts of a population, with the policy they use.

    Args:
        make: Function that builds an environment.
        n_workers: Number of worker processes; 0 plays in this process.
        num_envs: Total number of environments of all workers.
        policy: Key of `es_problems.POLICIES`.
        settings: Settings of the members.
        on_non_finite: What to do if a value is NaN or infinite.
        **processes: Settings of the worker processes.
    """

    def __init__(
        self,
        make=UnequalEnv,
        n_workers=0,
        num_envs=4,
        policy="plain",
        settings=PLAIN,
        on_non_finite="raise",
        **processes,
    ):
        self.table = make_table()
        processes = {"start_method": "fork", "timeout_s": 30.0, **processes}
        self.of = ESDistributedRollouts(
            make,
            num_envs,
            self.table,
            settings,
            LocalProcesses(n_workers, **processes) if n_workers else ThisProcess(),
            on_non_finite=on_non_finite,
        )
        make_model = model_maker(make, policy)
        self.model = make_model()
        set_version(self.model, 1)
        self.of.begin(self.model, make_model)

    def generate(self, expected=6, iteration=2, idle=lambda: None):
        """Return the pairs of an iteration as a context manager that closes the generator."""
        return closing(self.of.generate_rollouts(iteration, SIGMA, expected, idle))

    def take(self, count=6, expected=6, iteration=2):
        """Return the first pairs of an iteration as bytes."""
        with self.generate(expected, iteration) as pairs:
            return [pair_bits(pair) for pair in islice(pairs, count)]

    def close(self):
        """Close the workers and the noise table."""
        self.of.close()
        self.table.close()


def bits(episode):
    """Return all reported values of an episode as bytes."""
    numbers = np.array([episode.episode_return, episode.fitness, episode.success]).tobytes()
    flags = (episode.end, episode.video)
    found = [episode.number, episode.seed, numbers, episode.length, *flags]
    found += [part.tobytes() for part in episode.moments or ()]
    trajectory = episode.trajectory
    if trajectory is not None:
        found += [trajectory.terminated, trajectory.truncated, trajectory.seed]
        for tree in (trajectory.obs, trajectory.actions, trajectory.rewards):
            keys = list(tree) if isinstance(tree, dict) else []
            found.append(keys)
            found += [(x.shape, x.dtype.name, x.tobytes()) for x in tree_leaves(tree)]
    return tuple(found)


def pair_bits(pair):
    """Return all values of the result of a pair as bytes."""
    return (pair.pair, pair.noise_index, *map(bits, pair.members))


# -- played episodes: environments, custom policies, bitwise comparisons ---------------------------


RECORDED = PlaySettings(record=True)


class RememberingPolicy:
    """Policy whose actions depend on all observations of the episode and on random numbers.

    Args:
        kind: Action space, a key of `actor_envs.ACTIONS`: `discrete` (1, 2, 3), `box` or `dict`.
    """

    def __init__(self, kind="discrete"):
        self.kind = kind
        self.seen = []
        self.reset(0)

    def reset(self, seed):
        """Forget all observations and seed the generator."""
        self.random = np.random.default_rng(seed)
        self.seen.clear()

    def act(self, observation):
        """Return an action."""
        self.seen.append(observation["a"] if isinstance(observation, dict) else observation)
        total = float(np.sum(self.seen)) + self.random.normal()
        choice = int(10.0 * abs(math.sin(total))) % 3
        box = -0.5 + 0.75 * abs(np.sin(total + np.arange(2)))
        if self.kind == "dict":
            return {"gear": choice, "force": box}
        return 1 + choice if self.kind == "discrete" else box


class ReusingEnv(WalkEnv):
    """Environment that reuses its observation array and overwrites the actions it receives."""

    memory: Any = None

    def observe(self):
        """Return the observation in the array of the first observation."""
        found = super().observe()
        self.memory = found if self.memory is None else self.memory
        self.memory[:] = found
        return self.memory

    def step(self, action):
        """Step, then overwrite the action."""
        result = super().step(action.copy())
        action[:] = 7.0
        return result


class PictureEnv(UnequalEnv):
    """Environment that renders its time as a gray level.

    Args:
        shape: Height and width.
        render_mode: As in Gymnasium.
        endless: Seeds whose episodes never end.
    """

    def __init__(self, shape=(33, 50), render_mode="rgb_array", endless=()):
        super().__init__()
        self.shape, self.render_mode, self.endless = shape, render_mode, endless

    def reset(self, *, seed=None, options=None):
        """Begin an episode of three or six steps, or an endless episode."""
        found = super().reset(seed=seed, options=options)
        self.length = -1 if seed in self.endless else 3 if self.length < 6 else 6
        return found

    def render(self):
        """Return a picture."""
        return np.full((*self.shape, 3), 40 * min(self.t, 6), np.uint8)


def model_problem(obs, actions, policy, deterministic=False):
    """Return functions that build an environment and an agent with a model."""
    make = partial(WalkEnv, obs, actions)
    return make, partial(model_rows, model_for(make, policy), deterministic=deterministic)


def user_problem(obs, actions):
    """Return functions that build an environment and an agent with a recurrent policy."""
    policy = partial(RememberingPolicy, actions)
    return partial(WalkEnv, obs, actions), partial(UserRows, policy)


PROBLEMS = {
    "sampled box": partial(model_problem, "box", "box", "plain"),
    "likely box": partial(model_problem, "box", "box", "plain", True),
    "sampled discrete": partial(model_problem, "box", "discrete", "normalised"),
    "masks": partial(model_problem, "mask", "discrete", "plain"),
    "dicts": partial(model_problem, "dict", "dict", "normalised"),
    "memory": partial(model_problem, "box", "discrete", "memory"),
    "random box": lambda: (partial(WalkEnv, "box", "box"), random_rows),
    "random dict": lambda: (partial(WalkEnv, "dict", "dict"), random_rows),
    "random masks": lambda: (partial(WalkEnv, "mask", "discrete"), random_rows),
    "user": partial(user_problem, "box", "discrete"),
    "user dict": partial(user_problem, "dict", "dict"),
}
"""Each function returns a function that builds an environment and one that builds an agent."""


def closing_env():
    """Return a class of environments and the list of its closed instances."""
    closed = []
    return type("ClosingEnv", (WalkEnv,), {"close": lambda self: closed.append(self)}), closed


class Episodes:
    """Played episodes of an agent, with the same methods as `Rollouts`.

    Args:
        make_rows: Function that builds the agent.
        settings: How episodes are played.

    The other arguments are the same as for `Rollouts`.
    """

    def __init__(
        self,
        make=UnequalEnv,
        n_workers=0,
        num_envs=4,
        make_rows=random_rows,
        settings=RECORDED,
        on_non_finite="raise",
        **processes,
    ):
        processes = {"start_method": "fork", "timeout_s": 30.0, **processes}
        place = LocalProcesses(n_workers, **processes) if n_workers else None
        self.of = EpisodePool(make, settings, place, num_envs=num_envs, on_non_finite=on_non_finite)
        self.of.set_policy(make_rows, "policy")
        self.close = self.of.close

    def generate(self, expected):
        """Return the episodes of the first seeds as a context manager that closes the generator."""
        return closing(self.of.play(range(expected)))

    def take(self, count):
        """Return the episodes of the first seeds as bytes."""
        with self.generate(count) as episodes:
            return [bits(episode) for episode in episodes]


def play_alone(make, make_rows, seeds, settings=RECORDED, **kwargs):
    """Return the bytes of episodes that are played one by one in this process."""
    with EpisodePool(make, settings, num_envs=1, **kwargs) as player:
        player.set_policy(make_rows, "policy")
        return [bits(episode) for episode in player.play(seeds)]
