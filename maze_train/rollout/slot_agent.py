"""Contract of agents that act in slots of environments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from maze_train.envs.slots import EnvSlots
    from maze_train.rollout.members import ObservationMoments
    from maze_train.types import ArrayTree


class EpisodeTask(NamedTuple):
    """An episode that is to be played."""

    number: int
    """Its place among those that were asked for, from 0 on."""

    seed: int
    """Seed of the environment."""

    action_seed: int
    """Seed of what the agent does by chance."""

    noise_index: int = 0
    """Index in the noise table, where the weights of the agent are perturbed; see `MemberAgent`."""


class SlotAgent(ABC):
    """Chooses the actions of the first slots."""

    def begin_round(self, *args: Any) -> None:  # noqa: B027 (not all have something to do)
        """Get ready for the episodes of a round; `args` are what its owner says of it."""

    @abstractmethod
    def begin(self, row: int, task: EpisodeTask) -> None:
        """Begin an episode, which the environment of this row has just begun.

        Args:
            row: Which slot.
            task: The episode.
        """

    @abstractmethod
    def act(self, count: int, slots: EnvSlots) -> ArrayTree:
        """Actions of the first slots, in new memory.

        Args:
            count: How many slots.
            slots: The environments, with what they observe.

        Returns:
            `[rows, ...]` with at least `count` rows, or a flat dict of such arrays when the action
            space is a Dict or Tuple.
        """

    @abstractmethod
    def swap(self, i: int, j: int) -> None:
        """Exchange two rows with all that belongs to them."""

    def moments(self, row: int) -> ObservationMoments | None:
        """Moments of the observations of the episode, where the agent takes them."""
        return None
