"""Members of a population act independently of other members and of the schedule."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from actor_envs import ActorEnv, stacked_env
from cases import everyday
from es_problems import (
    PLAIN,
    SAMPLED,
    SIGMA,
    Members,
    SpoiltEnv,
    UnequalEnv,
    WalkEnv,
    bits,
    make_table,
    model_for,
)
from gymnasium.wrappers import TransformReward
from reference_population import slow_draw, slow_members

from maze_train.algorithms.es.population import MemberSettings
from maze_train.envs.wrappers import MonitoringWrapper

NOISY = MemberSettings(seed=5, deterministic=True, action_noise_stddev=0.7)
BOTH = MemberSettings(seed=5, deterministic=False, action_noise_stddev=0.2)
HOW = {"plain": PLAIN, "sampled": SAMPLED, "noisy": NOISY, "both": BOTH}

CASES = {
    "box, discrete": (WalkEnv, "plain", "plain"),
    "box, discrete, sampled": (WalkEnv, "plain", "sampled"),
    "box, box": (partial(WalkEnv, "box", "box"), "plain", "plain"),
    "box, box, noisy": (partial(WalkEnv, "box", "box"), "normalised", "noisy"),
    "dict, dict": (partial(WalkEnv, "dict", "dict"), "normalised", "plain"),
    "mask": (partial(WalkEnv, "mask"), "normalised", "plain"),
    "memory": (WalkEnv, "memory", "plain"),
    "memory, dict, both": (partial(WalkEnv, "dict", "dict"), "normalised memory", "both"),
    "wrapped": (WalkEnv, "wrapped", "plain"),
    "own": (WalkEnv, "own", "plain"),
    "images": (partial(ActorEnv, "image"), "plain", "plain"),
    "stacks": (partial(stacked_env, "dict"), "plain", "noisy"),
    "unequal": (UnequalEnv, "normalised", "sampled"),
}
MEMBERS = [0, 1, 2, 3, 5, 130, 131, 256]
"""Members, some of them pairs, in several blocks of random numbers."""

MANY_ENVS = ("box, discrete", "box, box, noisy", "memory")
"""Cases with more environments than a block of rows."""

OFTEN = [*CASES][::3]
every_case = pytest.mark.parametrize("case", everyday(len(OFTEN), dict.fromkeys([*OFTEN, *CASES])))


def assert_slow(found, make, model, settings=PLAIN, *, exactly=True, var_rel=1e-12):
    """Check results against the reference loop; return its results."""
    slow = slow_members(make, model, make_table(), settings, sorted(found), 2, SIGMA)
    rel = 1e-12 if exactly else 1e-4
    for member, expected in slow.items():
        result = found[member]
        assert result.length == expected.length
        assert result.lost == expected.lost
        if not result.lost:
            assert result.fitness == pytest.approx(expected.fitness, rel=rel, abs=rel)
            assert result.episode_return == result.fitness
            assert repr(result.success) == repr(expected.success)
        if result.moments is None:
            assert not np.size(expected.observed[0])
            continue
        mean, var = result.moments.mean, result.moments.var
        observed = np.stack(expected.observed)
        assert result.moments.samples == len(observed) == result.length
        np.testing.assert_allclose(mean, observed.mean(0), rtol=rel, atol=rel)
        tolerance = max(rel, var_rel)
        np.testing.assert_allclose(var, observed.var(0), rtol=tolerance, atol=tolerance)
        assert mean.dtype == var.dtype == np.float64
    return slow


# -- members -------------------------------------------------------------------------------------


@every_case
def test_members_equal_a_plain_loop(case):
    """Returns, lengths, successes and moments of observations match the reference loop.

    For any number of environments and any order, results are bit-for-bit identical.
    """
    make, policy, how = CASES[case]
    model = model_for(make, policy)
    found = Members(make, 3, model, HOW[how]).play(MEMBERS)
    assert found.keys() == set(MEMBERS)
    # In other cases real-valued actions add to the rewards with all their digits.
    exactly = isinstance(make().unwrapped, WalkEnv) or model.distribution.noise_size == 1
    assert_slow(found, make, model, HOW[how], exactly=exactly)
    assert len({result.fitness for result in found.values()}) > len(MEMBERS) / 2
    rng = np.random.default_rng(1)
    for num_envs in (1, 2, 8, 40) if case in MANY_ENVS else (1, 8):
        members = Members(make, num_envs, model, HOW[how])
        # Members are not affected by members that played in the same environments before.
        members.play(range(50, 53), iteration=1)
        for order in (rng.permutation(MEMBERS).tolist(), [131, 2]):
            others = members.play(order)
            assert others.keys() == set(order)
            for member in order:
                assert bits(others[member]) == bits(found[member]), (num_envs, member)


# -- pairs ---------------------------------------------------------------------------------------


def test_pairs_share_noise_and_seeds():
    """Both members play the same episode with θ ± σε: their mean is θ, their difference 2σε."""
    seeds = []

    class Noted(WalkEnv):
        def reset(self, *, seed=None, options=None):
            seeds.append(seed)
            return super().reset(seed=seed, options=options)

    model, table = model_for(WalkEnv), make_table()
    members = Members(Noted, 6, model)
    members.begin([0, 1, 4, 5, 2, 3], iteration=3)
    members.player.step()
    dim = members.agent._population.dim
    weights = np.stack([members.agent._population.weights_of(row) for row in range(6)])
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()
    for k, pair in enumerate((0, 2, 1)):
        index, env_seed, _ = slow_draw(PLAIN.seed, 3, pair, table.count, dim)
        assert seeds[2 * k : 2 * k + 2] == [env_seed] * 2
        noise = table.array[index : index + dim]
        plus, minus = weights[2 * k], weights[2 * k + 1]
        np.testing.assert_allclose((plus + minus) / 2, theta, atol=1e-6)
        np.testing.assert_allclose((plus - minus) / 2, SIGMA * noise, atol=1e-6)
    assert len(set(seeds)) == 3


# -- lost episodes -------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["obs", "reward"])
def test_dropped_members_do_not_affect_others(where):
    """Lost members are reported and do not affect other members."""
    make = partial(SpoiltEnv, where)
    model = model_for(make, "normalised")
    results = []
    for num_envs in (1, 4, 20):
        found = Members(make, num_envs, model, on_non_finite="skip").play(range(20))
        slow = assert_slow(found, make, model)
        assert {result.lost for result in slow.values()} == {False, True}
        assert all(math.isfinite(result.fitness) for result in found.values())
        results.append({member: bits(result) for member, result in found.items()})
    assert results[0] == results[1] == results[2]


def test_reported_member_returns_are_raw():
    """Fitness uses the training rewards; reported returns are raw."""

    def make():
        return TransformReward(MonitoringWrapper(WalkEnv()), lambda reward: -2.0 * reward)

    model = model_for(WalkEnv)
    found = Members(make, 3, model).play(range(6))
    expected = slow_members(WalkEnv, model, make_table(), PLAIN, range(6), 2, SIGMA)
    for member, result in found.items():
        assert result.episode_return == pytest.approx(expected[member].fitness, rel=1e-12)
        assert result.fitness == pytest.approx(-2 * expected[member].fitness, rel=1e-12)
