"""Events of SAC."""

from __future__ import annotations

from maze_train.events import Event, EventInterface
from maze_train.learner.learner import LearnerEvents

__all__ = ["ReplayEvents", "ReplayTimeEvents", "SACEvents"]


class SACEvents(LearnerEvents):
    """Statistics of SAC learners, means over gradient steps unless said otherwise."""

    critic_loss = Event("Loss of the critics: half the mean squared error, summed over critics.")
    critic_value = Event("Value of the actions in the batch, mean over critics.")
    critic_spread = Event("Largest minus smallest value of an action among the critics.")
    policy_loss = Event("Policy loss: minus the soft value of the states.")
    policy_entropy = Event("Entropy of the policy, in nats, of actions scaled to [-1, 1].")
    target_entropy = Event("Entropy that the temperatures steer at, in nats.")
    entropy_coef = Event("Temperature, mean over the parts of the action.")
    temperature_loss = Event("Loss of the temperatures.")


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
