"""Arrays and infos of vector environments of other packages, one row per environment."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.envs.faults import (
    NonFiniteError,
    check_finite,
    check_finite_reward,
    non_finite_rewards,
    non_finite_rows,
)
from maze_train.errors import EnvError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from maze_train.envs.buffers import Array

    Mask = npt.NDArray[np.bool_]


def column_of(space: Any, n: int) -> Array:
    """A zeroed array for n values of a leaf."""
    return np.zeros((n, *(space.shape or ())), space.dtype)


def reordered(arrays: Mapping[str, Any], order: Array) -> dict[str, Any]:
    """The values, arrays with one row per environment in `order`."""
    return {
        key: value[order] if isinstance(value, np.ndarray) and len(value) == len(order) else value
        for key, value in arrays.items()
    }


def masked(infos: Mapping[str, Any], rows: Mask) -> dict[str, Any]:
    """Infos of a step, under masks that leave only these rows."""
    result: dict[str, Any] = {}
    for key, value in infos.items():
        if not key.startswith("_"):
            result[key] = value
            result[f"_{key}"] = rows & infos.get(f"_{key}", True)
    return result


def check_columns(
    columns: Mapping[str, Array],
    lengths: Array,
    rows: Mask | None = None,
    rewards: Array | None = None,
    first: int = 0,
) -> None:
    """Refuse NaN and infinities in what a vector environment returned.

    Args:
        columns: Observations, [n, ...] per leaf.
        lengths: Steps of the episodes so far, [n], for the message.
        rows: Which rows of the observations matter, [n]; None: all.
        rewards: The rewards, [n], all of which matter; None: there are none.
        first: Number of the first environment in messages.

    Raises:
        EnvError: Naming the environment, the leaf or the reward, the value and its index.
    """
    floats = [column for column in columns.values() if column.dtype.kind == "f"]
    bad_rewards = np.False_ if rewards is None else non_finite_rewards(rewards)
    if not bad_rewards.any() and all(np.isfinite(column).all() for column in floats):
        return
    bad = non_finite_rows(columns)
    if rows is not None:
        bad &= rows
    bad |= bad_rewards
    for i in bad.nonzero()[0].tolist():
        with naming(first + i, lengths[i]):
            if rewards is not None:
                check_finite_reward(float(rewards[i]))
            check_finite({key: column[i] for key, column in columns.items()})


def check_final(final_obs: Array, lengths: Array, truncated: Mask, first: int = 0) -> None:
    """Refuse NaN and infinities in last observations of truncated episodes.

    Args:
        final_obs: One observation, or leaves by key, per environment.
        lengths: Steps of the episodes, [n], for the message.
        truncated: Which episodes were truncated, [n].
        first: Number of the first environment in messages.

    Raises:
        EnvError: Naming the environment, the leaf, the value and its index.
    """
    for i in truncated.nonzero()[0].tolist():
        leaves = final_obs[i] if isinstance(final_obs[i], dict) else {"": final_obs[i]}
        with naming(first + i, lengths[i]):
            check_finite(leaves, "final observation")


@contextmanager
def naming(number: int, step: int) -> Iterator[None]:
    """Name the environment in the message about a number that is not finite."""
    try:
        yield
    except NonFiniteError as error:
        raise EnvError(
            f"environment {number} failed at step {step} of its episode: {error}"
        ) from error
