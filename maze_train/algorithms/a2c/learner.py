"""How A2C changes weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from maze_train.algorithms.a2c.config import A2CAlgorithmConfig
from maze_train.algorithms.actor_critic.learner import ActorCriticLearner
from maze_train.functional.policy_loss import policy_gradient_loss_and_gradient

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from maze_train.algorithms.actor_critic.batch import ActorCriticBatch, PreparedRollout
    from maze_train.events import Statistics
    from maze_train.types import Tensor

__all__ = ["A2CLearner"]


class A2CLearner(ActorCriticLearner[A2CAlgorithmConfig]):
    """Advantage actor-critic: one gradient step on the whole rollout.

    Policy loss = -mean(log pi(a_t | s_t) * A_t).

    Source: Mnih et al. (2016), arXiv:1602.01783, section 4 (there with asynchronous workers).
    """

    needs_old_log_probs: ClassVar[bool] = False

    def minibatches(
        self, prepared: Mapping[str, PreparedRollout], statistics: Statistics
    ) -> Iterator[Mapping[str, ActorCriticBatch]]:
        """Everything, once."""
        batches = {key: rollout.whole() for key, rollout in prepared.items() if rollout.num_units}
        if batches:
            yield batches

    def policy_loss(
        self,
        log_probs: Tensor,
        advantages: Tensor,
        batch: ActorCriticBatch,
        statistics: Statistics,
    ) -> tuple[Tensor, Tensor]:
        """Policy gradient loss, 0-d, and its gradient, `[n]`."""
        return policy_gradient_loss_and_gradient(log_probs, advantages)
