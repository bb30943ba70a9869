"""Events of TD3."""

from __future__ import annotations

from maze_train.algorithms.off_policy.events import PolicyAndCriticsEvents
from maze_train.events import Event


class TD3Events(PolicyAndCriticsEvents):
    """Statistics of TD3 learners, means over gradient steps unless said otherwise."""

    saturation = Event("Share of the numbers of the policy's actions beyond 0.99 of their bounds.")
    exploration_noise_stddev = Event(
        "Standard deviation of the noise of actions in the last update.", reduce="last"
    )
