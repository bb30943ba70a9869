"""The TD3 trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maze_train.algorithms.off_policy.trainer import OffPolicy
from maze_train.algorithms.td3.events import TD3Events

if TYPE_CHECKING:
    from maze_train.algorithms.td3.config import TD3AlgorithmConfig
    from maze_train.events import Statistics
    from maze_train.learner.config import Progress


class TD3(OffPolicy):
    """TD3: acts with noise of a standard deviation that may change; see `TD3Learner`."""

    algorithm_config: TD3AlgorithmConfig

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Set the noise, step the environments, and learn meanwhile."""
        setting = self.algorithm_config.exploration_noise_stddev
        self.explore(TD3Events.exploration_noise_stddev, setting, progress, statistics)
        return super().update_once(progress, statistics)
