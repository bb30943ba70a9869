"""Observations that are stored apart from the rows of a replay buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maze_train.data.replay_columns import Spec
    from maze_train.types import Array, Tensor

__all__ = ["KeptObservations"]


class KeptObservations:
    """Observations by position, which come and expire in the order of their positions.

    True last observations of episodes are kept so, because the row that follows holds the first one
    of the next episode. Memory grows by doubling; finding takes O(log n).

    Args:
        specs: Shape and dtype of the leaves by key.
    """

    def __init__(self, specs: Mapping[str, Spec]) -> None:
        self._positions = np.empty(0, np.int64)
        self._leaves = {key: np.empty((0, *spec.shape), spec.dtype) for key, spec in specs.items()}
        self._begin = self._end = 0

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that is reserved."""
        return self._positions.nbytes + sum(leaf.nbytes for leaf in self._leaves.values())

    def append(self, positions: Array, leaves: Mapping[str, Array]) -> None:
        """Keep observations `[k, ...]`.

        Args:
            positions: Where they belong, increasing, all beyond those that are kept, `[k]`.
            leaves: Observations by key.
        """
        if not len(positions):
            return
        if self._end + len(positions) > len(self._positions):
            self._make_room(len(self) + len(positions))
        added = slice(self._end, self._end + len(positions))
        self._positions[added] = positions
        for key, leaf in self._leaves.items():
            leaf[added] = leaves[key]
        self._end = added.stop

    def drop_before(self, position: int) -> None:
        """Drop the observations before a position."""
        self._begin += self._count_before(position)

    def drop_from(self, position: int) -> None:
        """Drop the observations at a position or beyond."""
        self._end = self._begin + self._count_before(position)

    def gather(self, positions: Array) -> dict[str, Tensor]:
        """Observations `[k, ...]` by key; for each of the positions `[k]` one is kept."""
        entries = self._begin + self._positions[self._begin : self._end].searchsorted(positions)
        return {key: torch.from_numpy(leaf[entries]) for key, leaf in self._leaves.items()}

    def between(self, first: int, stop: int) -> dict[str, Array]:
        """Copies of the parts that belong to positions first..stop - 1."""
        start, end = (self._begin + self._count_before(position) for position in (first, stop))
        parts = {f"obs/{key}": leaf[start:end].copy() for key, leaf in self._leaves.items()}
        return {"positions": self._positions[start:end].copy(), **parts}

    def restore(self, pieces: list[dict[str, Array]]) -> None:
        """Replace the content by results of `between`."""
        self._begin = self._end = 0
        if not pieces:
            return
        joined = {part: np.concatenate([piece[part] for piece in pieces]) for part in pieces[0]}
        order = np.argsort(joined["positions"])
        leaves = {key: joined[f"obs/{key}"][order] for key in self._leaves}
        self.append(joined["positions"][order], leaves)

    def _count_before(self, position: int) -> int:
        return int(self._positions[self._begin : self._end].searchsorted(position))

    def _make_room(self, needed: int) -> None:
        """Move what is kept to the front, of larger memory unless half of it stays free."""
        size = len(self._positions)
        size = size if 2 * needed <= size else 2 * needed
        kept = slice(self._begin, self._end)
        self._positions = _moved(self._positions, kept, size)
        self._leaves = {key: _moved(leaf, kept, size) for key, leaf in self._leaves.items()}
        self._begin, self._end = 0, kept.stop - kept.start


def _moved(array: Array, kept: slice, size: int) -> Array:
    target = array if size == len(array) else np.empty((size, *array.shape[1:]), array.dtype)
    target[: kept.stop - kept.start] = array[kept]
    return target
