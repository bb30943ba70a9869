"""Builder of A2C and PPO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from maze_train.algorithms.actor_critic.config import ActorCriticConfig
from maze_train.errors import ConfigError
from maze_train.targets import locate
from maze_train.training.builder import AlgorithmBuilder
from maze_train.training.models import modules_of, with_opponents

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from maze_train.rollout.acting import ActingModel, RecurrentModel
    from maze_train.rollout.collector import RolloutCollector
    from maze_train.rollout.turn_collector import TurnCollector
    from maze_train.training.build_context import BuildContext
    from maze_train.training.trainer import Trainer


Config = TypeVar("Config", bound=ActorCriticConfig)


class ActorCriticBuilder(AlgorithmBuilder[Config]):
    """Builds actor-critics that learn from rollouts.

    Args:
        context: Everything that the algorithm is built from.

    Raises:
        ConfigError: If there are sequences to learn from, and no memory.
    """

    def __init__(self, context: BuildContext[Config]) -> None:
        super().__init__(context)
        own = (policy.model for policy in context.policies.values() if policy.model)
        models = (context.model, *own)
        if self.algorithm.sequence_length and all(model.memory is None for model in models):
            raise ConfigError(
                "algorithm.sequence_length",
                "only a policy with a memory learns from sequences: set model.memory, or "
                "policies.<id>.model.memory",
                self.algorithm.sequence_length,
            )

    def trainer_parts(self, model: nn.Module) -> Mapping[str, Any]:
        """A collector of rollouts."""
        acting: Any = model
        collector = self.make_collector(self.algorithm.n_rollout_steps, acting)
        return {"collector": with_opponents(collector, acting, self.context, self.learners)}

    def make_collector(
        self, num_steps: int, acting: ActingModel | RecurrentModel, stream: str = "", **turns: Any
    ) -> RolloutCollector | TurnCollector:
        """A collector on the environments of this process; turns are such that losses need them."""
        learner_class = locate(self.algorithm.learner_class)
        needed = getattr(learner_class, "needs_old_log_probs", False)
        turns["records_log_probs"] = needed
        turns["multiple"] = self.algorithm.sequence_length or 1
        return super().make_collector(num_steps, acting, stream, **turns)

    def before_training(self, trainer: Trainer) -> None:
        """Take statistics of observations, if there are none."""
        model: Any = trainer.model
        normalizers = {
            key: getattr(own, "normalizer", None) for key, own in modules_of(model).items()
        }
        self.begin_statistics(normalizers, self.algorithm.n_rollout_steps, model)
