"""Rollouts of an ES population: identical results in one process and in several, despite failures.

Failures of workers are tested in `test_player.py`, which uses the same workers.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial
from itertools import islice

import pytest
from actor_envs import FaultyEnv
from cases import everyday
from es_problems import (
    PLAIN,
    SIGMA,
    Members,
    Rollouts,
    SpoiltEnv,
    UnequalEnv,
    WalkEnv,
    pair_bits,
    set_version,
)
from reference_population import slow_draw

from maze_train.algorithms.es.population import ESRolloutResult, trained_size
from maze_train.core.errors import WorkerError

slow = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
every_backend = pytest.mark.parametrize("n_workers", [0, pytest.param(2, marks=slow)])


@pytest.fixture
def start(no_file_is_left):
    """Function that starts populations; they are closed after the test."""
    with ExitStack() as stack:
        yield lambda *args, **settings: stack.enter_context(closing(Rollouts(*args, **settings)))


def expected_pairs(make, count=6, iteration=2, version=1, **settings):
    """Return the expected pairs of an iteration, played in this process."""
    with closing(Rollouts(make, **settings)) as rollouts:
        set_version(rollouts.model, version)
        return rollouts.take(count, count, iteration)


def test_pairs_are_returned_in_order(start):
    """Pairs are returned in order from 0 on, with the index of their noise."""
    rollouts = start(WalkEnv, policy="normalised")
    members = Members(WalkEnv, 3, rollouts.model).play(range(12))
    with rollouts.generate() as pairs:
        found = list(islice(pairs, 6))
    dim = trained_size(rollouts.model)
    assert dim == sum(p.numel() for p in rollouts.model.parameters())
    for k, pair in enumerate(found):
        own = (members[2 * k], members[2 * k + 1])
        index, _, _ = slow_draw(PLAIN.seed, 2, k, rollouts.table.count, dim)
        assert pair_bits(pair) == pair_bits(ESRolloutResult(k, index, own))
        assert pair.num_steps == own[0].length + own[1].length
        assert not pair.lost


@pytest.mark.parametrize("num_envs", everyday(1, [1, 4, 9]))
def test_only_expected_pairs_are_played(start, num_envs):
    """Only the expected pairs are played; a further pair starts no more than needed."""
    rollouts = start(UnequalEnv, num_envs=num_envs)
    with rollouts.generate(expected=5) as pairs:
        steps = sum(pair.num_steps for pair in islice(pairs, 5))
        assert rollouts.of.pool.steps_made == steps
        sixth = next(pairs)
        ahead = rollouts.of.pool.steps_made - steps
        assert ahead >= sixth.num_steps
        assert ahead <= (2 + 2 * (num_envs // 2)) * 200
    assert rollouts.of.pool.worker_restarts == 0


def test_more_pairs_than_expected(start):
    """Pairs beyond the expected number are identical to expected pairs."""
    expected = expected_pairs(WalkEnv, 12)
    rollouts = start(WalkEnv)
    for first in (1, 2, 5, 12):
        assert rollouts.take(12, first) == expected


@every_backend
def test_pair_with_a_dropped_episode_is_dropped(start, n_workers):
    """A pair is lost if either of its episodes is lost; other pairs are not affected."""
    make = partial(SpoiltEnv, "reward")
    settings = {"policy": "normalised", "on_non_finite": "skip"}
    rollouts = start(make, n_workers, **settings)
    with rollouts.generate(20) as pairs:
        found = list(islice(pairs, 20))
    assert [pair_bits(pair) for pair in found] == expected_pairs(make, 20, **settings)
    assert {pair.lost for pair in found} == {False, True}
    members = {member.lost: member for pair in found for member in pair.members}
    for one in (False, True):
        for other in (False, True):
            pair = ESRolloutResult(0, 0, (members[one], members[other]))
            assert pair.lost == (one or other)


@every_backend
def test_results_of_earlier_policies_are_dropped(start, n_workers):
    """Unread results of an earlier policy are dropped; an iteration keeps its initial policy."""
    expected = {version: expected_pairs(UnequalEnv, 7, version=version) for version in (1, 2)}
    assert expected[1] != expected[2]
    rollouts = start(UnequalEnv, n_workers, 6)
    for round_ in range(12):
        version = 1 + round_ % 2
        set_version(rollouts.model, version)
        with rollouts.generate(20 if round_ % 3 else 6) as pairs:
            found = [pair_bits(pair) for pair in islice(pairs, round_ % 7)]
            set_version(rollouts.model, 7)
            found += [pair_bits(pair) for pair in islice(pairs, 1 if found else 0)]
            assert found == expected[version][: len(found)]
    set_version(rollouts.model, 2)
    assert rollouts.take() == expected[2][:6]
    assert rollouts.take(iteration=3) == expected_pairs(UnequalEnv, iteration=3, version=2)


@every_backend
def test_idle_callback_exceptions_propagate(start, n_workers):
    """Exceptions of the `idle` callback propagate; the workers continue with the next iteration."""
    rollouts = start(UnequalEnv, n_workers)

    def enough():
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            next(rollouts.of.generate_rollouts(1, SIGMA, 6, enough))
    assert rollouts.take() == expected_pairs(UnequalEnv)


@slow
def test_the_seed_that_is_told_is_that_of_the_episode(start):
    """Errors name the seed of the failed episode."""
    rollouts = start(partial(FaultyEnv, "raise", 1), 1, 1)
    _, seed, _ = slow_draw(PLAIN.seed, 2, 0, rollouts.table.count, trained_size(rollouts.model))
    with pytest.raises(WorkerError, match=rf"step 1 of the episode with seed {seed}: Runtime"):
        rollouts.take()
