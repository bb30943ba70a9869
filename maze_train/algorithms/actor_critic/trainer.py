"""The training loop that A2C and PPO share: a rollout, an update."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from maze_train.training.events import TimeEvents
from maze_train.training.trainer import Trainer

if TYPE_CHECKING:
    from maze_train.events import Statistics
    from maze_train.learner.config import Progress
    from maze_train.nets.actor_critic import ActorCriticModel
    from maze_train.rollout.collector import RolloutCollector


class ActorCritic(Trainer):
    """Base of on-policy actor-critic trainers.

    Args:
        config: Settings of the algorithm.
        learners: The learners.
        model: The model that the learner updates and the collector acts with.
        services: Tracker, evaluator, model selection, limits, checkpoints.
        collector: Collects rollouts.
    """

    model: ActorCriticModel

    def __init__(self, *args: Any, collector: RolloutCollector) -> None:
        super().__init__(*args)
        self.collector = collector

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Collect one rollout and learn from it."""
        started = time.perf_counter()
        experience, episodes = self.collector.collect(self.model)
        collected = time.perf_counter()
        episodes.record(statistics)
        episodes.check_steps()
        statistics.merge(self.learners.update(experience, progress))
        statistics.record(TimeEvents.collect_s, collected - started)
        statistics.record(TimeEvents.env_s, self.collector.env_s)
        statistics.record(TimeEvents.update_s, time.perf_counter() - collected)
        return episodes.steps

    def state_dict(self) -> dict[str, Any]:
        """Everything that influences later numbers; valid between two updates."""
        return {**super().state_dict(), "collector": self.collector.state_dict()}

    def load_experience(self, state: dict[str, Any]) -> None:
        """Put the environments where they were."""
        lost = torch.from_numpy(self.collector.load_state_dict(state["collector"]))
        if lost.any():
            self.learners.foreach_learner(lambda learner: learner.forget_episodes(lost))
