"""Sums of priorities in a tree, for sampling in proportion to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from maze_train.types import Array


class SumTree:
    """Priorities of N entries, all 0 at first, and sums of them in a binary tree.

    Node i is the sum of nodes 2 i and 2 i + 1; nodes N to 2 N - 1 are the priorities. So the tree
    is a function of the priorities, whatever the order of updates. Changing or finding k entries
    takes O(k log N).

    Args:
        size: N, >= 1.
    """

    entry_nbytes = 2 * np.dtype(np.float64).itemsize
    """Bytes of the nodes, by entry."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._nodes = np.zeros(2 * size)

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self._nodes[1])

    @property
    def priorities(self) -> Array:
        """A view of all priorities, `[N]` float64; `set` changes them."""
        return self._nodes[self._size :]

    def set(self, indices: Array, priorities: Array | float) -> None:
        """Change priorities, finite and >= 0; of an index that comes twice, the last one stays."""
        nodes = indices + self._size
        self._nodes[nodes] = priorities
        # Leaves lie on two levels: the shorter paths sum up the root once more.
        for _ in range((2 * self._size - 1).bit_length() - 1):
            nodes = np.maximum(nodes >> 1, 1)
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def find(self, sums: Array) -> Array:
        """The entries in whose share of [0, total) the numbers `[k]` fall.

        The shares have the lengths of the priorities, in the order of the leaves from left to
        right. An entry of priority 0 is never found, as long as the total is above 0.
        """
        nodes = np.ones(len(sums), np.int64)
        for _ in range(self._size.bit_length() - 1):
            nodes, sums = self._descend(nodes, sums)
        inner = np.flatnonzero(nodes < self._size)
        nodes[inner], _ = self._descend(nodes[inner], sums[inner])
        return nodes - self._size

    def _descend(self, nodes: Array, sums: Array) -> tuple[Array, Array]:
        left = 2 * nodes
        share = self._nodes[left]
        # Rounding must not lead into a branch that is empty.
        goes_right = (sums >= share) & (self._nodes[left + 1] > 0)
        return left + goes_right, sums - goes_right * share
