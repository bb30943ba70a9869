"""Returns and lengths of episodes that span several rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from maze_train.events import Event, EventInterface

if TYPE_CHECKING:
    from maze_train.events import Statistics
    from maze_train.types import Array

__all__ = ["EpisodeTracker", "FinishedEpisodes", "TrainingEpisodeEvents"]


class TrainingEpisodeEvents(EventInterface, prefix="train"):
    """Episodes that ended during an epoch of training; absent when none did."""

    episode_return_mean = Event("Mean undiscounted return of the episodes that ended.")
    episode_return_max = Event("Largest return.", reduce="max")
    episode_return_min = Event("Smallest return.", reduce="min")
    episode_length_mean = Event("Mean number of steps.")
    episodes = Event("Number of episodes that ended.", reduce="sum")
    success_rate = Event("Share of them whose last info says `is_success`.")


@dataclass
class FinishedEpisodes:
    """Episodes in the order in which they ended."""

    returns: list[float] = field(default_factory=list)
    """Undiscounted sums of raw rewards."""

    lengths: list[int] = field(default_factory=list)
    """Numbers of steps."""

    successes: list[float] = field(default_factory=list)
    """1.0 or 0.0 for those whose last info has `is_success`."""

    def record(self, statistics: Statistics) -> None:
        """Add the episodes to statistics."""
        events = TrainingEpisodeEvents
        if not self.returns:
            return
        for event in (
            events.episode_return_mean,
            events.episode_return_max,
            events.episode_return_min,
        ):
            statistics.record_many(event, self.returns)
        statistics.record_many(events.episode_length_mean, [float(n) for n in self.lengths])
        statistics.record(events.episodes, float(len(self.returns)))
        if self.successes:
            statistics.record_many(events.success_rate, self.successes)


class EpisodeTracker:
    """Follows the running episodes of B environments through rollouts.

    Args:
        num_envs: B.
    """

    def __init__(self, num_envs: int) -> None:
        self.returns = np.zeros(num_envs)
        self.lengths = np.zeros(num_envs, dtype=np.int64)

    def follow(self, rewards: Array, done: Array) -> FinishedEpisodes:
        """Take in a rollout.

        Args:
            rewards: Raw rewards, `[T, B]`.
            done: Whether an episode ended at the step, `[T, B]`.

        Returns:
            The episodes that ended, in order of time, then environment.
        """
        finished = FinishedEpisodes()
        steps = rewards.shape[0]
        sums = np.cumsum(rewards, axis=0, dtype=np.float64)
        # What had been summed up when the previous episode ended is subtracted from each sum.
        base_return = -self.returns
        base_length = -self.lengths
        for t, b in np.argwhere(done):
            finished.returns.append(float(sums[t, b] - base_return[b]))
            finished.lengths.append(int(t + 1 - base_length[b]))
            base_return[b] = sums[t, b]
            base_length[b] = t + 1
        self.returns = sums[-1] - base_return
        self.lengths = steps - base_length
        return finished

    def state_dict(self) -> dict[str, list[float]]:
        """Returns and lengths so far."""
        return {"returns": self.returns.tolist(), "lengths": self.lengths.tolist()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Continue from `state`."""
        self.returns = np.array(state["returns"], dtype=np.float64)
        self.lengths = np.array(state["lengths"], dtype=np.int64)
