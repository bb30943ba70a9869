from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from maze_train.core.seeding import EPISODES_PER_BLOCK, EpisodeSeeds, Seeds, draw_seed

NAMES = ["model", "minibatches", "episodes", "actions", "evaluation", "global", "acting"]


def played(root, num_envs, episodes_per_env):
    """Return the seeds of the episodes by their number."""
    seeds = {}
    for index in range(num_envs):
        stream = EpisodeSeeds(root, index, num_envs)
        for k in range(episodes_per_env):
            seeds[index + k * num_envs] = stream.next()
    return seeds


def test_random_streams_differ_by_name_and_run():
    """No two streams of runs with neighbouring seeds start from the same seed."""
    seeds = [Seeds(root).integer(name) for root in range(100) for name in NAMES]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_random_stream_depends_on_its_name_only():
    """Using other streams does not change a stream."""
    seeds = Seeds(3)
    first = seeds.integer("model")
    seeds.generator("actions").random(10)
    assert seeds.integer("model") == Seeds(3).integer("model") == first
    assert seeds.generator("x").random() == Seeds(3).generator("x").random()


def test_published_seed_gives_known_numbers():
    """A published seed gives the same run in later versions of the package."""
    assert Seeds(0).integer("model") == 6345307993427180246
    assert EpisodeSeeds(0, 0, 1).next() == 1610069009


def test_episodes_of_neighbouring_runs_are_disjoint():
    """Runs with seeds 0 to 3 and 64 environments share no episode."""
    runs = [set(played(Seeds(root).integer("episodes"), 64, 10).values()) for root in range(4)]
    assert all(len(run) == 640 for run in runs)
    assert len(set.union(*runs)) == 4 * 640


@given(st.integers(0, 2**63 - 1), st.integers(1, 12))
def test_episode_seeds_do_not_depend_on_num_envs(root, num_envs):
    """Episode j has the same seed for any number of environments."""
    total = 2 * EPISODES_PER_BLOCK
    one = played(root, 1, total)
    spread = played(root, num_envs, -(-total // num_envs))
    assert {j: spread[j] for j in range(total)} == one
    assert all(0 <= seed < 2**31 for seed in one.values())


def test_drawn_seed_does_not_use_global_generators():
    """Missing seeds are drawn from the operating system."""
    states = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    seeds = {draw_seed() for _ in range(20)}
    assert len(seeds) > 1
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert states == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
