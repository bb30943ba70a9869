"""Minibatches of a dataset: each sample once per pass, for all kinds of storage."""

from __future__ import annotations

import threading

import pytest

from maze_train.algorithms.bc.data import BatchLoader


class Numbers:
    """Source whose samples are their indices."""

    def __init__(self, num_samples, fails_at=None):
        self.num_samples = num_samples
        self.fails_at = fails_at
        self.threads = set()

    def batch(self, indices):
        """Return observations [n, 1] and actions [n]."""
        self.threads.add(threading.get_ident())
        if self.fails_at is not None and self.fails_at in indices:
            raise OSError("the disk failed")
        return indices[:, None].float(), indices.clone()


def taken(loader, count):
    """Return the next minibatches as lists of sample indices."""
    return [loader.next()[1].tolist() for _ in range(count)]


@pytest.mark.parametrize("n_workers", [0, 2])
def test_batch_loader_pass_has_every_sample_once(n_workers):
    """Each pass has a different order, and its last minibatch is smaller."""
    loader = BatchLoader(Numbers(10), 4, seed=1, n_workers=n_workers)
    assert loader.batches_per_pass == 3
    passes = [taken(loader, 3) for _ in range(3)]
    loader.close()
    for batches in passes:
        assert [len(batch) for batch in batches] == [4, 4, 2]
        assert sorted(k for batch in batches for k in batch) == list(range(10))
    assert len({str(batches) for batches in passes}) == 3
    assert len(loader._orders) <= 2


def test_batch_loader_workers_do_not_change_the_order():
    """Threads prefetch across passes in the same order, and only threads read."""
    alone = taken(BatchLoader(Numbers(23), 5, seed=3), 40)
    assert alone != taken(BatchLoader(Numbers(23), 5, seed=4), 40)
    source = Numbers(23)
    loader = BatchLoader(source, 5, seed=3, n_workers=3)
    assert taken(loader, 40) == alone
    loader.close()
    loader.close()
    assert threading.get_ident() not in source.threads
    assert not [t for t in threading.enumerate() if t.name.startswith("batch-loader")]


@pytest.mark.parametrize("position", [0, 1, 5, 13])
def test_batch_loader_state_continues_exactly(position):
    """A loader with the state of another continues with the same minibatches."""
    first = BatchLoader(Numbers(23), 5, seed=3, n_workers=2)
    taken(first, position)
    second = BatchLoader(Numbers(23), 5, seed=3, n_workers=1)
    taken(second, 2)
    second.load_state_dict(first.state_dict())
    assert taken(second, 12) == taken(first, 12)
    first.close()
    second.close()


def test_batch_loader_raises_errors_of_workers():
    """The error is raised when the failed minibatch is requested."""
    loader = BatchLoader(Numbers(6, fails_at=3), 6, n_workers=1)
    with pytest.raises(OSError, match="the disk failed"):
        loader.next()
    loader.close()
