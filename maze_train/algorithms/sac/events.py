"""Events of SAC."""

from __future__ import annotations

from maze_train.events import Event
from maze_train.learner.learner import LearnerEvents

__all__ = ["SACEvents"]


class SACEvents(LearnerEvents):
    """Statistics of SAC learners, means over gradient steps unless said otherwise.

    All are empty while the buffer is filled for the first time.
    """

    critic_loss = Event("Loss of the critics: half the mean squared error, summed over critics.")
    critic_value = Event("Value of the actions in the batch, mean over critics.")
    critic_spread = Event("Largest minus smallest value of an action among the critics.")
    policy_loss = Event("Policy loss: minus the soft value of the states.")
    policy_entropy = Event("Entropy of the policy, in nats, of actions scaled to [-1, 1].")
    target_entropy = Event("Entropy that the temperatures steer at, in nats.")
    entropy_coef = Event("Temperature, mean over the parts of the action.")
    temperature_loss = Event("Loss of the temperatures.")
