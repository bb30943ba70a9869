"""Events of DQN."""

from __future__ import annotations

from maze_train.events import Event
from maze_train.learner.steps import LearnerEvents


class DQNEvents(LearnerEvents):
    """Statistics of DQN learners, means over gradient steps unless said otherwise.

    All but epsilon are empty while the buffer is filled for the first time.
    """

    critic_loss = Event("Loss of the values, see `algorithm.loss`.")
    critic_value = Event("Value of the actions in the batch.")
    epsilon = Event("Probability of a random action in the last update.", reduce="last")
