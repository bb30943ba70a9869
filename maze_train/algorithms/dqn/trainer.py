"""The DQN trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maze_train.algorithms.dqn.events import DQNEvents
from maze_train.algorithms.off_policy.trainer import OffPolicy
from maze_train.learner.config import scheduled_value
from maze_train.training.models import modules_of

if TYPE_CHECKING:
    from maze_train.algorithms.dqn.config import DQNAlgorithmConfig
    from maze_train.events import Statistics
    from maze_train.learner.config import Progress


class DQN(OffPolicy):
    """Deep Q-learning: acts at random with probability epsilon; see `DQNLearner`."""

    algorithm_config: DQNAlgorithmConfig

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Set epsilon, step the environments, and learn meanwhile."""
        epsilon = scheduled_value(self.algorithm_config.exploration, progress)
        for module in modules_of(self.model).values():
            if hasattr(module, "epsilon"):  # all but those that never learn
                module.epsilon.fill_(epsilon)
        statistics.record(DQNEvents.epsilon, epsilon)
        return super().update_once(progress, statistics)
