"""Observations of which a part is left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium
import numpy as np

from maze_train.errors import ConfigError, SpaceError

if TYPE_CHECKING:
    from collections.abc import Sequence


class SelectEntriesWrapper(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Shows some entries of a vector only, such as positions without velocities.

    Args:
        env: Environment whose observations are vectors, a Box `[D]`.
        indices: The entries that are left, in [0, D), in this order.

    Raises:
        ConfigError: If an index is out of its range, or there is none.
        SpaceError: If observations are no vectors.
    """

    remembers: ClassVar = ()

    def __init__(self, env: gymnasium.Env[Any, Any], indices: Sequence[int]) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
            raise SpaceError(
                f"SelectEntriesWrapper needs observations that are vectors, got {space}: flatten "
                "them first (gymnasium.wrappers.FlattenObservation)"
            )
        size = space.shape[0]
        if not indices or not all(isinstance(i, int) and 0 <= i < size for i in indices):
            raise ConfigError("indices", f"expected integers from 0 to {size - 1}", list(indices))
        self._indices = np.array(indices)
        self.observation_space = gymnasium.spaces.Box(
            space.low[self._indices],
            space.high[self._indices],
            dtype=space.dtype,
        )

    def observation(self, observation: Any) -> Any:
        """The entries that are left."""
        return np.asarray(observation)[self._indices]
