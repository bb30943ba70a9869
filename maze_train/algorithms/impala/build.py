"""Builder of IMPALA."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from maze_train.algorithms.actor_critic.build import ActorCriticBuilder
from maze_train.algorithms.impala.config import ImpalaAlgorithmConfig
from maze_train.data.policy_rollouts import PolicyRolloutsReplay
from maze_train.data.rollout_replay import RolloutReplay
from maze_train.rollout.actors import DistributedActors
from maze_train.training.actors import actor_env_maker
from maze_train.training.environments import close_quietly

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from maze_train.training.trainer import Trainer


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
            actor_env_maker(context, self.envs_per_actor),
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
    def source(self) -> Any:
        """The actors."""
        return self.actors.actors

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
        replay: Any = None
        if self.algorithm.replay_size:
            members: dict[str, list[str]] | None = getattr(model, "members", None)
            if members is None:
                replay = self._replay(1, "replay")
            else:
                replay = PolicyRolloutsReplay(
                    {
                        policy: self._replay(len(agents), f"replay/{policy}")
                        for policy, agents in members.items()
                        if agents
                    }
                )
        return {"actors": self.actors, "replay": replay}

    def _replay(self, num_agents: int, stream: str) -> RolloutReplay:
        """Keeps the rollouts of so many agents with one policy."""
        return RolloutReplay(
            self.algorithm.replay_size,
            self.algorithm.num_replayed,
            self.envs_per_actor * num_agents,
            self.context.seeds.integer(stream),
        )

    def before_training(self, trainer: Trainer) -> None:
        """Take statistics of observations, if there are none, in environments of their own."""
        super().before_training(trainer)
        self.close_env()
