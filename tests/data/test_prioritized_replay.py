from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_replay import (
    BOX,
    BOX_ACTION,
    KINDS,
    WITH_WAITING,
    added,
    assert_equal_to,
    everything,
    filled,
    rollout_of,
)

from maze_train.core.errors import ConfigError, TrainingError
from maze_train.data.replay import PrioritizedReplayBuffer
from maze_train.data.replay_memory import ReplayLayout
from maze_train.data.replay_sampling import SumTree

ALPHA, BETA = 0.7, 0.4


def leaves_in_order(node, size):
    """Return the leaves below a node from left to right."""
    if node >= size:
        return [node - size]
    return [*leaves_in_order(2 * node, size), *leaves_in_order(2 * node + 1, size)]


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 40),
    rounds=st.integers(1, 4),
    empty=st.floats(0.0, 0.9),
    seed=st.integers(0, 2**32 - 1),
)
def test_sum_tree_matches_a_list_with_sums(size, rounds, empty, seed):
    """Updates with repeated indices are correct, and each value is found in its interval."""
    rng = np.random.default_rng(seed)
    tree, priorities = SumTree(size), np.zeros(size)
    for _ in range(rounds):
        indices = rng.integers(0, size, rng.integers(1, 2 * size + 1))
        values = rng.random(len(indices)) * (rng.random(len(indices)) >= empty)
        tree.set(indices, values)
        for index, value in zip(indices, values, strict=True):
            priorities[index] = value
    assert np.array_equal(tree.priorities, priorities)
    assert tree.total == pytest.approx(priorities.sum(), rel=1e-12)
    again = SumTree(size)  # a loaded buffer continues bit-for-bit identically
    again.set(np.arange(size), tree.priorities)
    assert np.array_equal(again._nodes, tree._nodes)
    order = leaves_in_order(1, size)
    ends = np.cumsum(priorities[order])
    sums = rng.random(50) * ends[-1]
    if ends[-1] > 0:
        expected = [order[np.searchsorted(ends, number, side="right")] for number in sums]
        assert tree.find(sums).tolist() == expected


def test_sum_tree_never_finds_priority_zero():
    """Leaves of priority 0 are not found, also if rounding exceeds an interval."""
    rng = np.random.default_rng(0)
    for size in (3, 7, 100):
        tree = SumTree(size)
        tree.set(np.arange(size), rng.random(size) * (rng.random(size) < 0.3) / 3)
        tree.set(np.array([1]), 0.1)
        sums = np.array([0.0, tree.total, np.nextafter(tree.total, 0.0), 2 * tree.total])
        assert (tree.priorities[tree.find(sums)] > 0).all()


def make(rows=20, num_envs=2, lengths=(7, 30, 5), seed=0, **settings):
    """Return a buffer with experience, its reference and stream."""
    settings = {"alpha": ALPHA, "beta": BETA, "buffer": PrioritizedReplayBuffer, **settings}
    return filled(rows, num_envs, lengths=lengths, seed=seed, **settings)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 12),
    num_envs=st.integers(1, 3),
    n_steps=st.integers(1, 3),
    lengths=st.lists(st.integers(-1, 15), min_size=1, max_size=8),
    kinds=st.sampled_from([KINDS, WITH_WAITING]),
    seed=st.integers(0, 2**32 - 1),
)
def test_only_valid_transitions_have_priorities(rows, num_envs, n_steps, lengths, kinds, seed):
    """Exactly the valid transitions have priorities, also after interruptions and updates."""
    stream = {"kinds": kinds}
    buffer, reference, stream = make(rows, num_envs, (), seed, n_steps=n_steps, stream=stream)
    for _ in added(buffer, reference, stream, lengths):
        whole = everything(buffer)
        assert_equal_to(whole, reference.transitions())
        assert set(np.flatnonzero(buffer._sampler.tree.priorities)) == set(whole.indices.tolist())
        if len(buffer):
            batch = buffer.sample_batch(10)
            assert set(batch.indices.tolist()) <= set(whole.indices.tolist())
            buffer.update_priorities(batch.indices, torch.randn(10))
            # Late updates may contain overwritten rows.
            buffer.update_priorities(torch.arange(buffer._memory.ring.size), torch.tensor([1.0]))
        assert set(np.flatnonzero(buffer._sampler.tree.priorities)) == set(whole.indices.tolist())


def test_new_transitions_get_the_largest_priority():
    """The initial priority is 1, later that of the largest error, also if it was overwritten."""
    buffer, reference, stream = make(lengths=(3,))
    first = everything(buffer).indices.numpy()
    assert (buffer._sampler.tree.priorities[first] == 1.0).all()
    buffer.update_priorities(torch.from_numpy(first[:2]), torch.tensor([-5.0, 0.1]))
    buffer.update_priorities(torch.from_numpy(first[:1]), torch.tensor([0.2]))
    for _ in added(buffer, reference, stream, (2,)):
        pass
    second = np.setdiff1d(everything(buffer).indices.numpy(), first)
    largest = (5.0 + 1e-6) ** ALPHA
    assert np.allclose(buffer._sampler.tree.priorities[second], largest, rtol=1e-12)


def test_sample_frequencies_and_weights_follow_priorities():
    """P(i) = p_i^alpha / sum, weights (N P(i))^-beta over their maximum; beta grows to 1."""
    buffer, _, _ = make()
    indices = everything(buffer).indices
    errors = torch.linspace(-2.0, 3.0, len(indices), dtype=torch.float64)
    buffer.update_priorities(indices, errors)
    powers = (errors.abs() + 1e-6) ** ALPHA
    probabilities = torch.zeros(buffer._memory.ring.size, dtype=torch.float64)
    probabilities[indices] = powers / powers.sum()
    counts = torch.zeros_like(probabilities)
    for progress in (0.0, 0.5, 1.0):
        buffer.set_progress(progress)
        batch = buffer.sample_batch(2000)
        counts += torch.bincount(batch.indices, minlength=len(counts))
        beta = BETA + (1 - BETA) * progress
        weights = (len(buffer) * probabilities[batch.indices]) ** -beta
        assert batch.weights.dtype == torch.float32
        assert torch.allclose(batch.weights.double(), weights / weights.max(), rtol=1e-6)
    # Sampling is stratified: counts differ from their expectation by at most two per batch.
    assert (counts - 6000 * probabilities).abs().max() <= 6.0
    buffer, _, _ = make(alpha=0.0)  # samples are uniform, whatever the errors were
    buffer.update_priorities(indices, errors * 100)
    batch = buffer.sample_batch(10 * len(indices))
    assert (batch.weights == 1.0).all()
    assert len(buffer.sample_batch(0).weights) == 0
    assert (torch.bincount(batch.indices)[indices] - 10).abs().max() <= 1


def test_strata_are_shuffled_within_a_batch():
    """Strata are shuffled, so each half of a batch covers the whole buffer."""
    buffer, _, _ = make(rows=500, num_envs=1, lengths=(600,))
    indices = buffer.sample_batch(400).indices.double()
    whole = everything(buffer).indices.double()
    for half in indices.split(200):
        assert abs(half.mean() - whole.mean()) < 0.15 * whole.max()


def test_loaded_prioritized_buffer_continues_identically():
    """Samples, weights and later priorities are identical."""
    buffer, _, stream = make()
    buffer.update_priorities(buffer.sample_batch(30).indices, torch.linspace(0, 9, 30))
    buffer.set_progress(0.3)
    other, _, _ = make(lengths=(9,), seed=5)
    other.load_state_dict(buffer.state_dict())
    drawn = []
    steps = stream.steps(5)
    for owner in (buffer, other):
        owner.add_rollout(rollout_of(steps))
        drawn.append(owner.sample_batch(40))
    assert torch.equal(drawn[0].indices, drawn[1].indices)
    assert torch.equal(drawn[0].weights, drawn[1].weights)
    assert torch.equal(drawn[0].obs, drawn[1].obs)


def test_estimated_memory_includes_priorities():
    """Priorities require 16 bytes per transition, included in the estimate."""
    buffer, _, _ = make(lengths=())
    assert buffer._sampler.tree._nodes.nbytes == 16 * 42
    assert buffer.nbytes == ReplayLayout(40, BOX, BOX_ACTION, num_envs=2).nbytes + 16 * 42


@pytest.mark.parametrize("change", [{"alpha": -0.1}, {"beta": 1.5}, {"epsilon": 0.0}])
def test_invalid_buffer_settings_raise(change):
    """The error contains the setting."""
    ((name, value),) = change.items()
    with pytest.raises(ConfigError, match=f"{name} = {value}: expected a number"):
        make(**change)


def test_non_finite_td_errors_raise():
    """Non-finite errors raise TrainingError, and no priority changes."""
    buffer, _, _ = make()
    indices, before = everything(buffer).indices[:3], buffer._sampler.tree.priorities.copy()
    for value in (np.nan, np.inf):
        with pytest.raises(TrainingError, match="is NaN or infinite"):
            buffer.update_priorities(indices, torch.tensor([1.0, value, 2.0]))
    assert np.array_equal(buffer._sampler.tree.priorities, before)
