"""Trainer and builder for A2C and PPO."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from maze_train.algorithms.actor_critic.config import ActorCriticConfig
from maze_train.algorithms.actor_critic.learner import ActorCriticLearner
from maze_train.collect.collector import Collector, RolloutCollector
from maze_train.core.errors import ConfigError
from maze_train.core.events import Statistics
from maze_train.core.targets import locate
from maze_train.learner.config import Progress
from maze_train.learner.learners import Learners
from maze_train.nets.actor_critic import ActorCriticModel
from maze_train.nets.normalization import find_normalizer
from maze_train.training.builder import AlgorithmBuilder, BuildContext
from maze_train.training.config import AlgorithmConfig
from maze_train.training.events import TimeEvents
from maze_train.training.models import modules_of
from maze_train.training.services import TrainerServices
from maze_train.training.trainer import Trainer

if TYPE_CHECKING:
    from maze_train.data.turns import TurnOptions


class ActorCritic(Trainer):
    """Base class of on-policy actor-critic trainers, which alternate between rollouts and updates.

    Args:
        config: Settings of the algorithm.
        learners: The learners.
        model: The model being trained, which the collector also uses for acting.
        services: Tracker, evaluator, model selection, limits, checkpoints.
        collector: Collects rollouts.
    """

    model: ActorCriticModel

    def __init__(
        self,
        config: AlgorithmConfig,
        learners: Learners,
        model: nn.Module,
        services: TrainerServices,
        *,
        collector: Collector,
    ) -> None:
        super().__init__(config, learners, model, services)
        self.collector = collector

    @property
    def stepping(self) -> RolloutCollector | None:
        """The collector that steps the environments; None with actors."""
        return self.collector.stepping

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Collect one rollout, and update the model with the rollout."""
        started = time.perf_counter()
        experience, episodes = self.collector.collect(self.model)
        collected = time.perf_counter()
        episodes.record(statistics, self.infos)
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


Config = TypeVar("Config", bound=ActorCriticConfig)


class ActorCriticBuilder(AlgorithmBuilder[Config]):
    """Builder for on-policy actor-critics.

    Args:
        context: Configuration, seeds, device and factories of the run.

    Raises:
        ConfigError: If `sequence_length` is set, but no policy is recurrent.
    """

    def __init__(self, context: BuildContext[Config]) -> None:
        super().__init__(context)
        own = (policy.model for policy in context.config.policies.values() if policy.model)
        models = (context.config.model, *own)
        if self.algorithm.sequence_length and all(model.rnn is None for model in models):
            raise ConfigError(
                "algorithm.sequence_length",
                "only for recurrent policies: set model.rnn or policies.<id>.model.rnn, or remove "
                "this setting",
                self.algorithm.sequence_length,
            )

    def trainer_parts(self, model: nn.Module) -> Mapping[str, Any]:
        """Build the collector of rollouts, with a league if policies play against snapshots."""
        collector = self.make_collector(self.algorithm.n_rollout_steps, model)
        policies = self.config.policies.items()
        opponents = {key: own.opponents for key, own in policies if own.opponents is not None}
        make_league = self.context.features.make_league
        if make_league is not None:
            collector = make_league(self, collector, model, opponents)
        return {"collector": collector}

    @property
    def records_log_probs(self) -> bool:
        """Whether the loss uses the log-probabilities at collection time."""
        learner_class = locate(self.algorithm.learner_class, "algorithm.learner_class")
        is_known = issubclass(learner_class, ActorCriticLearner)
        return is_known and learner_class.needs_old_log_probs

    @property
    def turn_options(self) -> TurnOptions:
        """Pad the turns to whole sequences."""
        return {"multiple": self.algorithm.sequence_length or 1}

    def before_training(self, trainer: Trainer) -> None:
        """Collect initial observation statistics if the model has none."""
        modules = modules_of(trainer.model)
        normalizers = {key: find_normalizer(own) for key, own in modules.items()}
        self.begin_statistics(normalizers, self.algorithm.n_rollout_steps, trainer.model)
