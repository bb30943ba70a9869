from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from maze_train.data.minibatches import minibatch_indices

CPU = torch.device("cpu")


def passes(num_samples, batch_size, seed, count=1):
    """Several passes from one generator, as lists."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [piece.tolist() for piece in minibatch_indices(num_samples, batch_size, generator, CPU)]
        for _ in range(count)
    ]


@given(st.integers(1, 200), st.integers(1, 250), st.integers(0, 2**31))
def test_each_sample_appears_exactly_once(num_samples, batch_size, seed):
    """A pass is a permutation, cut into full minibatches and one remainder."""
    (pieces,) = passes(num_samples, batch_size, seed)
    assert sorted(i for piece in pieces for i in piece) == list(range(num_samples))
    *full, last = [len(piece) for piece in pieces]
    assert all(size == batch_size for size in full)
    assert last == (num_samples % batch_size or min(batch_size, num_samples))


def test_order_depends_on_the_generator_only():
    """Equal generators give equal orders, whatever the global one does; others differ."""
    torch.manual_seed(0)
    first = passes(50, 8, seed=1, count=3)
    torch.manual_seed(1)
    torch.rand(5)
    before = torch.get_rng_state()
    assert passes(50, 8, seed=1, count=3) == first
    assert torch.equal(torch.get_rng_state(), before)
    assert passes(50, 8, seed=2, count=3) != first


def test_each_pass_has_an_order_of_its_own():
    """Two passes from one generator differ."""
    a, b = passes(50, 8, seed=3, count=2)
    assert a != b


def test_the_size_of_minibatches_does_not_change_the_order():
    """The order is drawn for the whole pass: cutting it differently keeps it."""
    (fine,), (coarse,) = passes(20, 3, seed=4), passes(20, 20, seed=4)
    assert [i for piece in fine for i in piece] == coarse[0]


def test_every_order_is_equally_likely():
    """All six orders of three samples come up alike: chi-squared below the 99.9% quantile."""
    generator = torch.Generator().manual_seed(0)
    counts = {}
    for _ in range(3000):
        (piece,) = minibatch_indices(3, 3, generator, CPU)
        counts[tuple(piece.tolist())] = counts.get(tuple(piece.tolist()), 0) + 1
    assert len(counts) == 6
    assert sum((n - 500) ** 2 / 500 for n in counts.values()) < 20.5
