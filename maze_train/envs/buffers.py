"""The arrays that environments are stepped into, in private or in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maze_train.spaces.describe import FlatView

__all__ = ["StepBuffers"]

Array: TypeAlias = npt.NDArray[Any]

CACHE_LINE = 64
"""Every array starts on a cache line of its own, so that processes do not contend for the flags of
others."""


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Buffers that one step of `n` environments reads and writes.

    Observations and actions are keyed by leaf; a space that is one leaf has the key `""`.
    """

    obs: dict[str, Array]
    """Observations to act on, [n, ...] per leaf."""
    final_obs: dict[str, Array]
    """Last observations of the episodes that ended in this step, [n, ...] per leaf; other rows mean
    nothing."""
    actions: dict[str, Array]
    """Actions to take, [n, ...] per leaf."""
    rewards: npt.NDArray[np.float64]
    """[n]."""
    terminated: npt.NDArray[np.bool_]
    """[n]."""
    truncated: npt.NDArray[np.bool_]
    """[n]."""

    @classmethod
    def over(cls, memory: Any, observation: FlatView, action: FlatView, n: int) -> StepBuffers:
        """Lay the arrays out in `memory`, a writable buffer of at least `nbytes(...)` bytes.

        The layout follows from the spaces and `n` alone, so processes that know these agree on it.
        """
        groups: dict[str, dict[str, Array]] = {}
        offset = 0
        for group, key, shape, dtype in array_specs(observation, action, n):
            array: Array = np.ndarray(shape, dtype, buffer=memory, offset=offset)
            groups.setdefault(group, {})[key] = array
            offset += padded(array.nbytes)
        return cls(
            obs=groups["obs"],
            final_obs=groups["final_obs"],
            actions=groups["actions"],
            rewards=groups["step"]["rewards"],
            terminated=groups["step"]["terminated"],
            truncated=groups["step"]["truncated"],
        )

    @staticmethod
    def nbytes(observation: FlatView, action: FlatView, n: int) -> int:
        """Bytes that `over` needs."""
        return sum(
            padded(int(np.prod(shape)) * dtype.itemsize)
            for _, _, shape, dtype in array_specs(observation, action, n)
        )

    def rows(self, first: int, stop: int) -> StepBuffers:
        """The part of the environments first, ..., stop - 1, as views."""
        part = slice(first, stop)
        return StepBuffers(
            obs={key: array[part] for key, array in self.obs.items()},
            final_obs={key: array[part] for key, array in self.final_obs.items()},
            actions={key: array[part] for key, array in self.actions.items()},
            rewards=self.rewards[part],
            terminated=self.terminated[part],
            truncated=self.truncated[part],
        )


def array_specs(
    observation: FlatView, action: FlatView, n: int
) -> Iterator[tuple[str, str, tuple[int, ...], np.dtype[Any]]]:
    """Group, key, shape and dtype of every array, in the order of the layout."""
    for group, view in (("obs", observation), ("final_obs", observation), ("actions", action)):
        for key, leaf in view.leaves.items():
            yield group, key, (n, *(leaf.shape or ())), np.dtype(leaf.dtype)
    yield "step", "rewards", (n,), np.dtype(np.float64)
    yield "step", "terminated", (n,), np.dtype(np.bool_)
    yield "step", "truncated", (n,), np.dtype(np.bool_)


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to whole cache lines."""
    return -(-nbytes // CACHE_LINE) * CACHE_LINE
