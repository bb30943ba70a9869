from __future__ import annotations

import numpy as np
from gymnasium import spaces

from maze_train.spaces.columns import Columns, Spec, leaves_of
from maze_train.spaces.describe import flat_spaces

SPACE = spaces.Dict(
    {"goal": spaces.Box(0, 1, (3,), np.float64), "at/x": spaces.Box(0, 9, (), np.uint16)}
)


def test_columns_share_memory():
    """Arrays start at separate cache lines after the offset and do not exceed `nbytes`."""
    one = np.zeros(2, np.float32)
    columns = Columns(
        Columns.of(flat_spaces(SPACE), "obs").batched(5, 2)
        | Columns.of({"": spaces.Discrete(3)}, "turn", stored=False)
        | Columns.like({"": one}, "actions")
    )
    assert columns["obs/goal"] == Spec((5, 2, 3), np.dtype(np.float32))
    assert columns["obs/at/x"] == Spec((5, 2), np.dtype(np.int32))
    assert columns["turn"] == Spec((), np.dtype(np.int64))
    assert columns.nbytes == 128 + 64 + 64 + 64
    memory = np.full(64 + columns.nbytes + 1, 9, np.uint8)
    arrays = columns.arrays(memory, 64)
    for i, array in enumerate(arrays.values()):
        assert (array.ctypes.data - memory.ctypes.data) % 64 == 0
        array[...] = i
    assert [array.flat[-1] for array in arrays.values()] == [0, 1, 2, 3]
    assert (memory[:64] == 9).all()
    assert memory[-1] == 9
    assert leaves_of(arrays, "actions")[""] is arrays["actions"]
    assert list(leaves_of(arrays, "obs")) == list(flat_spaces(SPACE))
    new = columns.arrays()
    assert all(not new[name].any() and new[name].shape == columns[name].shape for name in columns)
