"""Builder of IMPALA."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from maze_train.algorithms.actor_critic.build import ActorCriticBuilder
from maze_train.algorithms.impala.config import ImpalaAlgorithmConfig
from maze_train.rollout.actors import DistributedActors
from maze_train.targets import locate
from maze_train.training.environments import build_vector_env, close_quietly
from maze_train.workers.places import ThisProcess

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from maze_train.training.trainer import Trainer


REPLAY = "maze_train.data.rollout_replay.RolloutReplay"
"""Keeps rollouts to learn from again, where `algorithm.replay_size` asks for it."""


class ImpalaBuilder(ActorCriticBuilder[ImpalaAlgorithmConfig]):
    """Builds actors that collect experience, and a learner that takes it in as it comes."""

    @cached_property
    def actors(self) -> DistributedActors:
        """Actors that collect experience, closed at the end of the run.

        In this process they take turns, so no rollout waits, the policy lags only as far as
        `broadcast_interval` makes it, and the numbers are the same each time. Elsewhere they act
        while the learner learns; what is learned from depends on which of them is faster.
        """
        context, config = self.context, self.algorithm
        actors = DistributedActors(
            partial(
                build_vector_env,
                [context.env_factory] * self.envs_per_actor,
                context.env,
                ThisProcess(),  # that of the actor
                config.on_non_finite_step,
            ),
            config.num_actors,
            self.envs_per_actor,
            config.n_rollout_steps,
            context.seeds.integer,
            context.place,
            queue_size=config.queue_size,
            allow_new_episodes=context.checkpoint.allow_new_episodes,
            info_keys=context.info_keys,
        )
        context.closing.callback(close_quietly, actors)
        return actors

    @property
    def envs_per_actor(self) -> int:
        """Environments of each actor."""
        return self.context.concurrency // self.algorithm.num_actors

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        return self.actors.spaces

    def trainer_parts(self, model: nn.Module) -> Mapping[str, Any]:
        """Actors that know the model, and a replay of rollouts if there is to be one."""
        self.actors.begin(model, self.model_maker())
        replay = None
        if self.algorithm.replay_size:
            replay = locate(REPLAY)(
                self.algorithm.replay_size,
                self.algorithm.num_replayed,
                self.envs_per_actor,
                self.context.seeds.integer("replay"),
            )
        return {"actors": self.actors, "replay": replay}

    def before_training(self, trainer: Trainer) -> None:
        """Take statistics of observations, if there are none, in environments of their own."""
        super().before_training(trainer)
        self.close_env()
