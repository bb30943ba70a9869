from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from maze_train.algorithms.ppo.learner import minibatch_indices


def a_pass(generator, num_samples=50, batch_size=8, count=0):
    """Return the minibatches of one pass as lists."""
    pieces = minibatch_indices(num_samples, batch_size, generator, torch.device("cpu"), count)
    return [piece.tolist() for piece in pieces]


def seeded(seed):
    """Return a seeded generator."""
    return torch.Generator().manual_seed(seed)


@given(st.integers(1, 200), st.integers(1, 250), st.integers(0, 2**31))
def test_minibatches_contain_each_sample_once(num_samples, batch_size, seed):
    """A pass is a permutation, split into full minibatches and a remainder."""
    pieces = a_pass(seeded(seed), num_samples, batch_size)
    assert sorted(i for piece in pieces for i in piece) == list(range(num_samples))
    *full, last = [len(piece) for piece in pieces]
    assert all(size == batch_size for size in full)
    assert last == (num_samples % batch_size or min(batch_size, num_samples))
    (whole,) = a_pass(seeded(seed), num_samples, num_samples)
    assert [i for piece in pieces for i in piece] == whole


@given(st.integers(1, 200), st.data())
def test_n_minibatches_differ_in_size_by_at_most_one(num_samples, data):
    """Sizes differ by at most one, and the order does not depend on the number of minibatches."""
    count = data.draw(st.integers(1, num_samples))
    pieces = a_pass(seeded(3), num_samples, 7, count)
    sizes = [len(piece) for piece in pieces]
    assert len(sizes) == count
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    (whole,) = a_pass(seeded(3), num_samples, num_samples)
    assert [i for piece in pieces for i in piece] == whole


def test_minibatch_order_depends_on_the_generator_only():
    """Orders differ between passes and seeds, and the global generator is not used."""
    before = torch.get_rng_state()
    generator = seeded(1)
    first, second = a_pass(generator), a_pass(generator)
    assert first != second
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    assert a_pass(seeded(1)) == first != a_pass(seeded(2))


def test_minibatch_orders_are_equally_likely():
    """The six orders of three samples pass a chi-squared test at the 99.9% quantile."""
    generator, counts = seeded(0), {}
    for _ in range(3000):
        (piece,) = a_pass(generator, 3, 3)
        counts[tuple(piece)] = counts.get(tuple(piece), 0) + 1
    assert len(counts) == 6
    assert sum((n - 500) ** 2 / 500 for n in counts.values()) < 20.5
