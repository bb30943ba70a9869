"""Statistics of imitation learning."""

from __future__ import annotations

from maze_train.events import Event, EventInterface


class ImitationEvents(EventInterface, prefix="train"):
    """Metrics of imitation of recorded actions.

    Those of actions, and the norm, are taken of the first and every 16th minibatch of an epoch, as
    means over the parts of an action; where it has several, there is also one for each part that it
    applies to: `<tag>/<part>`. Those of the validation data are `validation/...`, with
    `validation/loss`, which holds the entropy bonus.
    """

    policy_loss = Event("Loss of the actions, summed over their parts, without the entropy bonus.")
    policy_entropy = Event("Entropy of the policy, in nats.")
    policy_l2_norm = Event("L2 norm of the parameters of the policy.", reduce="last")
    discrete_accuracy = Event("Share of discrete choices that are the most likely ones.")
    discrete_top_5_accuracy = Event(
        "Share of choices among the 5 most likely ones, of those with more than 10 alternatives."
    )
    discrete_top_10_accuracy = Event(
        "Share of choices among the 10 most likely ones, of those with more than 20 alternatives."
    )
    discrete_action_rank = Event("Place of the chosen action among all by probability, from 1.")
    multi_binary_accuracy = Event("Share of bits that are the more likely ones.")
    box_mean_abs_deviation = Event(
        "Mean absolute deviation of the most likely action, in units of the environment."
    )
