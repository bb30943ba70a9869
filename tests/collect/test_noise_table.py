"""Noise table of ES: shared by all processes, deterministic, with bounds checks."""

from __future__ import annotations

import re

import numpy as np
import pytest

from maze_train.algorithms.es.population import SharedNoiseTable
from maze_train.core.errors import ConfigError, ShapeError, TrainingError
from maze_train.workers.pool import Worker, WorkerSpecs
from maze_train.workers.process_pool import LocalProcesses

COUNT = 100_000
SEED = 7


@pytest.fixture
def table():
    """A noise table that is closed after the test."""
    made = SharedNoiseTable(COUNT, SEED)
    yield made
    made.close()


def test_noise_table_is_one_stream(table):
    """The table equals the output of a single generator call."""
    expected = np.random.default_rng(SEED).standard_normal(COUNT, dtype=np.float32)
    np.testing.assert_array_equal(table.array, expected)
    assert table.array.dtype == np.float32
    for index, dim in ((0, 1), (0, COUNT), (12_345, 678), (COUNT - 5, 5), (COUNT - 1, 1)):
        assert table.get(index, dim).tolist() == expected[index : index + dim].tolist()
    other = SharedNoiseTable(COUNT, SEED + 1)
    assert (other.array != table.array).mean() > 0.99
    other.close()


@pytest.mark.parametrize(
    ("index", "dim"), [(-1, 3), (8, 3), (10**9, 3), (1, 10), (0, 11), (0, 0), (5, -2)]
)
def test_noise_vectors_outside_the_table_raise(index, dim):
    """Vectors that start before the table or end after it raise ShapeError."""
    message = rf"index = {index}: expected a value in \[0, {10 - dim}\]"
    if not 1 <= dim <= 10:
        message = rf"dim = {dim}: expected a value in \[1, 10\]"
    small = SharedNoiseTable(10, 0)
    small.close()
    assert small.get(7, 3).shape == (3,)
    assert small.get(0, 10).shape == (10,)
    with pytest.raises(ShapeError, match=message):
        small.get(index, dim)
    if dim > 10:
        with pytest.raises(ShapeError, match=message):
            small.sample_index(np.random.default_rng(0), dim)


@pytest.mark.parametrize("dim", [1, 3, 9, 10])
def test_noise_indices_are_uniform(dim):
    """Start indices are uniform over all valid positions; a single index is a Python int."""
    small = SharedNoiseTable(10, 0)
    small.close()
    generator = np.random.default_rng(0)
    drawn = small.sample_index(generator, dim, size=20_000)
    assert drawn.shape == (20_000,)
    counts = np.bincount(drawn, minlength=11 - dim)
    assert len(counts) == 11 - dim
    expected = 20_000 / (11 - dim)
    assert np.abs(counts - expected).max() < 5.0 * np.sqrt(expected)
    again = np.random.default_rng(0)
    singles = [small.sample_index(again, dim) for _ in range(5)]
    assert all(type(index) is int for index in singles)
    assert all(small.get(index, dim).shape == (dim,) for index in {*singles, *drawn.tolist()})
    assert small.sample_index(np.random.default_rng(0), dim, size=1).shape == (1,)


def test_a_table_without_choice_is_refused(table):
    """A table that is not larger than the policy raises ConfigError."""
    table.check_dim(COUNT - 1)
    for dim in (COUNT, COUNT + 1):
        with pytest.raises(ConfigError) as info:
            table.check_dim(dim)
        message = f"algorithm.noise_table_size = {COUNT}: expected more than the {dim} parameters"
        assert str(info.value).startswith(message)


def test_a_state_of_other_numbers_is_refused(table):
    """Loading a state with a different seed or size raises TrainingError."""
    assert table.state_dict() == {"seed": SEED, "count": COUNT}
    table.load_state_dict({"count": COUNT, "seed": SEED})
    for state in ({"seed": SEED + 1, "count": COUNT}, {"seed": SEED, "count": COUNT + 1}, {}):
        with pytest.raises(TrainingError, match=re.escape(f"the saved table {state}")):
            table.load_state_dict(state)


class Reader(Worker):
    """Worker that reads a table."""

    def __init__(self, context):
        self.table = None

    def set_table(self, table):
        """Store the table."""
        self.table = table

    def read(self, index, dim):
        """Return the state of the table and a slice of it."""
        return self.table.state_dict(), self.table.get(index, dim).tolist()


@pytest.mark.slow
def test_workers_read_the_shared_noise_table(table):
    """Worker processes read the shared table, also after the first process closes it."""
    pool = LocalProcesses(1, start_method="forkserver").pool(WorkerSpecs([Reader], ["reader"]))
    pool.call_all("set_table", table)
    table.array[100] = -1000.0
    table.close()
    table.close()
    assert pool.call_all("read", 99, 3) == [(table.state_dict(), table.get(99, 3).tolist())]
    pool.close()
