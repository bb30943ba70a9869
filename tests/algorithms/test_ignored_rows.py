"""Rows that are no transitions change nothing: as if environments reset in the next step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from update_problems import make_model

from maze_train import A2CAlgorithmConfig, PPOAlgorithmConfig, Statistics
from maze_train.algorithms.a2c.learner import A2CLearner
from maze_train.algorithms.ppo.learner import PPOLearner
from maze_train.data.rollout import Rollout
from maze_train.learner.config import Progress
from maze_train.nets.config import MemoryConfig

LENGTHS = ((3, 2, 4, 3), (5, 1, 2, 4))
"""Lengths of the episodes of two environments, 12 steps each; odd ones are truncated."""


def next_step_rollout(memory_size=0):
    """Two environments that begin a new episode in a step of its own, and the same without."""
    generator = torch.Generator().manual_seed(0)
    rows, plain = [], []
    for lengths in LENGTHS:
        with_resets, without = [], []
        for length in lengths:
            obs = torch.randn(length + 1, 4, generator=generator)
            actions = torch.randint(3, (length,), generator=generator)
            rewards = torch.randn(length, generator=generator)
            for t in range(length):
                ended = t == length - 1
                flags = (ended and length % 2 == 0, ended and length % 2 == 1)
                row = (obs[t], actions[t], rewards[t], *flags, False, obs[t + 1])
                with_resets.append(row)
                without.append(row)
            junk = torch.tensor(1), torch.tensor(0.0)
            with_resets.append((obs[length], *junk, False, False, True, obs[length]))
        rows.append(with_resets[:-1])
        plain.append(without)
    return make_rollout(rows, memory_size), make_rollout(plain, memory_size)


def make_rollout(environments, memory_size):
    """A rollout from the rows of each environment."""

    def column(i):
        return torch.stack(
            [torch.stack([torch.as_tensor(row[i]) for row in rows]) for rows in environments], 1
        )

    terminated, truncated, valid = column(3), column(4), ~column(5)
    last = torch.stack([rows[-1][6] for rows in environments])
    steps, num_envs = terminated.shape
    places = [(t, b) for t in range(steps) for b in range(num_envs) if truncated[t, b]]
    return Rollout(
        obs=torch.cat([column(0), last.unsqueeze(0)]).double(),
        actions=column(1),
        rewards=column(2).double(),
        terminated=terminated,
        truncated=truncated,
        final_obs=torch.stack([environments[b][t][6] for t, b in places]).double(),
        final_positions=torch.tensor([t * num_envs + b for t, b in places]),
        valid=None if bool(valid.all()) else valid,
        hidden_states=torch.zeros(steps + 1, num_envs, memory_size).double()
        if memory_size
        else None,
    )


def learner_of(algorithm, **settings):
    """A learner in float64 whose update does not depend on the order of samples."""
    torch.set_default_dtype(torch.float64)
    box = spaces.Box(-9.0, 9.0, (4,))
    model = make_model(box, spaces.Discrete(3), **settings)
    if algorithm == "a2c":
        return A2CLearner(model, A2CAlgorithmConfig(gamma=0.875, gae_lambda=0.75))
    config = PPOAlgorithmConfig(
        gamma=0.875, gae_lambda=0.75, batch_size=64, n_optimization_epochs=3, reward_scaling=True
    )
    return PPOLearner(model, config)


@pytest.fixture(autouse=True)
def _default_dtype():
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("algorithm", ["a2c", "ppo"])
def test_an_update_sees_transitions_only(algorithm):
    """Weights and statistics are those of the same transitions without the rows between."""
    updated = []
    for rollout in next_step_rollout():
        learner = learner_of(algorithm)
        statistics = learner.update(rollout, Progress())
        updated.append((list(learner.module.parameters()), statistics.reduce()))
    assert next_step_rollout()[0].num_samples == next_step_rollout()[1].num_samples == 24
    for a, b in zip(updated[0][0], updated[1][0], strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-8)
    assert updated[0][1] == pytest.approx(updated[1][1], rel=1e-7, abs=1e-9)


def test_sequences_with_ignored_rows():
    """With a memory as well: it is empty after the row in which an episode begins."""
    updated = []
    for rollout in next_step_rollout(memory_size=6):
        learner = learner_of("a2c", memory=MemoryConfig(cell="gru", size=6))
        states = rollout.hidden_states.clone()
        with torch.no_grad():
            for t in range(rollout.num_steps):
                _, after = learner.module.policy_step(rollout.obs[t], states[t])
                fresh = rollout.ended[t]
                if rollout.valid is not None:
                    fresh = fresh | ~rollout.valid[t]
                states[t + 1] = torch.where(fresh.unsqueeze(1), 0.0, after)
        learner.update(replace(rollout, hidden_states=states), Progress())
        updated.append(list(learner.module.parameters()))
    for a, b in zip(*updated, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-8)


def test_nothing_is_prepared_of_ignored_rows():
    """Their garbage does not reach a column of a transition."""
    rollout, _ = next_step_rollout()
    spoiled = replace(rollout, rewards=torch.where(rollout.valid, rollout.rewards, 1e30))
    learner = learner_of("a2c")
    columns = [
        learner.preprocess("default", r, Statistics()).whole().columns for r in (rollout, spoiled)
    ]
    assert torch.equal(columns[0], columns[1])


@pytest.mark.parametrize("algorithm", ["a2c", "ppo"])
def test_a_rollout_without_transitions(algorithm):
    """Nothing is learned from it, and nothing fails."""
    rollout, _ = next_step_rollout()
    nothing = replace(rollout, valid=torch.zeros_like(rollout.valid))
    learner = learner_of(algorithm)
    before = [param.detach().clone() for param in learner.module.parameters()]
    numbers = learner.update(nothing, Progress()).reduce()
    assert all(np.isfinite(value) for value in numbers.values())
    for old, new in zip(before, learner.module.parameters(), strict=True):
        assert torch.equal(old, new)


def test_a_module_without_transitions_beside_another():
    """It stays as it is, and the other one learns as if it were alone."""
    rollout, _ = next_step_rollout()
    nothing = replace(rollout, valid=torch.zeros_like(rollout.valid))
    alone, one, other = (learner_of("ppo").module for _ in range(3))
    config = learner_of("ppo").config
    PPOLearner(alone, config).update(rollout, Progress())
    before = [param.detach().clone() for param in other.parameters()]
    both = PPOLearner({"one": one, "other": other}, config)
    both.update({"one": rollout, "other": nothing}, Progress())
    for expected, found in zip(alone.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(found, expected)
    for old, new in zip(before, other.parameters(), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("algorithm", ["a2c", "ppo"])
def test_a_lost_episode_counts_up_to_where_it_was_lost(algorithm):
    """As if it had been truncated before the row in which the next one begins."""
    cut_off, _ = next_step_rollout()
    final = [t * 2 + b for t, b in cut_off.truncated.nonzero().tolist()]
    lost = replace(
        cut_off,
        truncated=torch.zeros_like(cut_off.truncated),
        final_obs=cut_off.final_obs[:0],
        final_positions=cut_off.final_positions[:0],
    )
    # What is truncated in the last row is followed by no row: there the rollout ends either way.
    assert any(position < 24 for position in final)
    updated = []
    for rollout in (cut_off, lost):
        learner = learner_of(algorithm)
        learner.update(rollout, Progress())
        updated.append(list(learner.module.parameters()))
    for a, b in zip(*updated, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-8)
