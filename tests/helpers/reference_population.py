"""Reference implementation of the members of a population as a plain loop.

Plays one member after the other: a copy of the policy gets θ + σε or θ - σε, its environment
is reset with the seed of the pair, and the copy acts until the episode ends.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from maze_train.core.types import tree_leaves, tree_map
from maze_train.nets.normalization import find_normalizer
from maze_train.spaces.describe import FlatView, flat_space
from maze_train.spaces.tensors import as_tensors

__all__ = ["SlowMember", "slow_draw", "slow_members"]

PAIRS_AT_ONCE = 64
STEPS_AT_ONCE = 64


@dataclass(frozen=True)
class SlowMember:
    """Result of one member."""

    fitness: float
    length: int
    success: float
    lost: bool
    observed: list[Any]
    """Normalized entries of each observation acted on, as float64."""


def slow_draw(seed, iteration, pair, count, dim):
    """Return the noise index, the episode seed and the action seed of a pair.

    Args:
        seed: Seed of the run.
        iteration: Number of the iteration.
        pair: Number of the pair.
        count: Number of values in the noise table.
        dim: Number of parameters.
    """
    key = (iteration, pair // PAIRS_AT_ONCE)
    generator = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
    indices = generator.integers(0, count - dim, size=PAIRS_AT_ONCE, endpoint=True)
    env_seeds = generator.integers(0, 2**31, size=PAIRS_AT_ONCE)
    action_seeds = generator.integers(0, 2**63, size=PAIRS_AT_ONCE)
    i = pair % PAIRS_AT_ONCE
    return int(indices[i]), int(env_seeds[i]), int(action_seeds[i])


def slow_members(make, model, table, settings, members, iteration, noise_stddev):
    """Play members one by one; return the results by member.

    Args:
        make: Function that builds an environment.
        model: The policy θ.
        table: Noise table.
        settings: Settings of the members.
        members: Numbers of the members.
        iteration: Number of the iteration.
        noise_stddev: Standard deviation σ of the noise.
    """
    found = {}
    for member in members:
        own = copy.deepcopy(model)
        params = [p for p in own.parameters() if p.requires_grad]
        dim = sum(p.numel() for p in params)
        index, env_seed, action_seed = slow_draw(
            settings.seed, iteration, member // 2, table.count, dim
        )
        noise = torch.from_numpy(table.array[index : index + dim].copy())
        theta = torch.cat([p.detach().reshape(-1) for p in params])
        sign = 1.0 if member % 2 == 0 else -1.0
        set_parameters(params, theta + torch.tensor(sign * noise_stddev) * noise)
        found[member] = slow_episode(make(), own, settings, env_seed, action_seed)
    return found


def set_parameters(params, vector):
    """Write a flat vector into parameters."""
    with torch.no_grad():
        start = 0
        for p in params:
            p.copy_(vector[start : start + p.numel()].view_as(p))
            start += p.numel()


@torch.no_grad()
def slow_episode(env, model, settings, env_seed, action_seed):
    """Play one episode; return its result."""
    actions = FlatView(env.action_space)
    noises = slow_noise(model.distribution, settings, action_seed)
    state = torch.zeros(1, getattr(model, "state_size", 0))
    observed = []
    fitness, length = 0.0, 0
    value, info = env.reset(seed=env_seed)
    while True:
        obs = batched(env.observation_space, value)
        observed.append(normalised_entries(model, obs))
        if state.numel():
            params, state = model.policy_step(obs, state)
        else:
            params = model.policy_params(obs)
        action = act(model.distribution, params, settings, *next(noises))
        value, reward, terminated, truncated, info = env.step(in_form_of(actions, action))
        length += 1
        ended = terminated or truncated
        if not np.isfinite(reward) or not (ended or is_finite(env.observation_space, value)):
            return SlowMember(fitness, length, float("nan"), True, observed)
        fitness += reward
        if ended:
            success = float(info.get("is_success", float("nan")))
            return SlowMember(fitness, length, success, False, observed)


def slow_noise(distribution, settings, seed):
    """Yield the sampling noise and the additive noise of each step."""
    generator = torch.Generator().manual_seed(seed)
    example = distribution.mode(torch.zeros(1, distribution.param_size))
    added = sum(leaf.numel() for leaf in tree_leaves(example) if leaf.is_floating_point())
    added = added if settings.action_noise_stddev else 0
    while True:
        drawn = distribution.draw_noise((STEPS_AT_ONCE,), generator)
        more = torch.randn(STEPS_AT_ONCE, added, generator=generator)
        yield from zip(drawn.split(1), more.split(1), strict=True)


def act(distribution, params, settings, noise, added):
    """Return the action of a member as flat arrays with a leading dimension of 1."""
    if settings.deterministic:
        actions = distribution.mode(params)
    else:
        actions = distribution.sample(params, noise)
    start = 0
    changed = {}
    for key, leaf in (actions if isinstance(actions, dict) else {"": actions}).items():
        if settings.action_noise_stddev and leaf.is_floating_point():
            own = added[0, start : start + leaf.numel()].view_as(leaf)
            start += leaf.numel()
            leaf = leaf + settings.action_noise_stddev * own
        changed[key] = leaf
    result = distribution.to_env(changed if isinstance(actions, dict) else changed[""])
    return tree_map(lambda x: x.numpy(), result)


def in_form_of(view, action):
    """Return an action in the format of the environment."""
    return action[0] if view.is_single else view.build({k: leaf[0] for k, leaf in action.items()})


def batched(space, value):
    """Return an observation as tensors with a leading dimension of 1."""
    leaves = {key: np.asarray(leaf)[None] for key, leaf in FlatView(space).read(value)}
    return as_tensors(flat_space(space), leaves.get("", leaves))


def is_finite(space, value):
    """Return whether all values of an observation are finite."""
    return all(np.isfinite(leaf).all() for _, leaf in FlatView(space).read(value))


def normalised_entries(model, obs):
    """Return the entries used for statistics, `[entries]` float64; empty without a normalizer."""
    normalizer = find_normalizer(model)
    keys = [] if normalizer is None else normalizer.keys
    leaves = obs if isinstance(obs, dict) else {"": obs}
    parts = [leaves[key].reshape(-1).double().numpy() for key in keys]
    return np.concatenate([np.zeros(0), *parts])
