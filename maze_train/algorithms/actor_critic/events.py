"""Events of actor-critics."""

from __future__ import annotations

from maze_train.events import Event
from maze_train.learner.steps import LearnerEvents


class ActorCriticEvents(LearnerEvents):
    """Statistics of actor-critic learners, means over samples unless said otherwise."""

    policy_loss = Event("Policy loss.")
    value_loss = Event("Value loss, without its coefficient.")
    policy_entropy = Event("Entropy of the policy, in nats.")
    approximate_kl = Event("Estimate of KL(old policy || new policy), in nats.")
    clip_fraction = Event("Share of samples whose probability ratio left the clip range.")
    explained_variance = Event(
        "1 - Var(returns - values) / Var(returns) of the values at collection: 1 is perfect."
    )
    values_mean = Event("Mean value at collection.")
    returns_mean = Event("Mean target return of the critic.")
    clip_range = Event("Clip range of the last update.", reduce="last")
    entropy_coef = Event("Weight of the entropy bonus in the last update.", reduce="last")
