"""Statistics of evolution strategies."""

from __future__ import annotations

from maze_train.events import Event, EventInterface


class ESEvents(EventInterface, prefix="train"):
    """Metrics of one update of evolution strategies.

    `train/grad_norm` includes the weight decay.
    """

    policy_grad_norm = Event("L2 norm of the estimated gradient, without weight decay.")
    policy_norm = Event("L2 norm of the parameters before the update.")
    update_ratio = Event("L2 norm of the step divided by that of the parameters.")
    fitness_std = Event("Deviation of the returns over the population.")
    noise_stddev = Event("Deviation of the perturbation in the last update.", reduce="last")


class PopulationEvents(EventInterface, prefix="population"):
    """Steps of a population; how many are dropped depends on which process is faster."""

    steps_dropped = Event("Steps so far that no update learned from.", reduce="last")
