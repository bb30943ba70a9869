"""Trainer of A2C and PPO."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from maze_train.algorithms.actor_critic.config import ActorCriticConfig
from maze_train.algorithms.actor_critic.learner import ActorCriticLearner
from maze_train.collect.collector import Collector, RolloutCollector
from maze_train.core.events import Statistics
from maze_train.core.targets import locate
from maze_train.envs.vector import MazeVectorEnv
from maze_train.learner.config import Progress
from maze_train.nets.actor_critic import ActorCriticModel
from maze_train.nets.normalization import find_normalizer
from maze_train.training.events import TimeEvents
from maze_train.training.models import modules_of
from maze_train.training.trainer import Run, Trainer

if TYPE_CHECKING:
    from typing import Self


class ActorCritic(Trainer):
    """Base class of on-policy actor-critic trainers, which alternate between rollouts and updates.

    Args:
        run: Objects of the run, with the learners and the model, which also acts.
        collector: Collects rollouts.
    """

    model: ActorCriticModel

    def __init__(self, run: Run, *, collector: Collector) -> None:
        super().__init__(run)
        self.collector = collector

    @classmethod
    def build(cls, run: Run) -> Self:
        """Build the collector of rollouts, with a league if policies play against snapshots."""
        config = settings_of(run)
        collector = run.make_collector(config.n_rollout_steps, run.model, **turn_options(run))
        policies = run.config.policies.items()
        opponents = {key: own.opponents for key, own in policies if own.opponents is not None}
        if opponents:
            from maze_train.training.league import make_league_collector

            collector = make_league_collector(run, collector, opponents)
        return cls(run, collector=collector)

    def before_training(self) -> None:
        """Collect initial observation statistics if the model has none."""
        begin_statistics(self.run)

    @property
    def stepping(self) -> RolloutCollector | None:
        """The collector that steps the environments; None with actors."""
        return self.collector.stepping

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Collect one rollout, and update the model with the rollout."""
        started = time.perf_counter()
        experience, episodes = self.collector.collect(self.model)
        collected = time.perf_counter()
        episodes.record(statistics, self.run.infos)
        episodes.check_steps()
        self.callbacks.call("on_rollout_end", seen=experience)
        statistics.merge(self.learners.update(experience, progress))
        statistics.record(TimeEvents.collect_s, collected - started)
        statistics.record(TimeEvents.env_s, self.collector.env_s)
        statistics.record(TimeEvents.update_s, time.perf_counter() - collected)
        return episodes.steps

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trainer and the collector; call between updates."""
        return {**super().state_dict(), "collector": self.collector.state_dict()}

    def load_experience(self, state: dict[str, Any]) -> None:
        """Restore the environments."""
        lost = torch.from_numpy(self.collector.load_state_dict(state["collector"]))
        self.exact = self.exact and self.collector.is_exact
        if lost.any():
            self.learners.foreach_learner(lambda learner: learner.forget_episodes(lost))


def settings_of(run: Run) -> ActorCriticConfig:
    """Return the settings of an actor-critic."""
    config = run.config.algorithm
    assert isinstance(config, ActorCriticConfig)
    return config


def turn_options(run: Run) -> dict[str, Any]:
    """Return the arguments of `Run.make_collector` for multi-agent training.

    Turns are padded to whole sequences, and the log-probabilities are recorded if the loss uses
    them.
    """
    learner_class = locate(run.config.algorithm.learner_class, "algorithm.learner_class")
    is_known = issubclass(learner_class, ActorCriticLearner)
    return {
        "records_log_probs": is_known and learner_class.needs_old_log_probs,
        "turns": {"multiple": settings_of(run).sequence_length or 1},
    }


def begin_statistics(run: Run, make_env: Callable[[], MazeVectorEnv] | None = None) -> None:
    """Collect initial observation statistics if the model has none.

    Args:
        run: The run.
        make_env: See `Run.begin_statistics`.
    """
    normalizers = {key: find_normalizer(own) for key, own in modules_of(run.model).items()}
    num_steps, options = settings_of(run).n_rollout_steps, turn_options(run)
    run.begin_statistics(normalizers, num_steps, run.model, make_env=make_env, **options)
