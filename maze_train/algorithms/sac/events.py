"""Events of SAC."""

from __future__ import annotations

from maze_train.algorithms.off_policy.events import PolicyAndCriticsEvents
from maze_train.events import Event


class SACEvents(PolicyAndCriticsEvents):
    """Statistics of SAC learners, means over gradient steps unless said otherwise."""

    policy_entropy = Event("Entropy of the policy, in nats, of actions scaled to [-1, 1].")
    target_entropy = Event("Entropy that the temperatures steer at, in nats.")
    entropy_coef = Event("Temperature, mean over the parts of the action.")
    temperature_loss = Event("Loss of the temperatures.")
