"""Runners of IMPALA."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from maze_train.algorithms.impala.config import ImpalaAlgorithmConfig
from maze_train.data.rollout_replay import RolloutReplay
from maze_train.learner.group import LearnerGroup
from maze_train.nets.actor_critic import ActorCriticModel
from maze_train.rollout.actors import DistributedActors
from maze_train.runners.actor_critic import ACRunner
from maze_train.runners.parts import close_quietly
from maze_train.runners.vector_envs import begin_statistics, build_actor_env
from maze_train.targets import locate

if TYPE_CHECKING:
    from torch import nn

    from maze_train.algorithms.actor_critic.config import ActorCriticConfig
    from maze_train.algorithms.impala.trainer import IMPALA
    from maze_train.config.train_config import TrainConfig
    from maze_train.envs.factory import EnvFactory
    from maze_train.training.trainer import Trainer

__all__ = ["ImpalaRunner"]


class ImpalaRunner(ACRunner):
    """Runs IMPALA.

    Args:
        config: The configuration; its algorithm is an `ImpalaAlgorithmConfig`.
        env_factory: Builds the environments instead of what `config.env` names.
    """

    algorithm_class: ClassVar[type[ActorCriticConfig]] = ImpalaAlgorithmConfig
    algorithm: ImpalaAlgorithmConfig

    def __init__(self, config: TrainConfig, env_factory: EnvFactory | None = None) -> None:
        super().__init__(config, env_factory)
        self._actors: DistributedActors | None = None

    def build_actors(self, num_envs: int) -> DistributedActors:
        """The actors, with so many environments each, closed at the end of the run.

        In this process they take turns, so no rollout waits, the policy lags only as far as
        `broadcast_interval` makes it, and the numbers are the same each time. Elsewhere they act
        while the learner learns; what is learned from depends on which of them is faster.
        """
        config, algorithm = self.config, self.algorithm
        actors = DistributedActors(
            partial(build_actor_env, self.env_factory, config, num_envs),
            algorithm.num_actors,
            num_envs,
            algorithm.n_rollout_steps,
            self.seeds.integer,
            self.place,
            queue_size=algorithm.queue_size,
            allow_new_episodes=config.checkpoint.allow_new_episodes,
        )
        self._closing.callback(close_quietly, actors)
        return actors

    @property
    def actors(self) -> DistributedActors:
        """Actors that collect experience."""
        if self._actors is None:
            self._actors = self.build_actors(self._envs_per_actor)
        return self._actors

    @property
    def _envs_per_actor(self) -> int:
        return self.config.runner.concurrency // self.algorithm.num_actors

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        return self.actors.spaces

    def build_trainer(self, model: nn.Module, **services: Any) -> IMPALA:
        """The trainer, with actors that know the model."""
        self.actors.begin(model, self.model_maker())
        replay = None
        if self.algorithm.replay_size:
            replay = RolloutReplay(
                self.algorithm.replay_size,
                self.algorithm.num_replayed,
                self._envs_per_actor,
                self.seeds.integer("replay"),
            )
        trainer_class = locate(self.algorithm.trainer_class)
        group = LearnerGroup(self._learner)
        trainer: IMPALA = trainer_class(
            self.algorithm, group, model, actors=self.actors, replay=replay, **services
        )
        return trainer

    def before_training(self, trainer: Trainer) -> None:
        """Take statistics of observations, if there are none, with environments of their own."""
        model = trainer.model
        assert isinstance(model, ActorCriticModel)
        begin_statistics(
            model.normalizer,
            self.config.model.normalization,
            lambda: self.make_collector(self.algorithm.n_rollout_steps, "normalization/"),
            model,
        )
        self.close_env()
