"""One recorded episode."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from maze_train.core.errors import ShapeError
from maze_train.core.types import Array, ArrayTree, leaves_by_key
from maze_train.spaces.columns import column_name


@dataclass(frozen=True)
class Trajectory:
    """One episode of T >= 1 steps, or a piece of one, as the environment gave it.

    Attributes:
        obs: Observations before each action and after the last one, `[T + 1, ...]`; one flat
            mapping for a Dict or Tuple space.
        actions: Actions of the environment, `[T, ...]`.
        rewards: Rewards after each action, `[T]`.
        terminated: Whether the last step led to a terminal state.
        truncated: Whether the episode was cut off (time limit) after the last step.
        seed: Seed that the environment was reset with; None: unknown.

    Raises:
        ShapeError: If lengths do not agree, or a number is not finite.
    """

    obs: ArrayTree
    actions: ArrayTree
    rewards: Array
    terminated: bool
    truncated: bool
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.rewards.ndim != 1 or not len(self.rewards):
            shape = list(self.rewards.shape)
            raise ShapeError(f"rewards have the shape {shape}, expected [T] with T >= 1")
        for name, array in self.arrays.items():
            length = self.num_steps + name.startswith("obs")
            if array.shape[:1] != (length,):
                raise ShapeError(
                    f"{name} has the shape {list(array.shape)}, expected [{length}, ...] for "
                    f"{self.num_steps} rewards"
                )
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                row = int(np.argwhere(~np.isfinite(array))[0, 0])
                raise ShapeError(f"{name}[{row}] = {array[row]}: expected finite numbers")

    @property
    def arrays(self) -> dict[str, Array]:
        """Observations, actions and rewards by name."""
        return named_arrays(self.obs, self.actions, self.rewards)

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.rewards)

    @property
    def nbytes(self) -> int:
        """Bytes of observations, actions and rewards."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def episode_return(self) -> float:
        """Sum of the rewards, not discounted, in float64."""
        return float(self.rewards.sum(dtype=np.float64))


def named_arrays(obs: ArrayTree, actions: ArrayTree, rewards: Array) -> dict[str, Array]:
    """Return the arrays of episodes by name: `obs`, or `obs/goal` for a leaf of a mapping."""
    groups = {"obs": obs, "actions": actions, "rewards": rewards}
    return {
        column_name(group, key): leaf
        for group, tree in groups.items()
        for key, leaf in leaves_by_key(tree).items()
    }
