"""Finds numbers that are not finite in what environments return."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.errors import EnvError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from maze_train.envs.buffers import Array

    Mask = npt.NDArray[np.bool_]

__all__ = [
    "MAX_REWARD",
    "FiniteCheck",
    "NonFiniteError",
    "check_finite",
    "check_finite_reward",
    "non_finite_rewards",
    "non_finite_rows",
]

MAX_REWARD = float(np.finfo(np.float32).max)
"""Size from which on a reward is infinite for those who learn from it."""

PIECE = 2**13
"""Numbers per dot product: BLAS uses threads for longer ones."""

WEIGHT = 2.0**-20
"""So small that a piece of the largest numbers does not overflow."""


class NonFiniteError(EnvError):
    """An environment returned NaN or an infinity."""

    is_final = True  # A worker that is started again would see the same number.


class FiniteCheck:
    """Tells whether arrays hold finite numbers only; made once, asked after every step.

    The test is a dot product with a small number, the fastest that numpy has: it is finite for
    finite numbers, and an infinity or NaN stays one.

    Args:
        columns: Contiguous arrays; those that do not hold floats are passed over.
    """

    def __init__(self, columns: Mapping[str, Array]) -> None:
        self._pieces: list[tuple[Array, Array]] = []
        for column in columns.values():
            if column.dtype.kind == "f":
                flat = column.reshape(-1)
                parts = [flat[k : k + PIECE] for k in range(0, len(flat), PIECE)]
                self._pieces += [(part, np.full_like(part, WEIGHT)) for part in parts]

    def passes(self) -> bool:
        """Whether all numbers are finite now."""
        try:
            for part, weights in self._pieces:
                if not math.isfinite(part.dot(weights)):
                    return False
        except RuntimeWarning:  # Of infinities of both signs, where warnings are errors.
            return False
        return True


def check_finite(columns: Mapping[str, Any], what: str = "observation") -> None:
    """Refuse leaves of one observation that hold NaN or infinities.

    Args:
        columns: Leaves by key; the key of a lone leaf is empty.
        what: Name in the message.

    Raises:
        NonFiniteError: Naming the leaf, the value and its index.
    """
    for key, value in columns.items():
        array = np.asarray(value)
        if array.dtype.kind != "f" or np.isfinite(array).all():
            continue
        index = tuple(int(k) for k in np.argwhere(~np.isfinite(array))[0])
        where = f" at index {index}" if index else ""
        name = f"{what} {key!r}" if key else f"the {what}"
        raise NonFiniteError(f"{name} is {array[index]}{where}, expected a finite number")


def check_finite_reward(reward: float) -> None:
    """Refuse a reward that is NaN, or infinite in single precision.

    Raises:
        NonFiniteError: Naming the value.
    """
    if not abs(reward) <= MAX_REWARD:
        limit = f" that float32 can hold, up to {MAX_REWARD:.2g}" if math.isfinite(reward) else ""
        raise NonFiniteError(f"reward is {reward}, expected a finite number{limit}")


def non_finite_rewards(rewards: Array) -> Mask:
    """Mask of the rewards [n] that `check_finite_reward` refuses, [n]."""
    return ~(np.abs(rewards) <= MAX_REWARD)


def non_finite_rows(columns: Mapping[str, Array]) -> Mask:
    """Mask of the rows of arrays [n, ...] that hold NaN or infinities, [n]."""
    bad = np.zeros(len(next(iter(columns.values()))), np.bool_)
    for column in columns.values():
        if column.dtype.kind == "f":
            bad |= ~np.isfinite(column).reshape(len(column), -1).all(axis=1)
    return bad
