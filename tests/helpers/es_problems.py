"""Importable environments and policies for tests of populations."""

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
    MemberAgent,
    MemberSettings,
    PairDraws,
    SharedNoiseTable,
    trained_size,
)
from maze_train.collect.actor_worker import WeightsWriter, weights_nbytes
from maze_train.collect.episode_runner import EpisodeRunner
from maze_train.collect.player import RolloutPlayer, SliceEpisodes
from maze_train.collect.recording import PlaySettings
from maze_train.collect.row_agents import PolicyAgent, model_agent, random_agent
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
"""Steps of the longest episodes of `WalkEnv`, more than twice as many as noise is drawn for."""

PLAIN = MemberSettings(seed=5, deterministic=True, action_noise_stddev=0.0)
SAMPLED = MemberSettings(seed=5, deterministic=False, action_noise_stddev=0.0)


class WalkEnv(ActorEnv):
    """A walk that ends where it comes far from its start: after a few steps, or very many.

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
        """What the agent sees: where it is, the time, its last action."""
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
        """Step; the action says where to, more or less."""
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
    """Every fourth episode or so is a hundred times as long as others."""

    def reset(self, *, seed=None, options=None):
        """Begin an episode."""
        obs, info = super().reset(seed=seed, options=options)
        self.length = 200 if self.np_random.integers(4) == 0 else 2
        return obs, info


class SpoiltEnv(WalkEnv):
    """Gives a number that is not finite after some steps of some episodes, or at once.

    Args:
        where: `obs`, `reward`, or `first`: the first observation.
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
        """Step, or spoil it."""
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
    """What builds a small policy for environments, in whatever process."""
    settings = dict(POLICIES[policy])
    mode, wrapper = settings.pop("mode", "none"), settings.pop("wrapper", None)
    config = ModelConfig(**{"hidden_sizes": [6], **settings})
    config.normalization.mode = mode
    env = make()
    found = (config, env.observation_space, env.action_space, 0)
    return partial(build_policy, *found, policy_wrapper=wrapper)


@torch.no_grad()
def set_version(model, version):
    """Give a policy weights with which it acts in many ways, and statistics, by a number."""
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
    """A policy for environments, with weights of a version."""
    model = model_maker(make, policy)()
    set_version(model, version)
    return model


def make_table(count=5_000):
    """Noise for small policies."""
    return SharedNoiseTable(count, seed=3)


class Members:
    """Members of a population in this process.

    Args:
        make: Builds an environment.
        num_envs: Members that play at a time.
        model: The policy.
        settings: How members act.
        on_non_finite: What to do about numbers that are not finite.
    """

    def __init__(self, make, num_envs, model, settings=PLAIN, on_non_finite="raise"):
        envs = EnvSlice.for_playing([make] * num_envs, on_non_finite=on_non_finite)
        table = make_table()
        memory = PrivateMemory(weights_nbytes(model))
        self._writer = WeightsWriter(model, memory.buffer)
        self._draws = PairDraws(settings.seed, table, trained_size(model))
        self.agent = MemberAgent(lambda: copy.deepcopy(model), envs, memory, table, settings)
        self.episodes = SliceEpisodes(envs)
        self.player = EpisodeRunner(self.episodes, self.agent)

    def begin(self, members, iteration=2, sigma=SIGMA):
        """Begin an iteration with the policy as it is now, with some of its members."""
        self._writer.publish(iteration)
        self.episodes.drop()
        self.agent.begin_round(sigma)
        for member in members:
            self.episodes.add([self._draws.task(iteration, member)])

    def play(self, members, **iteration):
        """Play some members of an iteration; results by member, in the order of their ends."""
        self.begin(members, **iteration)
        found = []
        while self.episodes.load:
            found += self.player.step()
        assert len(found) == len({result.number for result in found})
        return {result.number: result for result in found}


class Rollouts:
    """A population somewhere, and the policy that it gets.

    Args:
        make: Builds an environment.
        n_workers: How many processes; 0: all play in this one.
        num_envs: Environments of all workers together.
        policy: Key of `es_problems.POLICIES`.
        settings: How members act.
        on_non_finite: What to do about numbers that are not finite.
        **processes: Settings of the processes.
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
        """The pairs of an iteration, to be closed."""
        return closing(self.of.generate_rollouts(iteration, SIGMA, expected, idle))

    def take(self, count=6, expected=6, iteration=2):
        """The first pairs of an iteration, to the bit."""
        with self.generate(expected, iteration) as pairs:
            return [pair_bits(pair) for pair in islice(pairs, count)]

    def close(self):
        """End it."""
        self.of.close()
        self.table.close()


def bits(episode):
    """All that is reported of an episode, to the bit."""
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
    """All that the result of a pair says, to the bit."""
    return (pair.pair, pair.noise_index, *map(bits, pair.members))


# -- What tests of played episodes share: environments, policies of users, comparisons to the bit --


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


def model_problem(obs, actions, policy, deterministic=False):
    """Environment and agent of a model."""
    make = partial(WalkEnv, obs, actions)
    return make, partial(model_agent, model_for(make, policy), deterministic=deterministic)


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
    "random box": lambda: (partial(WalkEnv, "box", "box"), random_agent),
    "random dict": lambda: (partial(WalkEnv, "dict", "dict"), random_agent),
    "random masks": lambda: (partial(WalkEnv, "mask", "discrete"), random_agent),
    "user": partial(user_problem, "box", "discrete"),
    "user dict": partial(user_problem, "dict", "dict"),
}
"""Functions that give what builds an environment, and what builds an agent."""


def closing_env():
    """A class of environments, and the list of those that were closed."""
    closed = []
    return type("ClosingEnv", (WalkEnv,), {"close": lambda self: closed.append(self)}), closed


class Episodes:
    """Episodes of an agent that are played somewhere, with the calls of `Rollouts`.

    Args:
        make_agent: Builds the agent.
        settings: How episodes are played.

    The others are those of `Rollouts`.
    """

    def __init__(
        self,
        make=UnequalEnv,
        n_workers=0,
        num_envs=4,
        make_agent=random_agent,
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
