"""The DQN trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maze_train.algorithms.dqn.events import DQNEvents
from maze_train.algorithms.off_policy.trainer import OffPolicy

if TYPE_CHECKING:
    from maze_train.algorithms.dqn.config import DQNAlgorithmConfig
    from maze_train.events import Statistics
    from maze_train.learner.config import Progress


class DQN(OffPolicy):
    """Deep Q-learning: acts at random with probability epsilon; see `DQNLearner`."""

    algorithm_config: DQNAlgorithmConfig

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Set epsilon, step the environments, and learn meanwhile."""
        setting = self.algorithm_config.exploration
        self.explore(DQNEvents.epsilon, setting, progress, statistics)
        return super().update_once(progress, statistics)
