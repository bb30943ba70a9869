"""Events of IMPALA."""

from __future__ import annotations

from maze_train.algorithms.actor_critic.events import ActorCriticEvents
from maze_train.events import Event, EventInterface


class ImpalaEvents(ActorCriticEvents):
    """Statistics of IMPALA learners."""

    policy_lag_mean = Event("Updates that the weights which acted were behind those that learn.")
    policy_lag_max = Event("Largest of these.", reduce="max")
    rho_mean = Event("Importance weight pi(a|s) / mu(a|s) of the actions, not clipped.")
    rho_clip_fraction = Event(
        "Share of importance weights that their bound in the targets cuts, but for rounding."
    )


class ActorEvents(EventInterface, prefix="actors"):
    """Statistics of actors."""

    queue_before = Event("Rollouts that waited when the learner asked for some.")
    queue_after = Event("Rollouts that waited after it took some.")
    steps_made = Event("Steps that actors made since training began.", reduce="last")
    steps_dropped = Event(
        "Those that were lost with an actor or an episode, or in flight when a run stopped.",
        reduce="last",
    )
    steps_in_flight = Event("Those that wait, or are in rollouts under way.", reduce="last")


class ActorTimeEvents(EventInterface, prefix="time"):
    """Wall time of updates by what took it; varies between runs, like all clocks."""

    learner_wait_share = Event(
        "Share of the time that waiting for a batch took, with `dev` collecting it."
    )
