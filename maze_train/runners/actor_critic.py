"""Runner of A2C and PPO."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from maze_train.algorithms.actor_critic.config import ActorCriticConfig
from maze_train.errors import ConfigError
from maze_train.learner.group import LearnerGroup
from maze_train.nets.actor_critic import ActorCriticModel, build_actor_critic
from maze_train.runners.base import TrainingRunner
from maze_train.runners.vector_envs import begin_statistics
from maze_train.targets import locate

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from maze_train.config.pipeline import PreparedRun
    from maze_train.envs.factory import EnvFactory
    from maze_train.learner.learner import Learner
    from maze_train.training.trainer import Trainer

__all__ = ["ACRunner"]


class ACRunner(TrainingRunner):
    """Runs actor-critics.

    Args:
        prepared: The configuration and what the run begins with; the algorithm is
            an `ActorCriticConfig`.
        env_factory: Builds the environments instead of what `config.env` names.
    """

    algorithm_class: ClassVar[type[ActorCriticConfig]] = ActorCriticConfig
    """Class that the settings of the algorithm have to have."""

    def __init__(self, prepared: PreparedRun, env_factory: EnvFactory | None = None) -> None:
        super().__init__(prepared, env_factory)
        if not isinstance(self.config.algorithm, self.algorithm_class):
            raise ConfigError(
                "algorithm",
                f"expected settings of the class {self.algorithm_class.__name__}",
                type(self.config.algorithm).__name__,
            )
        self.algorithm = self.config.algorithm
        if self.algorithm.sequence_length and self.config.model.memory is None:
            raise ConfigError(
                "algorithm.sequence_length",
                "only a policy with a memory learns from sequences: set model.memory",
                self.algorithm.sequence_length,
            )

    def build_model(self) -> ActorCriticModel:
        """Policy and critic for the spaces of the environment, and their learner."""
        model = self.model_maker()()
        learner_class = locate(self.algorithm.learner_class)
        self._learner: Learner[Any, Any, Any] = learner_class(
            model, self.algorithm, device=self.device, seed=self.seeds.integer("minibatches")
        )
        return model

    def model_maker(self) -> Callable[[], ActorCriticModel]:
        """Return a builder of policy and critic, with the same initial weights each time."""
        observation_space, action_space = self.spaces
        seed = self.seeds.integer("model")
        return partial(build_actor_critic, self.config.model, observation_space, action_space, seed)

    def build_trainer(self, model: nn.Module, **services: Any) -> Trainer:
        """The trainer, with a collector on the vector environments of this runner."""
        collector = self.make_collector(self.algorithm.n_rollout_steps)
        trainer_class = locate(self.algorithm.trainer_class)
        group = LearnerGroup(self._learner)
        trainer: Trainer = trainer_class(
            self.algorithm, group, model, collector=collector, **services
        )
        return trainer

    def before_training(self, trainer: Trainer) -> None:
        """Take statistics of observations, if there are none."""
        model = trainer.model
        assert isinstance(model, ActorCriticModel)
        begin_statistics(
            model.normalizer,
            self.config.model.normalization,
            lambda: self.make_collector(self.algorithm.n_rollout_steps, "normalization/"),
            model,
        )
