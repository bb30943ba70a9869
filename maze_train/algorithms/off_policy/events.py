"""Events of algorithms with a replay buffer."""

from __future__ import annotations

from maze_train.events import Event, EventInterface
from maze_train.learner.steps import LearnerEvents


class ReplayEvents(EventInterface, prefix="replay"):
    """Statistics of the replay buffer."""

    size = Event("Transitions in the replay buffer.", reduce="last")
    picks_per_transition = Event(
        "How often a transition was drawn so far, mean over those that were collected.",
        reduce="last",
    )


class ReplayTimeEvents(EventInterface, prefix="time"):
    """Wall time of updates by what took it, in seconds."""

    sample_s = Event("Sampling from the replay buffer, a part of `time/update_s`.", reduce="sum")


class PolicyAndCriticsEvents(LearnerEvents):
    """Statistics of learners of a policy and critics, means over gradient steps.

    All are empty while the buffer is filled for the first time.
    """

    critic_loss = Event("Loss of the critics: half the mean squared error, summed over critics.")
    critic_value = Event("Value of the actions in the batch, mean over critics.")
    critic_spread = Event("Largest minus smallest value of an action among the critics.")
    policy_loss = Event("Policy loss: minus the value of the states; with SAC the soft value.")
