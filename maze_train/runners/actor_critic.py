"""Runners of A2C and PPO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maze_train.algorithms.actor_critic.config import ActorCriticConfig
from maze_train.envs.sequential import SequentialVectorEnv
from maze_train.errors import ConfigError
from maze_train.learner.group import LearnerGroup
from maze_train.nets.actor_critic import ActorCriticModel, build_actor_critic
from maze_train.rollout.collector import RolloutCollector
from maze_train.runners.base import TrainingRunner
from maze_train.runners.vector_envs import begin_statistics, local_config, worker_env
from maze_train.targets import locate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gymnasium import Env
    from torch import nn

    from maze_train.algorithms.actor_critic.trainer import ActorCritic
    from maze_train.config.train_config import TrainConfig
    from maze_train.envs.factory import EnvFactory
    from maze_train.envs.vector import MazeVectorEnv
    from maze_train.learner.learner import Learner
    from maze_train.training.trainer import Trainer

__all__ = ["ACDevRunner", "ACLocalRunner", "ACRunner"]


class ACRunner(TrainingRunner):
    """Base of the runners of on-policy actor-critics.

    Args:
        config: The configuration; its algorithm is an `ActorCriticConfig`.
        env_factory: Builds the environments instead of what `config.env` names.
    """

    def __init__(self, config: TrainConfig, env_factory: EnvFactory | None = None) -> None:
        super().__init__(config, env_factory)
        if not isinstance(self.config.algorithm, ActorCriticConfig):
            raise ConfigError(
                "algorithm", "expected an actor-critic", type(config.algorithm).__name__
            )
        self.algorithm = self.config.algorithm
        if self.algorithm.sequence_length and self.config.model.memory is None:
            raise ConfigError(
                "algorithm.sequence_length",
                "only a policy with a memory learns from sequences: set model.memory",
                self.algorithm.sequence_length,
            )
        self._env: MazeVectorEnv | None = None

    @property
    def env(self) -> MazeVectorEnv:
        """The environments that collect experience."""
        if self._env is None:
            self._env = self.make_env(self.config.runner.concurrency)
        return self._env

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        return self.env.env_observation_space, self.env.single_action_space

    def build_model(self) -> ActorCriticModel:
        """Policy and critic for the spaces of the environment, and their learner."""
        observation_space, action_space = self.spaces
        model = build_actor_critic(
            self.config.model, observation_space, action_space, self.seeds.integer("model")
        )
        learner_class = locate(self.algorithm.learner_class)
        self._learner: Learner[Any, Any, Any] = learner_class(
            model, self.algorithm, device=self.device, seed=self.seeds.integer("minibatches")
        )
        return model

    def build_trainer(self, model: nn.Module, **services: Any) -> ActorCritic:
        """The trainer, with a collector on the vector environments of this runner."""
        collector = self._collector("")
        trainer_class = locate(self.algorithm.trainer_class)
        group = LearnerGroup(self._learner)
        trainer: ActorCritic = trainer_class(
            self.algorithm, group, model, collector=collector, **services
        )
        return trainer

    def _collector(self, stream: str) -> RolloutCollector:
        """A collector with random streams of its own."""
        return RolloutCollector(
            self.env,
            self.algorithm.n_rollout_steps,
            env_seed=self.seeds.integer(f"{stream}episodes"),
            action_seed=self.seeds.integer(f"{stream}actions"),
            device=self.device,
            allow_new_episodes=self.config.checkpoint.allow_new_episodes,
        )

    def before_training(self, trainer: Trainer) -> None:
        """Take statistics of observations, if there are none."""
        model = trainer.model
        assert isinstance(model, ActorCriticModel)
        settings = self.config.model.normalization
        begin_statistics(
            model.normalizer, settings, lambda: self._collector("normalization/"), model
        )


class ACDevRunner(ACRunner):
    """Everything in one process, on `SequentialVectorEnv`."""

    @property
    def num_env_threads(self) -> int:
        """One: whatever happens, happens in one thread."""
        return 1

    def build_vector_env(self, factories: Sequence[Callable[[], Env[Any, Any]]]) -> MazeVectorEnv:
        """Environments stepped one after the other."""
        return SequentialVectorEnv(factories, on_non_finite=self.algorithm.on_non_finite)


class ACLocalRunner(ACRunner):
    """Environments in worker processes, on `SubprocVectorEnv`."""

    @property
    def num_env_threads(self) -> int:
        """As many as there would be workers."""
        return local_config(self.config.runner).n_workers

    def build_vector_env(self, factories: Sequence[Callable[[], Env[Any, Any]]]) -> MazeVectorEnv:
        """Environments stepped by worker processes."""
        return worker_env(factories, self.config)
